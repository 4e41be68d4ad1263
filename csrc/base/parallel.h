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
void Run(int64_t n, int64_t grain, int threads, RangeFn fn, void* context);
}  // namespace parallel_internal

// Calls body(begin, end, thread_id) until [0, n) is covered, in ranges of at most `grain` items;
// 0 <= thread_id < threads, whatever NumThreads() says and becomes meanwhile: a caller that gives
// each thread a piece of scratch reads NumThreads() once, checks the scratch for that number and
// passes it. An exception of body is rethrown after all threads have stopped. Not reentrant: a
// nested call runs serially, under the outer thread_id if that is below its own `threads`, else
// under 0. REQUIRES: grain >= 1, threads >= 1.
template <typename Body>
void ParallelFor(int64_t n, int64_t grain, int threads, Body&& body) {
  using Fn = std::remove_reference_t<Body>;
  parallel_internal::Run(
      n, grain, threads,
      [](void* context, int64_t begin, int64_t end, int thread_id) {
        (*static_cast<Fn*>(context))(begin, end, thread_id);
      },
      const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

// As above with the number of threads of the moment, for bodies that own nothing per thread.
template <typename Body>
void ParallelFor(int64_t n, int64_t grain, Body&& body) {
  ParallelFor(n, grain, NumThreads(), static_cast<Body&&>(body));
}

}  // namespace kvcore
