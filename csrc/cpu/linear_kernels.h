// The per-level kernel behind LinearCpu: all rows of one panel of outputs.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "ops/linear_layout.h"

namespace kvcore {

struct LinearPanelArgs {
  const float* x;      // [rows, inputs], rows `x_stride` apart
  const void* weight;  // the panel, or the two panels of a gated one
  const float* bias;   // [kLinearPanel] per panel, or null
  float* out;          // [rows, columns], rows `out_stride` apart
  int64_t rows, inputs, columns, x_stride, out_stride;
  bool is_bf16, gated;
};

struct LinearKernels {
  void (*panel)(const LinearPanelArgs& args);
};
KV_DECLARE_ISA_TABLE(LinearKernels, kLinearKernels)

}  // namespace kvcore
