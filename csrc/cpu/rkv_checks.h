#pragma once

#include <cmath>
#include <optional>

#include "ops/kv_cache_view.h"

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

}  // namespace kvcore
