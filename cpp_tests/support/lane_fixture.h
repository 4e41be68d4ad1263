// A cache with owned storage for op tests: shuffled block ids, NaN in unused slots and blocks, a
// huge id in unused table entries, random keys and values everywhere else.
#pragma once

#include <cstdint>
#include <vector>

#include "support/cache_tensors.h"

namespace kvcore {

struct LaneShape {
  DType dtype = DType::kF32;
  int64_t rows = 1, layers = 1, kv_heads = 1, q_heads = 1;
  int64_t head_dim = 16, max_blocks = 8;
  int64_t window = 0;                   // query ring; 0 = none
  int64_t spare_blocks = 3;             // blocks that no lane uses
  std::vector<PlaneShape> planes = {};  // random in live slots
  bool notes_not_finite = false;
};

class LaneFixture : public CacheTensors {
 public:
  // lane_len has one entry per lane, (row * layers + layer) * kv_heads + head. seq_len of a row is
  // 2 * its longest lane + 3, so that lanes look evicted; positions of a lane are distinct, in
  // random slot order, and contain seq_len - 1. The ring holds random queries at the last
  // min(window, seq_len) positions.
  LaneFixture(const LaneShape& shape, const std::vector<int32_t>& lane_len, uint64_t seed);

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

  // Of a plane, the first one unless another is named.
  double Number(int64_t row, int64_t layer, int64_t head, int64_t slot, int64_t channel,
                size_t plane = 0) const;

 private:
  LaneShape shape_;
  std::vector<int32_t> free_blocks_;
};

}  // namespace kvcore
