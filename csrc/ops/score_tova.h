#pragma once

#include <cstdint>
#include <optional>

#include "ops/kv_cache_view.h"

namespace kvcore {

// What the newest query of a row attends to, for every live slot of the given rows, all layers and
// kv heads; higher = keep.
//   p[g, s] = softmax over the live slots of the lane of query head g of scale * q_g.k_s
//   score   = (1 / q_heads) * sum over all query heads g of the layer of p[g, s'], where s' holds
//             the same position in the lane of g (0 where that lane no longer holds it)
//           = +inf for the `protect` slots of newest position, -inf for s >= lane_len
// A position scores the same in every kv head of a layer, bit for bit: lanes of a layer that hold
// the same positions go on holding the same. Computed in double, rounded to float. Throws Error
// naming row, layer and head when q.k is not finite, leaving `score` unspecified.
// Source: TOVA (arXiv 2401.06104); the query is the ring's at position seq_len - 1.
struct ScoreTovaParams {
  TensorView rows;   // i32 [seqs]
  TensorView score;  // f32 [seqs, layers, kv_heads, slots], out; slots >= every lane_len
  int64_t protect = 8;
  std::optional<float> scale;  // of the attention, > 0; 1 / sqrt(head_dim) when not given
};

}  // namespace kvcore
