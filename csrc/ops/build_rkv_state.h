#pragma once

#include "ops/kv_cache_view.h"

namespace kvcore {

// Fills lane_state of the rows' lanes that hold at least `full` slots and have a state, from their
// keys and the query ring, and elects: `replace` becomes the slot of the lowest R-KV score, of
// equal ones the oldest, or -2 when keys or queries are not finite. Shorter lanes get -1. `scale`
// is the attention's.
struct BuildRkvStateParams {
  TensorView rows;     // i32 [seqs]
  TensorView full;     // i32 [layers, kv_heads], > protect, <= state_slots
  TensorView scratch;  // u8 [>= BuildRkvStateScratchBytes]
  float scale = 1.0f;
  RkvSettings rkv;
};

int64_t BuildRkvStateScratchBytes(const KvCacheView& view, int threads);

}  // namespace kvcore
