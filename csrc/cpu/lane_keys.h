// Reading the keys of one lane as doubles, one dim of all slots at a time: the order of the CPU
// layout.
#pragma once

#include <vector>

#include "base/dtype.h"
#include "cpu/slot_scores.h"
#include "ops/kv_layout.h"

namespace kvcore {

// f(T{}) with the type that the cache stores.
template <typename F>
auto WithStorage(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBF16:
      return f(BFloat16{});
    case DType::kF16:
      return f(Half{});
    default:
      return f(float{});
  }
}

// column[s] = number `dim` of the key in slot s, for every live slot. Resizes `column`.
inline void KeyColumn(const Lane& lane, int64_t dim, std::vector<double>* column) {
  column->resize(static_cast<size_t>(lane.len));
  WithStorage(lane.view.dtype(), [&](auto t) {
    lane.ForEachBlock([&](int64_t block, int64_t first, int64_t count) {
      const auto* keys = lane.view.key_blocks.ptr<decltype(t)>() +
                         block * BlockElements(lane.view.head_dim) + CpuKeyOffset(0, dim);
      for (int64_t s = 0; s < count; ++s)
        (*column)[static_cast<size_t>(first + s)] = ToFloat(keys[CpuKeyOffset(s, 0)]);
    });
  });
}

// Number `index` of a stored row.
inline double StoredNumber(const char* row, DType dtype, int64_t index) {
  return WithStorage(dtype, [&](auto t) -> double {
    return ToFloat(reinterpret_cast<const decltype(t)*>(row)[index]);
  });
}

}  // namespace kvcore
