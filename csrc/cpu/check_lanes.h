// Checks that the CPU operations share. They throw Error naming what is wrong and change nothing.
#pragma once

#include <cstdint>

#include "ops/lane.h"

namespace kvcore {

// rows is i32 [seqs], in range, without repetition. Binds "seqs".
void CheckRows(const KvCacheView& view, const TensorView& rows, Dims* dims);

// rows as above and cu_tokens i32 [seqs + 1] from 0 to `tokens`, never falling. Binds "seqs".
void CheckBatch(const KvCacheView& view, const RaggedBatch& batch, int64_t tokens, Dims* dims);

void CheckLayer(const KvCacheView& view, int64_t layer);

// Keeps the smallest position of a row at which something was not finite, if the view has a place
// for it. Safe to call from several threads.
void NoteNotFinite(const KvCacheView& view, int64_t row, int64_t position);

}  // namespace kvcore
