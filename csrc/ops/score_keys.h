#pragma once

#include <cstdint>

#include "ops/kv_cache_view.h"

namespace kvcore {

enum class KeyScore : int64_t {
  kNorm = 0,        // -|k|                           (Knorm, arXiv 2406.11430)
  kDifference = 1,  // -cos(k, mean of k_j / |k_j|)   (KeyDiff, arXiv 2504.15364)
};

// Scores that need nothing but the keys, for every live slot of the given rows, all layers and kv
// heads; higher = keep. The mean of kDifference runs over all live slots of the lane, protected
// ones included; norms are taken + 1e-8, so that a zero key scores 0 and divides nothing.
// kNorm is rounded to 17 significant bits: RoPE keeps norms, so the keys of one token have the same
// norm in the first layer but for the forward's rounding errors, which change with its batch.
// Rounded they tie, and the newer stays.
//   score = as KeyScore says, computed in double, rounded to float
//         = +inf for the `protect` slots of newest position, -inf for s >= lane_len
// Throws Error naming row, layer and head when a score is not finite, leaving `score` unspecified.
struct ScoreKeysParams {
  TensorView rows;   // i32 [seqs]
  TensorView score;  // f32 [seqs, layers, kv_heads, slots], out; slots >= every lane_len
  KeyScore kind = KeyScore::kNorm;
  int64_t protect = 8;
};

}  // namespace kvcore
