#include "base/parallel.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"

#ifdef __linux__
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>
#endif

namespace kvcore {
namespace {

constexpr int kMaxThreads = 1024;

// -1 outside; inside a body, the id that the thread was given.
thread_local int current_id = -1;

// ---- Number of threads ----

int UsableCores() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int DefaultThreads() {
  const char* text = std::getenv("KVCORE_NUM_THREADS");
  if (text == nullptr || *text == '\0') return std::min(UsableCores(), kMaxThreads);
  char* end = nullptr;
  const long n = std::strtol(text, &end, 10);
  KV_CHECK(*end == '\0' && n >= 1 && n <= kMaxThreads)
      << "KVCORE_NUM_THREADS: expected a number from 1 to " << kMaxThreads << ", got '" << text
      << "'";
  return static_cast<int>(n);
}

std::atomic<int> num_threads{0};  // 0 = not chosen yet

// ---- One call of ParallelFor ----

struct Job {
  int64_t n, grain;
  int threads;
  parallel_internal::RangeFn fn;
  void* context;
  std::atomic<int64_t> next{0};
  std::atomic<int> next_id{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error = nullptr;  // written by the one thread that set `failed`

  // One thread's share, under the next free id. A team may be larger than was asked for: whoever
  // finds no id left leaves the work to the others.
  void Join() {
    const int thread_id = next_id.fetch_add(1);
    if (thread_id < threads) Work(thread_id);
  }
  // Takes ranges until none is left. Never throws.
  void Work(int thread_id) {
    const int outer_id = current_id;
    current_id = thread_id;
    try {
      while (!failed.load(std::memory_order_relaxed)) {
        const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
        if (begin >= n) break;
        fn(context, begin, std::min(n, begin + grain), thread_id);
      }
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
    current_id = outer_id;
  }
};

// ---- Own pool ----

// Threads that sleep until a job is published. One job at a time: whoever finds the pool taken
// works alone.
class Pool {
 public:
  ~Pool() { Stop(); }

  // Runs the job on the caller and job.threads - 1 others; false if the pool is taken.
  bool TryRun(Job& job) {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    Resize(job.threads - 1);
    job_ = &job;
    running_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    job.Join();
    // The workers hold a pointer to the job: wait for all of them, spinning a little first.
    for (int spin = 0;; ++spin) {
      const int left = running_.load(std::memory_order_acquire);
      if (left == 0) break;
      if (spin >= kSpins) running_.wait(left, std::memory_order_acquire);
    }
    return true;
  }

 private:
  static constexpr int kSpins = 2000;

  void Resize(int workers) {
    if (static_cast<int>(workers_.size()) == workers) return;
    Stop();
    stop_ = false;
    const uint32_t seen = generation_.load();
    for (int i = 0; i < workers; ++i) workers_.emplace_back([this, seen] { Loop(seen); });
  }
  void Stop() {
    stop_ = true;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
  }
  void Loop(uint32_t seen) {
    for (;;) {
      uint32_t now = generation_.load(std::memory_order_acquire);
      for (int spin = 0; now == seen && spin < kSpins; ++spin)
        now = generation_.load(std::memory_order_acquire);
      while (now == seen) {
        generation_.wait(seen, std::memory_order_acquire);
        now = generation_.load(std::memory_order_acquire);
      }
      seen = now;
      if (stop_) return;
      job_->Join();
      if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_one();
    }
  }

  std::mutex mutex_;
  std::vector<std::thread> workers_;
  std::atomic<uint32_t> generation_{0};
  std::atomic<int> running_{0};
  Job* job_ = nullptr;  // published by generation_, like stop_
  bool stop_ = false;
};

// Reached through a pointer so that a forked child, whose copy of the pool has no threads, can
// leave it behind and make its own.
std::atomic<Pool*> own_pool{nullptr};
std::atomic<bool> forked{false};

Pool& OwnPool() {
  Pool* pool = own_pool.load();
  if (pool != nullptr) return *pool;
  auto fresh = std::make_unique<Pool>();
  if (own_pool.compare_exchange_strong(pool, fresh.get())) return *fresh.release();
  return *pool;
}

struct JoinAtExit {
  ~JoinAtExit() { delete own_pool.exchange(nullptr); }
} join_at_exit;

// ---- OpenMP runtime of the process ----

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

struct OpenMp {
  GompParallel parallel = nullptr;
  std::string name;
};

#ifdef __linux__
struct Search {
  unsigned long long loads_seen;  // objects ever loaded when the last search failed
  unsigned long long loads = 0;
  bool unchanged = false;
  std::vector<std::string> paths;
};

int Visit(dl_phdr_info* info, size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  search.loads = info->dlpi_adds;
  if (search.loads == search.loads_seen) {
    search.unchanged = true;
    return 1;
  }
  const std::string path = info->dlpi_name != nullptr ? info->dlpi_name : "";
  const std::string file = path.substr(path.rfind('/') + 1);
  for (const char* runtime : {"libgomp", "libiomp5", "libomp"})
    if (file.rfind(runtime, 0) == 0) {
      // Several copies may be loaded; torch's threads are the ones that stay busy.
      const bool torchs = path.find("/torch/") != std::string::npos ||
                          path.find("/torch.libs/") != std::string::npos;
      search.paths.insert(torchs ? search.paths.begin() : search.paths.end(), path);
      break;
    }
  return 0;
}

// Looks until a runtime is found, then never again. While none is there, a search is repeated only
// after another shared object has been loaded.
const OpenMp* FindOpenMp() {
  static std::atomic<const OpenMp*> found{nullptr};
  if (const OpenMp* known = found.load(std::memory_order_acquire)) return known;
  static std::mutex mutex;
  static unsigned long long loads_seen = 0;
  std::lock_guard<std::mutex> lock(mutex);
  Search search{loads_seen, 0, false, {}};
  dl_iterate_phdr(Visit, &search);
  if (search.unchanged) return nullptr;
  for (const std::string& path : search.paths) {
    void* handle = dlopen(path.c_str(), RTLD_NOLOAD | RTLD_NOW);
    void* symbol = handle != nullptr ? dlsym(handle, "GOMP_parallel") : nullptr;
    if (symbol == nullptr) continue;
    static OpenMp runtime;
    runtime.parallel = reinterpret_cast<GompParallel>(symbol);
    runtime.name = "openmp (" + path.substr(path.rfind('/') + 1) + ")";
    found.store(&runtime, std::memory_order_release);
    return &runtime;
  }
  loads_seen = search.loads;
  return nullptr;
}

// After a fork only the forking thread exists: neither pool may wait for the others. The child
// starts over with a pool of its own, because an OpenMP runtime would wait for its lost threads.
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] {
  own_pool.store(nullptr);
  forked.store(true);
  current_id = -1;
});
#else
const OpenMp* FindOpenMp() { return nullptr; }
#endif

const OpenMp* ActiveOpenMp() {
  return forked.load(std::memory_order_relaxed) ? nullptr : FindOpenMp();
}

}  // namespace

void SetNumThreads(int n) {
  KV_CHECK(n >= 1 && n <= kMaxThreads)
      << "num_threads: expected a number from 1 to " << kMaxThreads << ", got " << n;
  num_threads.store(n);
}

int NumThreads() {
  const int n = num_threads.load(std::memory_order_relaxed);
  if (n > 0) return n;
  int expected = 0;
  num_threads.compare_exchange_strong(expected, DefaultThreads());
  return num_threads.load();
}

const char* ParallelBackend() {
  const OpenMp* openmp = ActiveOpenMp();
  return openmp != nullptr ? openmp->name.c_str() : "own pool";
}

namespace parallel_internal {

void Run(int64_t n, int64_t grain, int threads, RangeFn fn, void* context) {
  KV_ICHECK(grain >= 1) << "grain " << grain;
  KV_ICHECK(threads >= 1) << "threads " << threads;
  if (n <= 0) return;
  Job job{n, grain, threads, fn, context};
  if (current_id >= 0) {
    job.Work(current_id < threads ? current_id : 0);
  } else if (n <= grain || threads == 1) {
    job.Work(0);
  } else if (const OpenMp* openmp = ActiveOpenMp()) {
    // Always the full team: runtimes end and restart threads when the size changes.
    openmp->parallel([](void* data) { static_cast<Job*>(data)->Join(); }, &job,
                     static_cast<unsigned>(threads), 0);
  } else if (!OwnPool().TryRun(job)) {
    job.Work(0);
  }
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace parallel_internal
}  // namespace kvcore
