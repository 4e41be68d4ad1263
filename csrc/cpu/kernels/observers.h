// What attention can let a policy see of its pass over a lane: one small type each.
//
// An observer may bring query rows of its own (kExtraRows, packed by PackExtra) and is shown the
// products of all rows, the model's first, once the lane has been read: row r at
// t.kept + r * t.kept_stride, one float per slot, before scaling. It is chosen at compile time.
#pragma once

#include "cpu/attend_kernels.h"
#include "cpu/kernels/rkv_stream.h"

namespace kvcore {
namespace KV_ISA_NAMESPACE {
namespace {

struct NoObserver {
  static constexpr int kExtraRows = 0;
  template <typename T>
  static KV_INLINE void PackExtra(const AttendTile&, float*) {}
  template <typename T>
  static KV_INLINE void Finish(const AttendTile&) {}
};

// The state of R-KV (ops/rkv_state.h), for a lane whose token has just overwritten a slot.
struct RkvObserver {
  static constexpr int kExtraRows = 2;  // the new key, the key it has replaced

  template <typename T>
  static KV_INLINE void PackExtra(const AttendTile& t, float* q) {
    T key[256];
    UnpackKey(*t.rkv, *t.elected, key);
    KeyDot<T>::PackQuery(key, t.head_dim, q);
    KeyDot<T>::PackQuery(static_cast<const T*>(t.replaced_key), t.head_dim, q + kQueryStride);
  }

  template <typename T>
  static KV_INLINE void Finish(const AttendTile& t) {
    const RkvLane& lane = *t.rkv;
    const int64_t padded = (lane.len + kWidth - 1) / kWidth * kWidth;
    float* logit = t.kept;
    float* const new_dot = t.kept + t.num_rows * t.kept_stride;
    float* const old_dot = new_dot + t.kept_stride;
    for (int64_t j = 0; j < padded; j += kWidth) {
      F top = Load<F>(t.kept + j);
      for (int64_t r = 1; r < t.num_rows; ++r)
        top = Max<kWidth>(Load<F>(t.kept + r * t.kept_stride + j), top);
      Store(logit + j, top * t.scale);
    }
    for (int64_t j = lane.len; j < padded; ++j) logit[j] = -kInfinity, new_dot[j] = old_dot[j] = 0;
    if (!Replace<T>(lane, *t.elected, t.position, new_dot, old_dot)) {
      *t.elected = kNotFinite;
      return;
    }
    SetWeights(lane, t.position % lane.window, logit);
    *t.elected = Elect(lane);
  }
};

}  // namespace
}  // namespace KV_ISA_NAMESPACE
}  // namespace kvcore
