// What the operations that write or read one score per slot share.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "cpu/check_lanes.h"

namespace kvcore {

// Checks rows, their lanes, and that `score`, f32 [seqs, layers, kv_heads, slots], has a place for
// every slot of them. Returns the longest lane. Throws Error.
inline int64_t CheckSlotScores(const KvCacheView& view, const TensorView& rows,
                               const TensorView& score) {
  Dims dims;
  CheckRows(view, rows, &dims);
  dims.Bind("layers", view.num_layers());
  dims.Bind("kv_heads", view.num_kv_heads());
  MatchTensor({"seqs", "layers", "kv_heads", "slots"})
      .DType(DType::kF32)
      .Contiguous()
      .Check(score, "score", &dims);
  int64_t longest = 0;
  for (int64_t i = 0; i < rows.shape[0]; ++i)
    for (int64_t layer = 0; layer < view.num_layers(); ++layer)
      for (int64_t head = 0; head < view.num_kv_heads(); ++head) {
        const int64_t row = rows.ptr<int32_t>()[i];
        CheckLane(view, row, layer, head, 0);
        longest =
            std::max<int64_t>(longest, view.lane_len.ptr<int32_t>()[view.LaneId(row, layer, head)]);
      }
  KV_CHECK(score.shape[3] >= longest)
      << "score: expected a place for " << longest << " slots, got " << score.ShapeString();
  return longest;
}

// One lane of a [seqs, layers, kv_heads] batch.
struct BatchLane {
  int64_t row, layer, head, id, len;
  const int32_t* table;

  // REQUIRES: CheckSlotScores passed.
  BatchLane(const KvCacheView& view, const TensorView& rows, int64_t index) {
    const int64_t heads = view.num_kv_heads(), layers = view.num_layers();
    row = rows.ptr<int32_t>()[index / (heads * layers)];
    layer = index / heads % layers;
    head = index % heads;
    id = view.LaneId(row, layer, head);
    len = view.lane_len.ptr<int32_t>()[id];
    table = view.block_table.ptr<int32_t>() + id * view.max_blocks();
  }
  int32_t Position(const KvCacheView& view, int64_t slot) const {
    return view.position
        .ptr<int32_t>()[int64_t{table[slot / kBlockSlots]} * kBlockSlots + slot % kBlockSlots];
  }
  std::string Name() const {
    return "row " + std::to_string(row) + ", layer " + std::to_string(layer) + ", kv head " +
           std::to_string(head);
  }
};

inline int64_t NumBatchLanes(const KvCacheView& view, const TensorView& rows) {
  return rows.shape[0] * view.num_layers() * view.num_kv_heads();
}

// Checks that no lane of the rows is longer than its sequence: then a lane that holds something has
// a newest query. REQUIRES: CheckSlotScores passed. Throws Error.
inline void CheckSeqLens(const KvCacheView& view, const TensorView& rows) {
  for (int64_t index = 0; index < NumBatchLanes(view, rows); ++index) {
    const BatchLane lane(view, rows, index);
    const int64_t seq_len = view.seq_len.ptr<int32_t>()[lane.row];
    KV_CHECK(seq_len >= lane.len) << "seq_len: expected at least lane_len " << lane.len << ", got "
                                  << seq_len << " in " << lane.Name();
  }
}

// Positions of a lane's slots, in slot order.
inline void LanePositions(const KvCacheView& view, const BatchLane& lane,
                          std::vector<int32_t>* position) {
  position->resize(static_cast<size_t>(lane.len));
  for (int64_t slot = 0; slot < lane.len; ++slot)
    (*position)[static_cast<size_t>(slot)] = lane.Position(view, slot);
}

// The oldest of the `protect` newest positions; above every position when protect is 0.
inline int64_t FirstProtected(const std::vector<int32_t>& position, int64_t protect) {
  if (protect == 0) return std::numeric_limits<int64_t>::max();
  if (protect >= static_cast<int64_t>(position.size())) return std::numeric_limits<int64_t>::min();
  thread_local std::vector<int32_t> newest;  // grows to the longest lane, then stays
  newest = position;
  std::nth_element(newest.begin(), newest.begin() + (protect - 1), newest.end(),
                   std::greater<int32_t>());
  return newest[static_cast<size_t>(protect - 1)];
}

// Writes what every policy writes: +inf for the `protect` newest of the lane's positions, -inf past
// its end. `score` has `slots` places.
inline void FinishScores(const std::vector<int32_t>& position, int64_t protect, int64_t slots,
                         float* score) {
  const int64_t first_protected = FirstProtected(position, protect);
  for (size_t slot = 0; slot < position.size(); ++slot)
    if (position[slot] >= first_protected) score[slot] = std::numeric_limits<float>::infinity();
  std::fill(score + position.size(), score + slots, -std::numeric_limits<float>::infinity());
}

// Remembers the first of the lanes that were found bad by several threads.
class FirstBadLane {
 public:
  explicit FirstBadLane(int64_t lanes) : lanes_(lanes), first_(lanes) {}
  void Add(int64_t index) {
    int64_t known = first_.load();
    while (index < known && !first_.compare_exchange_weak(known, index)) {
    }
  }
  // Throws Error naming the lane if there is one.
  void Check(const KvCacheView& view, const TensorView& rows, const char* op,
             const char* cause) const {
    KV_CHECK(first_ == lanes_) << op << ": expected finite scores, got NaN or infinity in "
                               << BatchLane(view, rows, first_).Name() << "; " << cause;
  }

 private:
  int64_t lanes_;
  std::atomic<int64_t> first_;
};

}  // namespace kvcore
