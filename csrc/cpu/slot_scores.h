// What the operations that write or read one score per slot share.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
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
  const LanesOfRows lanes(view, rows);
  int64_t longest = 0;
  for (int64_t i = 0; i < lanes.size(); ++i) {
    lanes[i].Check();
    longest = std::max<int64_t>(longest, lanes[i].len);
  }
  KV_CHECK(score.shape[3] >= longest)
      << "score: expected a place for " << longest << " slots, got " << score.ShapeString();
  return longest;
}

// Checks that no lane of the rows is longer than its sequence: then a lane that holds something has
// a newest query. REQUIRES: CheckSlotScores passed. Throws Error.
inline void CheckSeqLens(const KvCacheView& view, const TensorView& rows) {
  const LanesOfRows lanes(view, rows);
  for (int64_t i = 0; i < lanes.size(); ++i) {
    const Lane lane = lanes[i];
    KV_CHECK(lane.seq_len() >= lane.len) << "seq_len: expected at least lane_len " << lane.len
                                         << ", got " << lane.seq_len() << " in " << lane.Name();
  }
}

// Positions of a lane's slots, in slot order.
inline void LanePositions(const Lane& lane, std::vector<int32_t>* position) {
  position->resize(static_cast<size_t>(lane.len));
  lane.Positions(position->data());
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
  // The lanes outlive this.
  explicit FirstBadLane(const LanesOfRows& lanes) : lanes_(lanes), first_(lanes.size()) {}
  void Add(int64_t index) {
    int64_t known = first_.load();
    while (index < known && !first_.compare_exchange_weak(known, index)) {
    }
  }
  // Throws Error naming the lane if there is one.
  void Check(const char* op, const char* cause) const {
    KV_CHECK(first_ == lanes_.size()) << op << ": expected finite scores, got NaN or infinity in "
                                      << lanes_[first_].Name() << "; " << cause;
  }

 private:
  const LanesOfRows& lanes_;
  std::atomic<int64_t> first_;
};

}  // namespace kvcore
