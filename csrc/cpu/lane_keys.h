// Reading the keys of one lane as doubles, one dim of all slots at a time: the order of the CPU
// layout.
#pragma once

#include <algorithm>
#include <vector>

#include "base/dtype.h"
#include "cpu/slot_scores.h"
#include "ops/kv_layout.h"

namespace kvcore {

template <typename T>
void LoadKeyColumn(const KvCacheView& view, const BatchLane& lane, int64_t dim, double* column) {
  for (int64_t first = 0; first < lane.len; first += kBlockSlots) {
    const T* block = view.key_blocks.ptr<T>() +
                     int64_t{lane.table[first / kBlockSlots]} * BlockElements(view.head_dim);
    const int64_t count = std::min(kBlockSlots, lane.len - first);
    for (int64_t s = 0; s < count; ++s) column[first + s] = ToFloat(block[CpuKeyOffset(s, dim)]);
  }
}

// column[s] = number `dim` of the key in slot s, for every live slot. Resizes `column`.
inline void KeyColumn(const KvCacheView& view, const BatchLane& lane, int64_t dim,
                      std::vector<double>* column) {
  column->resize(static_cast<size_t>(lane.len));
  switch (view.dtype()) {
    case DType::kBF16:
      return LoadKeyColumn<BFloat16>(view, lane, dim, column->data());
    case DType::kF16:
      return LoadKeyColumn<Half>(view, lane, dim, column->data());
    default:
      return LoadKeyColumn<float>(view, lane, dim, column->data());
  }
}

// Number `index` of the query ring.
inline double RingNumber(const KvCacheView& view, int64_t index) {
  switch (view.dtype()) {
    case DType::kBF16:
      return ToFloat(view.query_ring.ptr<BFloat16>()[index]);
    case DType::kF16:
      return ToFloat(view.query_ring.ptr<Half>()[index]);
    default:
      return view.query_ring.ptr<float>()[index];
  }
}

}  // namespace kvcore
