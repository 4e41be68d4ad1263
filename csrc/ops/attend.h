#pragma once

#include "ops/batch.h"
#include "ops/kv_cache_view.h"
#include "ops/rkv_state.h"

namespace kvcore {

// out[t, h] = sum_r softmax_r(scale * query[t, h] . k_r) v_r over the slots r that token t may see:
// token i of the c tokens that sequence s brings sees slots [0, lane_len - c + i + 1) of its lane.
// Query head h reads kv head h / (q_heads / kv_heads). Accumulates in float; scale is applied after
// the dot product. A token that sees no slot gets 0 and lse -inf. Decode is the case c = 1.
// The result of a token whose query, or a key or value that it sees, is not finite is NaN in all
// dims, and its position enters not_finite.
// The same bits however tokens are batched and however many threads work.
struct AttendParams {
  TensorView query;  // T   [tokens, q_heads, head_dim], last dim dense, other strides free
  TensorView out;    // T   [tokens, q_heads, head_dim], out, last dim dense; no two elements, here
                     //     and in lse, share memory
  TensorView lse;    // f32 [tokens, q_heads], out, natural log of the softmax denominator; optional
  TensorView scratch;  // u8 [>= AttendScratchBytes]
  RaggedBatch batch;
  int64_t layer = 0;
  float scale = 1.0f;  // finite; > 0 with observe_rkv
  // Every token's attention enters `attention_stats` of the slots it sees. One channel: the sum of
  // the mean over the query heads of a kv head. At least 3 * group channels, for query head g of
  // the group: c = g the largest share that a token gave the slot, c = group + g the smallest, c =
  // 2 * group + g the sum; further channels are left alone. In order of position, in float, the
  // same bits however tokens are batched.
  bool accumulate = false;
  // Keeps lane_state of the lanes whose token came alone and has replaced a slot, and elects the
  // slot that the next one replaces (rkv_state.h). One of the two at most.
  bool observe_rkv = false;
  RkvSettings rkv;
};

// Scratch that `attend` needs for at most `threads` threads.
int64_t AttendScratchBytes(const KvCacheView& view, int threads);

}  // namespace kvcore
