#pragma once

#include <cstdint>

#include "ops/kv_cache_view.h"

namespace kvcore {

// The control that every scoring policy must beat: a uniform random score per live slot of the
// given rows, all layers and kv heads.
//   score = UniformFloat(HashKey(HashKey(seed, layer), head), position)
//         = +inf for the `protect` slots of newest position, -inf for s >= lane_len
// A pure function of (seed, layer, head, position): neither the row, nor the slot, nor the other
// sequences of the batch matter, and a token keeps its score as long as it lives.
struct ScoreRandomParams {
  TensorView rows;   // i32 [seqs]
  TensorView score;  // f32 [seqs, layers, kv_heads, slots], out; slots >= every lane_len
  uint64_t seed = 0;
  int64_t protect = 8;
};

}  // namespace kvcore
