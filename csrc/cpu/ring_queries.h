#pragma once

#include "ops/lane.h"

namespace kvcore {

// queries[t * group + g] = the row of head_dim that place t of the ring holds of query head g of
// the lane, for the places in use, whose number is returned. Their order does not follow positions.
inline int64_t RingQueries(const Lane& lane, const void** queries) {
  const KvCacheView& view = lane.view;
  const int64_t group = view.num_q_heads() / view.num_kv_heads();
  const int64_t count = view.NumQueries(lane.row());
  const int64_t row_bytes = view.head_dim * DTypeBytes(view.dtype());
  for (int64_t g = 0; g < group; ++g) {
    const char* ring = view.Ring(lane.row(), lane.layer(), lane.head() * group + g);
    for (int64_t t = 0; t < count; ++t) queries[t * group + g] = ring + t * row_bytes;
  }
  return count;
}

}  // namespace kvcore
