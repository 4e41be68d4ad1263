// What the operations of R-KV share outside of the kernels.
#pragma once

#include <cmath>
#include <optional>

#include "cpu/rkv_lane.h"
#include "ops/lane.h"

namespace kvcore {

// The largest logit of a group is that of its largest product only if the scale is positive.
inline void CheckScale(float scale) {
  KV_CHECK(std::isfinite(scale) && scale > 0)
      << "scale: expected a finite number > 0, got " << scale;
}

// The attention's scale; that of a plain model where none was given.
inline float ScaleOr(std::optional<float> scale, int64_t head_dim) {
  return scale ? *scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
}

// Throws Error naming the setting. REQUIRES: the view has lane_state.
inline void CheckRkvSettings(const KvCacheView& view, const RkvSettings& s) {
  KV_CHECK(s.protect >= view.window()) << "protect: expected at least the window of "
                                       << view.window() << " queries, got " << s.protect;
  KV_CHECK(s.kernel >= 1 && s.kernel % 2 == 1)
      << "kernel: expected an odd number >= 1, got " << s.kernel;
  KV_CHECK(s.mix >= 0 && s.mix <= 1) << "mix: expected a number in [0, 1], got " << s.mix;
  KV_CHECK(s.threshold >= 0 && s.threshold <= 1)
      << "threshold: expected a number in [0, 1], got " << s.threshold;
}

// Points `lane` into a lane's state.
inline void BindState(char* state, const RkvStateLayout& at, RkvLane* lane) {
  lane->capacity = at.capacity;
  lane->elected_rank = reinterpret_cast<int32_t*>(state + at.elected_rank);
  lane->column = reinterpret_cast<double*>(state + at.column);
  lane->weight_sum = reinterpret_cast<double*>(state + at.weight_sum);
  lane->inverse_norm = reinterpret_cast<float*>(state + at.inverse_norm);
  lane->pointer = reinterpret_cast<int32_t*>(state + at.pointer);
  lane->pointer_value = reinterpret_cast<float*>(state + at.pointer_value);
  lane->position = reinterpret_cast<int32_t*>(state + at.position);
  lane->weight = reinterpret_cast<float*>(state + at.weight);
  lane->order = reinterpret_cast<int32_t*>(state + at.order);
  lane->similar = reinterpret_cast<uint8_t*>(state + at.similar);
}

// A lane as all who keep its state see it, but for scratch. REQUIRES: it has a state.
inline RkvLane RkvLaneOf(const Lane& lane, const RkvSettings& settings) {
  const KvCacheView& view = lane.view;
  RkvLane r;
  BindState(lane.State(), view.StateLayout(), &r);
  r.key_blocks = view.key_blocks.data;
  r.table = lane.table;
  r.head_dim = view.head_dim;
  r.len = lane.len;
  r.window = view.window();
  r.protect = settings.protect;
  r.kernel = settings.kernel;
  r.mix = settings.mix;
  r.threshold = settings.threshold;
  r.num_queries = view.NumQueries(lane.row());
  r.scratch = nullptr;
  return r;
}

}  // namespace kvcore
