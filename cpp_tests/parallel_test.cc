#include "base/parallel.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/check.h"

namespace kvcore {
namespace {

class Parallel : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    before_ = NumThreads();
    SetNumThreads(GetParam());
  }
  void TearDown() override { SetNumThreads(before_); }

 private:
  int before_ = 1;
};

TEST_P(Parallel, EveryItemIsVisitedOnceInRangesOfAtMostGrain) {
  for (int64_t n : {0, 1, 2, 7, 100, 1001})
    for (int64_t grain : {1, 3, 100, 5000}) {
      std::vector<std::atomic<int>> visits(static_cast<size_t>(n));
      std::atomic<bool> ids_ok{true}, ranges_ok{true};
      ParallelFor(n, grain, [&](int64_t begin, int64_t end, int id) {
        if (id < 0 || id >= NumThreads()) ids_ok = false;
        if (begin >= end || end - begin > grain) ranges_ok = false;
        for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
      });
      for (auto& v : visits) ASSERT_EQ(v, 1) << "n " << n << " grain " << grain;
      EXPECT_TRUE(ids_ok);
      EXPECT_TRUE(ranges_ok);
    }
}

TEST_P(Parallel, ThreadIdsAreExclusive) {
  std::vector<std::atomic<int>> busy(static_cast<size_t>(NumThreads()));
  std::atomic<bool> shared{false};
  ParallelFor(2000, 1, [&](int64_t, int64_t, int id) {
    if (busy[static_cast<size_t>(id)].fetch_add(1) != 0) shared = true;
    std::this_thread::yield();
    busy[static_cast<size_t>(id)].fetch_sub(1);
  });
  EXPECT_FALSE(shared);
}

// A caller that has checked its scratch for some number of threads gets no more, whatever others
// set.
TEST_P(Parallel, ThreadIdsStayBelowTheLimitWhileTheNumberChanges) {
  std::atomic<bool> stop{false}, in_range{true}, shared{false};
  std::thread other([&] {
    for (int n = 1; !stop; n = n % 7 + 1) SetNumThreads(n);
  });
  for (int round = 0; round < 60; ++round) {
    const int limit = 1 + round % 4;
    std::vector<std::atomic<int>> busy(static_cast<size_t>(limit));
    std::atomic<int64_t> sum{0};
    ParallelFor(64, 1, limit, [&](int64_t begin, int64_t, int id) {
      sum += begin;
      if (id < 0 || id >= limit) {
        in_range = false;
        return;
      }
      if (busy[static_cast<size_t>(id)].fetch_add(1) != 0) shared = true;
      std::this_thread::yield();
      busy[static_cast<size_t>(id)].fetch_sub(1);
    });
    ASSERT_EQ(sum, 2016);
  }
  stop = true;
  other.join();
  EXPECT_TRUE(in_range);
  EXPECT_FALSE(shared);
}

TEST_P(Parallel, NestedCallKeepsToItsOwnLimit) {
  std::atomic<bool> in_range{true}, another{GetParam() == 1};
  std::atomic<int64_t> items{0};
  ParallelFor(16, 1, [&](int64_t, int64_t, int outer) {
    if (outer > 0) another = true;
    // The first thread leaves work to another, whose id the nested calls have no room for.
    while (!another) std::this_thread::yield();
    ParallelFor(5, 1, 1, [&](int64_t, int64_t, int id) {
      if (id != 0) in_range = false;
      ++items;
    });
  });
  EXPECT_TRUE(in_range);
  EXPECT_EQ(items, 80);
}

TEST_P(Parallel, ExceptionIsRethrownAndTheNextCallWorks) {
  for (int round = 0; round < 20; ++round) {
    EXPECT_THROW(ParallelFor(100, 1,
                             [&](int64_t begin, int64_t, int) {
                               if (begin == 37) throw std::runtime_error("37");
                             }),
                 std::runtime_error);
    std::atomic<int64_t> sum{0};
    ParallelFor(100, 1, [&](int64_t begin, int64_t, int) { sum += begin; });
    ASSERT_EQ(sum, 4950);
  }
}

TEST_P(Parallel, NestedCallRunsSeriallyUnderTheOuterId) {
  std::atomic<int64_t> items{0};
  std::atomic<bool> same{true};
  ParallelFor(16, 1, [&](int64_t, int64_t, int outer) {
    const auto thread = std::this_thread::get_id();
    int64_t last = -1;
    ParallelFor(10, 2, [&](int64_t begin, int64_t end, int inner) {
      if (inner != outer || std::this_thread::get_id() != thread || begin <= last) same = false;
      last = begin;
      items += end - begin;
    });
  });
  EXPECT_EQ(items, 160);
  EXPECT_TRUE(same);
}

TEST_P(Parallel, CallsFromSeveralThreadsDoNotDisturbEachOther) {
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        std::atomic<int64_t> sum{0};
        ParallelFor(64, 1, [&](int64_t begin, int64_t, int) { sum += begin; });
        if (sum != 2016) ++wrong;
      }
    });
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

// The child has none of the parent's threads: it must neither wait for them nor fail at exit.
TEST_P(Parallel, ForkedChildWorksAndExits) {
  std::atomic<int64_t> sum{0};
  ParallelFor(64, 1, [&](int64_t begin, int64_t, int) { sum += begin; });
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // a child that hangs is a failure, not a hung test
    std::atomic<int64_t> child_sum{0};
    for (int round = 0; round < 50; ++round)
      ParallelFor(64, 1, [&](int64_t begin, int64_t, int) { child_sum += begin; });
    std::exit(child_sum == 50 * 2016 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  ParallelFor(64, 1, [&](int64_t begin, int64_t, int) { sum += begin; });
  EXPECT_EQ(sum, 2 * 2016);
}

INSTANTIATE_TEST_SUITE_P(Threads, Parallel, testing::Values(1, 2, 5));

TEST(NumThreads, RefusesZero) {
  const int before = NumThreads();
  EXPECT_THROW(SetNumThreads(0), Error);
  EXPECT_THROW(SetNumThreads(-3), Error);
  EXPECT_EQ(NumThreads(), before);
}

[[noreturn]] void PrintThreads(const char* wanted) {
  setenv("KVCORE_NUM_THREADS", wanted, 1);
  try {
    std::fprintf(stderr, "threads %d\n", NumThreads());
  } catch (const Error& e) {
    std::fprintf(stderr, "error %s\n", e.what());
  }
  std::_Exit(0);
}

TEST(NumThreadsDeathTest, EnvironmentSetsTheDefault) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(PrintThreads("3"), testing::ExitedWithCode(0), "threads 3\n");
  EXPECT_EXIT(PrintThreads(""), testing::ExitedWithCode(0), "threads [1-9]");
  for (const char* bad : {"0", "-1", "two", "3x", "99999999999999999999"})
    EXPECT_EXIT(PrintThreads(bad), testing::ExitedWithCode(0), "error KVCORE_NUM_THREADS: ") << bad;
}

#if defined(__linux__)
// In a process of its own: once found, a runtime stays.
[[noreturn]] void UseOpenMp() {
  SetNumThreads(3);
  const std::string before = ParallelBackend();
  void* runtime = dlopen("libgomp.so.1", RTLD_NOW | RTLD_LOCAL);
  if (runtime == nullptr) {
    std::fprintf(stderr, "no OpenMP runtime: %s\n", dlerror());
    std::_Exit(1);
  }
  // How many parallel regions of the runtime enclose the caller.
  const auto level = reinterpret_cast<int (*)()>(dlsym(runtime, "omp_get_level"));
  std::atomic<int64_t> sum{0}, inside{0};
  std::atomic<bool> ids_ok{true}, thrown{false};
  ParallelFor(64, 1, [&](int64_t begin, int64_t, int) {
    sum += begin;
    inside += level() == 1;
  });
  try {
    ParallelFor(64, 1, [](int64_t, int64_t, int) { throw Error("through openmp"); });
  } catch (const Error&) {
    thrown = true;
  }
  // A team of at most the limit, whatever the process allows.
  ParallelFor(64, 1, 2, [&](int64_t, int64_t, int id) {
    if (id > 1) ids_ok = false;
    inside += level() == 1;
  });
  std::fprintf(stderr, "%s then %s: sum %d, %d in its regions, thrown %d, ids %d\n", before.c_str(),
               ParallelBackend(), static_cast<int>(sum.load()), static_cast<int>(inside.load()),
               thrown.load(), ids_ok.load());
  std::_Exit(0);
}

TEST(ParallelDeathTest, LoopsRunInRegionsOfTheOpenMpRuntimeOnceOneIsLoaded) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
#if defined(__clang__)
  if (dlopen("libgomp.so.1", RTLD_NOW | RTLD_LOCAL) == nullptr) GTEST_SKIP() << dlerror();
#endif
  // GCC comes with libgomp.
  EXPECT_EXIT(
      UseOpenMp(), testing::ExitedWithCode(0),
      "own pool then openmp \\(libgomp.*\\): sum 2016, 128 in its regions, thrown 1, ids 1");
}
#endif

}  // namespace
}  // namespace kvcore
