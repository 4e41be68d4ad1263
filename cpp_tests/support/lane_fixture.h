// A cache with owned storage for op tests: shuffled block ids, NaN in unused slots and blocks, a
// huge id in unused table entries, random keys and values everywhere else.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

#include "ops/kv_cache_view.h"

namespace kvcore {

inline constexpr int32_t kUnusedTableEntry = 0x7fff0000;

// A tensor that owns its numbers; contiguous unless strides are given. Copyable.
class OwnedTensor {
 public:
  OwnedTensor() = default;
  // Zeroes.
  OwnedTensor(DType dtype, std::initializer_list<int64_t> shape);
  // As above with explicit strides (elements); storage just holds the last element.
  OwnedTensor(DType dtype, std::initializer_list<int64_t> shape,
              std::initializer_list<int64_t> stride);
  static OwnedTensor I32(const std::vector<int32_t>& values);  // one dimension

  TensorView view() const;
  int64_t numel() const { return layout_.numel(); }
  double Get(std::initializer_list<int64_t> index) const;
  void Set(std::initializer_list<int64_t> index, double value);  // rounds to dtype
  double At(int64_t offset) const;                               // storage offset in elements
  void SetAt(int64_t offset, double value);
  void FillNormal(std::mt19937_64& rng, double scale = 1.0);
  void Fill(double value);  // every storage element, also those that no index reaches
  const std::vector<uint8_t>& bytes() const { return bytes_; }

 private:
  int64_t Offset(std::initializer_list<int64_t> index) const;

  TensorView layout_;
  std::vector<uint8_t> bytes_;
};

struct LaneShape {
  DType dtype = DType::kF32;
  int64_t rows = 1, layers = 1, kv_heads = 1, q_heads = 1;
  int64_t head_dim = 16, max_blocks = 8;
  int64_t window = 0;          // query ring; 0 = none
  int64_t spare_blocks = 3;    // blocks that no lane uses
  int64_t stats_channels = 0;  // of attention_stats, random in live slots; channel c starts at c
};

class LaneFixture {
 public:
  // lane_len has one entry per lane, (row * layers + layer) * kv_heads + head. seq_len of a row is
  // 2 * its longest lane + 3, so that lanes look evicted; positions of a lane are distinct, in
  // random slot order, and contain seq_len - 1. The ring holds random queries at the last
  // min(window, seq_len) positions.
  LaneFixture(const LaneShape& shape, const std::vector<int32_t>& lane_len, uint64_t seed);

  KvCacheView view() const;  // points into this object
  const LaneShape& shape() const { return shape_; }

  int64_t Len(int64_t row, int64_t layer, int64_t head) const;
  // Block id of a slot. REQUIRES: the slot's block is in the table.
  int64_t Block(int64_t row, int64_t layer, int64_t head, int64_t slot) const;
  double Key(int64_t row, int64_t layer, int64_t head, int64_t slot, int64_t dim) const;
  double Value(int64_t row, int64_t layer, int64_t head, int64_t slot, int64_t dim) const;
  int64_t Position(int64_t row, int64_t layer, int64_t head, int64_t slot) const;
  void SetKey(int64_t row, int64_t layer, int64_t head, int64_t slot, int64_t dim, double x);
  void SetValue(int64_t row, int64_t layer, int64_t head, int64_t slot, int64_t dim, double x);
  void SetPosition(int64_t row, int64_t layer, int64_t head, int64_t slot, int64_t position);
  // Counts `count` more tokens in a row (lengths, seq_len, fresh NaN blocks in the table).
  // REQUIRES: spare blocks and table entries suffice.
  void Extend(int64_t row, int64_t count);

  double Stat(int64_t row, int64_t layer, int64_t head, int64_t slot, int64_t channel) const;

  OwnedTensor key_blocks, value_blocks, position, block_table, lane_len, seq_len, query_ring;
  OwnedTensor attention_stats, stats_start;

 private:
  LaneShape shape_;
  std::vector<int32_t> free_blocks_;
};

// Same storage, bit for bit.
bool SameBytes(const OwnedTensor& a, const OwnedTensor& b);

}  // namespace kvcore
