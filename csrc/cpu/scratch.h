// Scratch of operations that give every thread a piece of its own.
#pragma once

#include <algorithm>

#include "base/parallel.h"
#include "base/tensor_match.h"

namespace kvcore {

// How many threads an operation may use: NumThreads(), or as many as `scratch`, u8 [bytes], has
// room for when it was made for fewer. The number to give to ParallelFor: NumThreads() may be
// another a moment later. `fixed` bytes are needed in any case, `per_thread` more for each thread.
// Throws Error when there is no room for one.
inline int ThreadsForScratch(const TensorView& scratch, int64_t fixed, int64_t per_thread) {
  Dims dims;
  MatchTensor({"bytes"}).DType(DType::kU8).Contiguous().Check(scratch, "scratch", &dims);
  const int64_t bytes = scratch.shape[0], least = fixed + per_thread;
  KV_CHECK(bytes >= least) << "scratch: expected at least " << least
                           << " bytes for one thread, got " << bytes;
  const int threads = NumThreads();
  return static_cast<int>(
      std::min<int64_t>(threads, (bytes - fixed) / std::max<int64_t>(1, per_thread)));
}

}  // namespace kvcore
