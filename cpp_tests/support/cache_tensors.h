// The tensors of a cache, whatever it keeps: the one fixture of them for tests and benchmarks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/kv_cache_view.h"
#include "support/owned_tensor.h"

namespace kvcore {

inline constexpr int32_t kUnusedTableEntry = 0x7fff0000;

struct PlaneShape {
  std::string name;
  DType dtype = DType::kF32;
  int64_t channels = 1;  // channel c starts at c
};

struct CacheShape {
  DType dtype = DType::kF32;
  int64_t rows = 4, layers = 2, kv_heads = 2, q_heads = 4;
  int64_t head_dim = 8, max_blocks = 6, blocks = 64;
  int64_t window = 4;             // query ring; 0 = none
  bool replaces = false;          // lanes may have a slot that their next token overwrites
  bool notes_not_finite = false;  // the row state not_finite
  int64_t states = 0;             // of lanes; 0 = none. They need a window and replaces.
  int64_t state_slots = 0;        // longest lane with a state; 0 = whatever fits the table
  std::vector<PlaneShape> planes = {};
};

constexpr bool IsFloat(DType t) {
  return t == DType::kF32 || t == DType::kBF16 || t == DType::kF16;
}

// Keys, values, ring and planes of floats are NaN, lengths and row states garbage and table entries
// huge until somebody writes them. Copyable.
class CacheTensors {
 public:
  explicit CacheTensors(const CacheShape& shape);
  KvCacheView view() const;               // points into this object
  std::vector<uint8_t> Snapshot() const;  // all bytes of all tensors
  void SnapshotInto(std::vector<uint8_t>* bytes) const;
  bool Equals(const std::vector<uint8_t>& snapshot) const;

  OwnedTensor key_blocks, value_blocks, position, block_table, lane_len, seq_len;
  OwnedTensor query_ring, replace, not_finite, lane_state, state_of;
  std::vector<OwnedTensor> planes, starts;

 private:
  std::vector<const OwnedTensor*> All() const;

  CacheShape shape_;
};

}  // namespace kvcore
