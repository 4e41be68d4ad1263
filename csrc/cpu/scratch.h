// Scratch of operations that give every thread a piece of its own.
#pragma once

#include <algorithm>

#include "base/align.h"
#include "base/parallel.h"
#include "base/tensor_match.h"

namespace kvcore {

// `shared` bytes for all, then `per_thread` for each thread; both are rounded up, and the beginning
// may lie anywhere.
class Scratch {
 public:
  static int64_t Bytes(int64_t shared, int64_t per_thread, int threads) {
    return kAlign + AlignUp(shared) + threads * AlignUp(per_thread);
  }
  // `scratch` is u8 [bytes]. Throws Error when there is no room for one thread.
  Scratch(const TensorView& scratch, int64_t shared, int64_t per_thread)
      : per_thread_(AlignUp(per_thread)) {
    Dims dims;
    MatchTensor({"bytes"}).DType(DType::kU8).Contiguous().Check(scratch, "scratch", &dims);
    const int64_t bytes = scratch.shape[0], least = Bytes(shared, per_thread, 1);
    KV_CHECK(bytes >= least) << "scratch: expected at least " << least
                             << " bytes for one thread, got " << bytes;
    threads_ = static_cast<int>(std::min<int64_t>(
        NumThreads(), (bytes - Bytes(shared, per_thread, 0)) / std::max<int64_t>(1, per_thread_)));
    const auto at = reinterpret_cast<uintptr_t>(scratch.data);
    shared_ = scratch.ptr<char>() + (AlignUp(static_cast<int64_t>(at)) - static_cast<int64_t>(at));
    first_ = shared_ + AlignUp(shared);
  }
  // How many threads an operation may use: NumThreads(), or as many as there is room for when the
  // scratch was made for fewer. The number to give to ParallelFor: NumThreads() may be another a
  // moment later.
  int threads() const { return threads_; }
  char* shared() const { return shared_; }
  char* Of(int thread_id) const { return first_ + thread_id * per_thread_; }

 private:
  int64_t per_thread_;
  int threads_;
  char *shared_, *first_;
};

}  // namespace kvcore
