// The per-level kernel behind ScoreRkvCpu: everything about one lane but the order of its slots.
#pragma once

#include <cstdint>

#include "base/align.h"
#include "base/dtype.h"
#include "cpu/isa.h"

namespace kvcore {

// Position-ordered entries are handled in panels of this many; scratch rows are padded to them.
inline constexpr int64_t kScorePanel = 32;

// The pieces of ScoreLaneArgs::scratch. `padded` is len, and query_rows the number of queries times
// the group, in whole panels.
struct ScoreLaneScratch {
  float* panels;                              // [padded / 32][head_dim][32]
  float* query_panel;                         // [query_rows / 32][head_dim][32]
  float* logit;                               // [num_queries][padded]
  float *importance, *pooled, *mean, *value;  // [padded]
  double* zeroed;                             // [padded] sum of S[r, p(r)] over rows by p(r)
  double* key_sum;                            // [head_dim][a register], then m in [head_dim]
  int32_t* pointer;                           // [padded]
  uint32_t* open;                             // [padded / 32] rows without p(r) yet, one bit each

  inline __attribute__((always_inline)) ScoreLaneScratch(Carver* carver, int64_t len,
                                                         int64_t head_dim, int64_t query_rows,
                                                         int64_t num_queries) {
    const int64_t panels_len = (len + kScorePanel - 1) / kScorePanel;
    const int64_t query_panels = (query_rows + kScorePanel - 1) / kScorePanel;
    const int64_t padded = panels_len * kScorePanel;
    panels = carver->Take<float>(padded * head_dim);
    query_panel = carver->Take<float>(query_panels * kScorePanel * head_dim);
    logit = carver->Take<float>(num_queries * padded);
    importance = carver->Take<float>(padded);
    pooled = carver->Take<float>(padded);
    mean = carver->Take<float>(padded);
    value = carver->Take<float>(padded);
    zeroed = carver->Take<double>(padded);
    key_sum = carver->Take<double>(head_dim * 8);
    pointer = carver->Take<int32_t>(padded);
    open = carver->Take<uint32_t>(panels_len);
  }
};

struct ScoreLaneArgs {
  const void* key_blocks;      // T, layout of kv_layout.h
  const int32_t* block_table;  // of this lane
  const int32_t* order;        // [len] slots by ascending position
  const void* const* queries;  // [num_queries * group] rows of head_dim, group innermost
  float* score;                // [len] by slot, out: finite for the past, +inf for the protected
  ScoreLaneScratch scratch;
  DType dtype;
  int64_t len, head_dim, group, num_queries, protect, kernel;
  float mix, threshold, scale;
  bool pool_first;
};

struct ScoreKernels {
  // REQUIRES: len > protect >= 0, num_queries >= 1.
  // False when a key or a query is not finite, or a score is not.
  bool (*score_lane)(const ScoreLaneArgs& args);
};
KV_DECLARE_ISA_TABLE(ScoreKernels, kScoreKernels)

}  // namespace kvcore
