#pragma once

#include "base/tensor_view.h"

namespace kvcore {

// Draws one token per row of logits and measures the raw distribution in the same pass.
//   entropy = -sum p log p in nats of softmax(logits[: vocab]) at temperature 1, before any filter
//   token   = arg-max (lowest id of equals) when temperature is 0; otherwise a draw from
//             softmax(logits / temperature) restricted to probabilities of at least min_p times the
//             largest, then to the top_k largest (0 = all), then to the smallest set of largest
//             probabilities whose sum reaches top_p (the token that crosses is kept), as vLLM does
//             and transformers' warpers in the order temperature, min-p, top-k, top-p. Ids tie by
//             the lower id.
//   logprob = natural log of the token's raw probability (temperature 1, no filter)
// Ids >= vocab are never sampled nor counted (padding rows of the output matrix).
// The draw is UniformDouble(rng_key, rng_counter): nothing else decides it.
// A row with a NaN, with +inf, or with nothing finite gets token -1, entropy and logprob NaN.
struct SampleTokensParams {
  TensorView logits;       // f32, bf16 or f16 [rows, columns], last dim dense
  TensorView temperature;  // f32 [rows], >= 0
  TensorView top_k;        // i32 [rows], 0 = off
  TensorView top_p;        // f32 [rows], in (0, 1]
  TensorView min_p;        // f32 [rows], in [0, 1], 0 = off
  TensorView rng_key;      // i64 [rows], bit pattern of the u64 key
  TensorView rng_counter;  // i64 [rows]
  TensorView token;        // i64 [rows], out
  TensorView entropy;      // f32 [rows], out
  TensorView logprob;      // f32 [rows], out
  TensorView scratch;      // u8 [>= SampleTokensScratchBytes]
  int64_t vocab = 0;       // 1 <= vocab <= columns
};

int64_t SampleTokensScratchBytes(int64_t columns, int threads);

}  // namespace kvcore
