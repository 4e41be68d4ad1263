// Where one slot's numbers lie inside a block, per back end. The only description of it.
//
// A block is kBlockSlots slots of one lane. CPU keys put slots along vector lanes with pairs of
// dims adjacent, [head_dim/2][16][2]: float and bf16 dot products then need no horizontal sums. CPU
// values, and both on CUDA, are [16][head_dim].
#pragma once

#include <cstdint>

namespace kvcore {

inline constexpr int64_t kBlockSlots = 16;
inline constexpr int64_t kMaxHeadDim = 256;
inline constexpr int64_t kHeadDimMultiple = 8;

constexpr int64_t BlocksFor(int64_t slots) { return (slots + kBlockSlots - 1) / kBlockSlots; }
constexpr int64_t BlockElements(int64_t head_dim) { return kBlockSlots * head_dim; }

// Offsets in elements from the start of a block.
constexpr int64_t CpuKeyOffset(int64_t slot, int64_t dim) {
  return (dim / 2) * (2 * kBlockSlots) + slot * 2 + dim % 2;
}
constexpr int64_t RowMajorOffset(int64_t slot, int64_t dim, int64_t head_dim) {
  return slot * head_dim + dim;
}

}  // namespace kvcore
