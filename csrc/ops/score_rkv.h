#pragma once

#include <optional>

#include "ops/kv_cache_view.h"

namespace kvcore {

// The R-KV score of every live slot of the given rows, all layers and kv heads; higher = keep.
// In order of position, with n = lane_len and past = the n - protect oldest:
//   importance = max-pool_kernel( mean over ring queries of softmax over past of
//                max over the group of scale * q.k );
//                with pool_first the mean of the max-pools instead
//   redundancy = softmax over all n of the column mean (1/n) sum_r S[r, j], where S = cosine
//                similarity (norm + 1e-8) with zero diagonal and, in every row r, the newest entry
//                above `threshold` set to 0 (column of the oldest slot when there is none)
//   score      = mix * importance - (1 - mix) * redundancy          for past slots
//              = +inf for the `protect` newest slots, -inf for s >= lane_len
// float throughout, from storage of any type. Ring queries: the last min(window, seq_len).
// A lane with lane_len <= protect scores +inf everywhere. Throws Error naming row, layer and head
// when a key of a longer lane, or a ring query of any of its query heads, is not finite, leaving
// `score` unspecified. Source: R-KV (arXiv 2505.24133) as in
// the released code; position order instead of slot order.
struct ScoreRkvParams {
  TensorView rows;     // i32 [seqs]
  TensorView score;    // f32 [seqs, layers, kv_heads, slots], out; slots >= every lane_len
  TensorView scratch;  // u8 [>= ScoreRkvScratchBytes]
  int64_t protect = 8;
  int64_t kernel = 7;  // odd
  float mix = 0.1f;    // lambda in [0, 1]
  float threshold = 0.5f;
  bool pool_first = false;     // the order of the paper's eq. 4; false that of the released code
  std::optional<float> scale;  // of the attention, > 0; 1 / sqrt(head_dim) when not given
};

int64_t ScoreRkvScratchBytes(const KvCacheView& view, int64_t max_slots, int threads);

}  // namespace kvcore
