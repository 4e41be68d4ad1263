// One lane of the fused R-KV pass as the kernels see it.
#pragma once

#include <stdint.h>

#include "cpu/isa.h"
#include "ops/replace.h"
#include "ops/rkv_state.h"

namespace kvcore {

struct RkvLane {
  const void* key_blocks;  // T, layout of kv_layout.h
  const int32_t* table;
  int64_t head_dim;
  int64_t len;  // > protect
  int64_t window, protect, kernel;
  float mix, threshold;
  int64_t num_queries;  // rows of `weight` in use: min(window, seq_len)
  int64_t capacity;
  int32_t* elected_rank;
  double *column, *weight_sum;
  float *inverse_norm, *pointer_value, *weight;
  int32_t *pointer, *position, *order;
  uint8_t* similar;
  float* scratch;  // RkvScratchFloats, aligned to 64
};

// Five padded rows, taken first by similarities and touched slots, then by importance, redundancy
// and both by age; products with the oldest key; two packed query rows.
constexpr int64_t RkvScratchFloats(int64_t capacity) { return 6 * (capacity + 64) + 2 * 272; }

// A lane whose state is built from its keys and its row's query ring.
struct RkvBuild {
  RkvLane lane;                // `order` filled in
  const void* const* queries;  // [num_queries][group] rows of head_dim, by ring cell
  int64_t group;
  float scale;  // of the attention
  float* dots;  // [8][capacity + 16]
};

struct RkvKernels {
  // Fills the whole state and returns the elected slot or kNotFinite; by storage type.
  int32_t (*build_f32)(const RkvBuild& build);
  int32_t (*build_bf16)(const RkvBuild& build);
  int32_t (*build_f16)(const RkvBuild& build);
};
KV_DECLARE_ISA_TABLE(RkvKernels, kRkvKernels)

}  // namespace kvcore
