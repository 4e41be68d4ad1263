// What attention can let a policy see of its pass over a lane: one small type each, chosen at
// compile time.
//
// An observer may bring query rows of its own (kExtraRows, packed by PackExtra). See() is shown the
// products of every row block with every chunk of slots, before scaling: rows [first, first +
// count) of the tile at s + r * kScoreStride, slots [start, start + num_slots), the extra rows
// behind those of the last block. Finish() is told each row's softmax maximum and sum.
#pragma once

#include "cpu/attend_kernels.h"
#include "cpu/kernels/rkv_stream.h"

namespace kvcore {
namespace KV_ISA_NAMESPACE {
namespace {

struct NoObserver {
  static constexpr int kExtraRows = 0;
  KV_INLINE explicit NoObserver(const AttendTile&) {}
  template <typename T>
  KV_INLINE void PackExtra(float*) {}
  KV_INLINE void See(const float*, int64_t, int64_t, int64_t, int64_t) {}
  template <typename T>
  KV_INLINE void Finish(const float*, const float*) {}
};

// The state of R-KV (ops/rkv_state.h), for a lane whose token has just overwritten a slot.
struct RkvObserver {
  static constexpr int kExtraRows = 2;  // the new key, the key it has replaced

  KV_INLINE explicit RkvObserver(const AttendTile& tile) : t(tile) {
    logit = t.kept;
    new_dot = logit + t.kept_stride;
    old_dot = new_dot + t.kept_stride;
    peak = Splat<kWidth>(-kInfinity);
  }

  template <typename T>
  KV_INLINE void PackExtra(float* q) {
    T key[256];
    UnpackKey(*t.rkv, *t.elected, key);
    KeyDot<T>::PackQuery(key, t.head_dim, q);
    KeyDot<T>::PackQuery(static_cast<const T*>(t.replaced_key), t.head_dim, q + kQueryStride);
  }

  KV_INLINE void See(const float* s, int64_t first, int64_t count, int64_t start,
                     int64_t num_slots) {
    const bool is_last = first + count == t.num_rows;
    for (int64_t j = 0; j < num_slots; j += kWidth) {
      F top = Load<F>(s + j);
      for (int64_t r = 1; r < count; ++r) top = Max<kWidth>(Load<F>(s + r * kScoreStride + j), top);
      top *= t.scale;
      if (first > 0) top = Max<kWidth>(Load<F>(logit + start + j), top);
      if (is_last) {
        Store(new_dot + start + j, Load<F>(s + count * kScoreStride + j));
        Store(old_dot + start + j, Load<F>(s + (count + 1) * kScoreStride + j));
        if (j + kWidth > num_slots)
          top = Iota<kWidth>() < static_cast<int32_t>(num_slots - j) ? top
                                                                     : Splat<kWidth>(-kInfinity);
        peak = Max<kWidth>(top, peak);
      }
      Store(logit + start + j, top);
    }
  }

  template <typename T>
  KV_INLINE void Finish(const float*, const float*) {
    const RkvLane& lane = *t.rkv;
    const int64_t padded = (lane.len + kWidth - 1) / kWidth * kWidth;
    for (int64_t j = lane.len; j < padded; ++j) new_dot[j] = old_dot[j] = 0;
    if (!Replace<T>(lane, *t.elected, t.position, new_dot, old_dot)) {
      *t.elected = kNotFinite;
      return;
    }
    SetWeights(lane, t.position % lane.window, logit, MaxLanes<kWidth>(peak));
    *t.elected = Elect(lane);
  }

  const AttendTile& t;
  float *logit, *new_dot, *old_dot;
  F peak;
};

}  // namespace
}  // namespace KV_ISA_NAMESPACE
}  // namespace kvcore
