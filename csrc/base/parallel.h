// Splits independent work over threads.
//
// The threads are those of an OpenMP runtime that the process already carries (torch's): two pools
// that spin on the same cores slow each other down by a factor of several. Without one, a small
// pool of parked threads does the work. Results never depend on the number of threads: `body` gets
// disjoint ranges and every item is computed on its own.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace kvcore {

// Threads that ParallelFor may use; the caller counts as one. Default: KVCORE_NUM_THREADS or the
// number of usable cores. REQUIRES: n >= 1.
void SetNumThreads(int n);
int NumThreads();
// "openmp (libgomp...)" or "own pool".
const char* ParallelBackend();

namespace parallel_internal {
using RangeFn = void (*)(void* context, int64_t begin, int64_t end, int thread_id);
void Run(int64_t n, int64_t grain, RangeFn fn, void* context);
}  // namespace parallel_internal

// Calls body(begin, end, thread_id) until [0, n) is covered, in ranges of at most `grain` items;
// 0 <= thread_id < NumThreads(). An exception of body is rethrown after all threads have stopped.
// Not reentrant: a nested call runs serially. REQUIRES: grain >= 1.
template <typename Body>
void ParallelFor(int64_t n, int64_t grain, Body&& body) {
  using Fn = std::remove_reference_t<Body>;
  parallel_internal::Run(
      n, grain,
      [](void* context, int64_t begin, int64_t end, int thread_id) {
        (*static_cast<Fn*>(context))(begin, end, thread_id);
      },
      const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

}  // namespace kvcore
