#pragma once

#include "ops/kv_cache_view.h"

namespace kvcore {

// Moves data so that the lanes' surviving slots become the dense prefix [0, lane_len - drop_count):
// each hole below the new length is filled by one survivor above it, in ascending order of both.
// Key, value and position move together; nothing else does. lane_len and tables are left to the
// store. REQUIRES: drop lists are ascending, unique and live; no block that a move writes into is
// shared.
struct EvictSlotsParams {
  TensorView rows;        // i32 [seqs]
  TensorView drop;        // i32 [seqs, layers, kv_heads, max_drop]
  TensorView drop_count;  // i32 [seqs, layers, kv_heads]
};

}  // namespace kvcore
