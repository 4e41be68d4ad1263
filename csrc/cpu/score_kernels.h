// The per-level kernel behind ScoreRkvCpu: everything about one lane but the order of its slots.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "cpu/isa.h"

namespace kvcore {

// Position-ordered entries are handled in panels of this many; scratch rows are padded to them.
inline constexpr int64_t kScorePanel = 32;

struct ScoreLaneArgs {
  const void* key_blocks;      // T, layout of kv_layout.h
  const int32_t* block_table;  // of this lane
  const int32_t* order;        // [len] slots by ascending position
  const void* const* queries;  // [num_queries * group] rows of head_dim, group innermost
  float* score;                // [len] by slot, out: finite for the past, +inf for the protected
  char* scratch;               // ScoreLaneScratchBytes, aligned to 64
  DType dtype;
  int64_t len, head_dim, group, num_queries, protect, kernel;
  float mix, threshold, scale;
  bool pool_first;
};

// REQUIRES: len > protect >= 0, num_queries >= 1.
int64_t ScoreLaneScratchBytes(int64_t len, int64_t head_dim, int64_t group, int64_t num_queries);

struct ScoreKernels {
  // False when a key or a query is not finite, or a score is not.
  bool (*score_lane)(const ScoreLaneArgs& args);
};
KV_DECLARE_ISA_TABLE(ScoreKernels, kScoreKernels)

}  // namespace kvcore
