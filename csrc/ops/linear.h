#pragma once

#include <cstdint>

#include "base/tensor_view.h"

namespace kvcore {

// A linear layer over packed weights: weight[p, k, j] is that of output 16 p + j and input k.
//   sum[r, n] = bias[n] + x[r, 0] weight[n, 0] + x[r, 1] weight[n, 1] + ..., in float, in this
//   order plain: out[r, n] = sum[r, n] gated: panels alternate, a gate's and the one it gates;
//   out[r, 16 p + j] =
//          silu(sum of panel 2 p, output j) * (sum of panel 2 p + 1, output j), silu(z) = z / (1 +
//          e^-z)
// The order of a sum depends on nothing else, so a row's bits are the same in every batch and with
// any number of threads. Weights in bf16 are taken as the floats that they stand for.
struct LinearParams {
  TensorView x;       // f32 [rows, inputs], dense inputs
  TensorView weight;  // f32 or bf16 [panels, inputs, 16]
  TensorView bias;    // f32 [panels, 16], optional
  TensorView out;     // f32 [rows, outputs], out, dense outputs; shares no memory with the others
  bool gated = false;
};

}  // namespace kvcore
