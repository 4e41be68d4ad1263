// Which tokens of a flattened ragged batch belong to which row of the cache.
#pragma once

#include "base/tensor_view.h"

namespace kvcore {

// Sequence s of the batch brings tokens [cu_tokens[s], cu_tokens[s + 1]) of row rows[s]. lane_len
// and seq_len already count these tokens when an operation runs: they are the newest slots of each
// lane. A row appears at most once; a sequence may bring 0 tokens.
struct RaggedBatch {
  TensorView rows;       // i32 [seqs]
  TensorView cu_tokens;  // i32 [seqs + 1], starts at 0, never falls
};

}  // namespace kvcore
