// What attention can let a policy see of its pass over a lane: one small type each, chosen at
// compile time.
//
// An observer may bring query rows of its own (kExtraRows, packed by PackExtra). See() is shown the
// products of every row block with every chunk of slots, before scaling: rows [first, first +
// count) of the tile at s + r * kScoreStride, slots [start, start + num_slots), the extra rows
// behind those of the last block. Finish() is told each row's softmax maximum and sum; the sum is
// NaN when the row's query, or a key or a value that it sees, is not finite.
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

// Attention that slots have got (AttendParams.accumulate).
struct StatsObserver {
  static constexpr int kExtraRows = 0;
  KV_INLINE explicit StatsObserver(const AttendTile& tile) : t(tile) {}
  template <typename T>
  KV_INLINE void PackExtra(float*) {}

  KV_INLINE void See(const float* s, int64_t first, int64_t count, int64_t start,
                     int64_t num_slots) {
    for (int64_t r = 0; r < count; ++r)
      for (int64_t j = 0; j < num_slots; j += kWidth)
        Store(t.kept + (first + r) * t.kept_stride + start + j, Load<F>(s + r * kScoreStride + j));
  }

  template <typename T>
  KV_INLINE void Finish(const float* max, const float* sum) {
    const bool per_head = t.stats_channels > 1;
    for (int64_t r = 0; r < t.num_rows; ++r) {
      const int64_t row = t.first_row + r, limit = t.limit + row / t.group;
      const float share = 1.0f / (sum[r] * static_cast<float>(per_head ? 1 : t.group));
      const float* const kept = t.kept + r * t.kept_stride;
      for (int64_t j = 0; j < limit; j += kWidth) {
        const F got = ExpBelow80<kWidth>(Load<F>(kept + j) * t.scale - max[r]) * share;
        const auto live = Iota<kWidth>() < static_cast<int32_t>(limit - j);
        float* const slot =
            t.stats + int64_t{t.table[j / kBlock]} * t.stats_channels * kBlock + j % kBlock;
        float* const total = per_head ? slot + (2 * t.group + row % t.group) * kBlock : slot;
        Store(total, Load<F>(total) + (live ? got : F{}));
        if (!per_head) continue;
        float* const smallest = total - t.group * kBlock;
        float* const largest = smallest - t.group * kBlock;
        const F low = Load<F>(smallest), high = Load<F>(largest);
        const F lost = (live ? got : F{}) * 0.0f;  // comparisons would drop a NaN
        Store(smallest, (live && got < low ? got : low) + lost);
        Store(largest, (live && got > high ? got : high) + lost);
      }
    }
  }

  const AttendTile& t;
};

// The state of R-KV (ops/rkv_state.h), for a lane whose token has just overwritten a slot. Without
// redundancy (mix = 1, which is SnapKV) only the weights of the last queries are kept.
template <bool kRedundancy>
struct RkvObserver {
  static constexpr int kExtraRows = kRedundancy ? 2 : 0;  // the new key, the key it has replaced

  KV_INLINE explicit RkvObserver(const AttendTile& tile) : t(tile) {
    logit = t.kept;
    new_dot = logit + t.kept_stride;
    old_dot = new_dot + t.kept_stride;
    peak = Splat<kWidth>(-kInfinity);
  }

  template <typename T>
  KV_INLINE void PackExtra(float* q) {
    if constexpr (!kRedundancy) return;
    T key[256];
    UnpackKey(*t.rkv, *t.elected, key);
    KeyDot<T>::PackQuery(key, t.head_dim, q);
    KeyDot<T>::PackQuery(static_cast<const T*>(t.replaced_key), t.head_dim, q + kQueryStride);
  }

  KV_INLINE void See(const float* s, int64_t first, int64_t count, int64_t start,
                     int64_t num_slots) {
    if (first == 0) FetchState(start, num_slots);
    const bool is_last = first + count == t.num_rows;
    if (!is_last || !kRedundancy) KeepMaximum(s, first, count, start, num_slots);
    if (!is_last) return;
    const float* const mine = s + count * kScoreStride;
    const F minus_inf = Splat<kWidth>(-kInfinity);
    for (int64_t j = 0; j < num_slots; j += kWidth) {
      F top = kRedundancy ? Load<F>(mine + 2 * kScoreStride + j) : Load<F>(logit + start + j);
      if constexpr (kRedundancy) {
        Store(new_dot + start + j, Load<F>(mine + j));
        Store(old_dot + start + j, Load<F>(mine + kScoreStride + j));
        if (first > 0) top = Max<kWidth>(Load<F>(logit + start + j), top);
      }
      top *= t.scale;
      if (j + kWidth > num_slots)
        top = Iota<kWidth>() < static_cast<int32_t>(num_slots - j) ? top : minus_inf;
      peak = Max<kWidth>(top, peak);
      Store(logit + start + j, top);
    }
  }

  template <typename T>
  KV_INLINE void Finish(const float*, const float* sum) {
    const RkvLane& lane = *t.rkv;
    for (int64_t r = 0; r < t.num_rows; ++r)
      if (!(sum[r] - sum[r] == 0.0f)) {
        *t.elected = kNotFinite;
        return;
      }
    if constexpr (kRedundancy) {
      const int64_t padded = (lane.len + kWidth - 1) / kWidth * kWidth;
      for (int64_t j = lane.len; j < padded; ++j) new_dot[j] = old_dot[j] = 0;
      if (!Replace<T>(lane, *t.elected, t.position, new_dot, old_dot)) {
        *t.elected = kNotFinite;
        return;
      }
    } else {
      MakeNewest(lane, *t.elected, t.position);
    }
    SetWeights(lane, t.position % lane.window, logit, MaxLanes<kWidth>(peak));
    *t.elected = Elect<kRedundancy>(lane);
  }

  // The largest product of the block's rows, and of the blocks before.
  KV_INLINE void KeepMaximum(const float* s, int64_t first, int64_t count, int64_t start,
                             int64_t num_slots) {
    for (int64_t j = 0; j < num_slots; j += kWidth) {
      F top = first > 0 ? Load<F>(logit + start + j) : Load<F>(s + j);
      for (int64_t r = 0; r < count; ++r) top = Max<kWidth>(Load<F>(s + r * kScoreStride + j), top);
      Store(logit + start + j, top);
    }
  }

  // The state is wanted once the lane has been read: it may still be in memory.
  KV_INLINE void FetchState(int64_t start, int64_t num_slots) {
    const RkvLane& lane = *t.rkv;
    const auto fetch = [](const void* p) { __builtin_prefetch(p, 1, 3); };
    for (int64_t j = start; j < start + num_slots; j += 16) {  // a line of 4-byte entries
      if constexpr (kRedundancy) {
        fetch(lane.column + j);
        fetch(lane.column + j + 8);
        fetch(lane.inverse_norm + j);
        fetch(lane.pointer + j);
        fetch(lane.pointer_value + j);
      }
      fetch(lane.position + j);
      fetch(lane.order + j);
      for (int64_t q = 0; q < lane.num_queries; ++q) fetch(lane.weight + q * lane.capacity + j);
    }
  }

  const AttendTile& t;
  float *logit, *new_dot, *old_dot;
  F peak;
};

}  // namespace
}  // namespace KV_ISA_NAMESPACE
}  // namespace kvcore
