// The index tensors of a ragged batch (ops/batch.h), filled from a store.
#pragma once

#include <cstdint>
#include <vector>

#include "store/kv_store.h"

namespace kvcore {

// Describes the counts[i] newest tokens of each seqs[i], sequence after sequence. Call after the
// Extend that made room for them: the tokens' positions are seq_len - count .. seq_len - 1.
//   rows       i32 [seqs], out
//   cu_tokens  i32 [seqs + 1], out
//   positions  i64 [sum of counts], out
// Throws Error, writing nothing, if a tensor does not fit, a sequence is not live or comes twice,
// or a count is negative or above SeqLen.
void FillBatch(const KvStore& store, const std::vector<SeqId>& seqs,
               const std::vector<int64_t>& counts, const TensorView& rows,
               const TensorView& cu_tokens, const TensorView& positions);

}  // namespace kvcore
