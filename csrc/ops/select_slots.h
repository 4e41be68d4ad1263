#pragma once

#include "ops/kv_cache_view.h"

namespace kvcore {

// Names the slots that each lane drops so that keep[lane] live slots remain: those with the lowest
// score; of equal scores the older position goes first. -0 and +0 are equal; NaN is an Error naming
// the lane. drop_count = max(0, lane_len - keep);
// entries of drop past it are left untouched.
struct SelectSlotsParams {
  TensorView rows;        // i32 [seqs]
  TensorView score;       // f32 [seqs, layers, kv_heads, slots]
  TensorView keep;        // i32 [seqs, layers, kv_heads], >= 0
  TensorView drop;        // i32 [seqs, layers, kv_heads, max_drop], out: slot ids, ascending
  TensorView drop_count;  // i32 [seqs, layers, kv_heads], out
};

}  // namespace kvcore
