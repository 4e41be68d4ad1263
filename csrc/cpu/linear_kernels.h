// The per-level kernel behind LinearCpu: all rows of a run of panels.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "ops/linear_layout.h"

namespace kvcore {

struct LinearRunArgs {
  const float* x;      // [rows, inputs], rows `x_stride` apart
  const void* weight;  // [panels, inputs, kLinearPanel]; an even number of panels if gated
  const float* bias;   // [panels, kLinearPanel], or null
  float* out;          // [rows, columns], rows `out_stride` apart
  int64_t rows, inputs, panels, columns, x_stride, out_stride;
  bool is_bf16, gated;
};

struct LinearKernels {
  void (*run)(const LinearRunArgs& args);
};
KV_DECLARE_ISA_TABLE(LinearKernels, kLinearKernels)

}  // namespace kvcore
