// Forking 8 candidates of a sequence that evicts: CopyBlocks over 28 layers x 4 kv heads x 12
// blocks (192 slots) x 8, head_dim 128, bf16, one thread, against one memcpy of as many bytes
// between two buffers. Bytes per second count what is copied once.
#include <benchmark/benchmark.h>

#include <cstring>

#include "base/parallel.h"
#include "bench_cache.h"
#include "cpu/cpu_ops.h"

namespace kvcore {
namespace {

constexpr int64_t kLayers = 28, kKvHeads = 4, kHeadDim = 128, kSlots = 192;

struct Fork {
  explicit Fork(int64_t candidates)
      : blocks(kLayers * kKvHeads * BlocksFor(kSlots)),
        cache(1, kLayers, kKvHeads, kHeadDim, kSlots, blocks * candidates) {
    std::vector<int32_t> spare(static_cast<size_t>(blocks * candidates));
    std::iota(spare.begin(), spare.end(), static_cast<int32_t>(blocks));
    std::shuffle(spare.begin(), spare.end(), std::mt19937_64(2));
    dst = spare;
    for (int64_t c = 0; c < candidates; ++c)
      src.insert(src.end(), cache.table(), cache.table() + blocks);
  }
  void Run() {
    const auto count = static_cast<int64_t>(src.size());
    CopyBlocksCpu(
        cache.view(),
        {MakeView(src.data(), DType::kI32, {count}), MakeView(dst.data(), DType::kI32, {count})},
        0);
  }
  bool Copied() const {
    const KvCacheView v = cache.view();
    const auto bytes = static_cast<size_t>(cache.block_bytes() / 2);
    for (size_t i = 0; i < src.size(); ++i)
      for (const TensorView* t : {&v.key_blocks, &v.value_blocks})
        if (std::memcmp(t->ptr<char>() + static_cast<size_t>(src[i]) * bytes,
                        t->ptr<char>() + static_cast<size_t>(dst[i]) * bytes, bytes) != 0)
          return false;
    return true;
  }
  double Bytes() const {
    return static_cast<double>(src.size()) * static_cast<double>(cache.block_bytes());
  }

  int64_t blocks;
  BenchCache cache;
  std::vector<int32_t> src, dst;
};

void BM_Fork(benchmark::State& state) {
  SetNumThreads(1);
  Fork fork(state.range(0));
  fork.Run();
  if (!fork.Copied()) {
    state.SkipWithError("copies differ from their sources");
    return;
  }
  CallTimer timer(state);
  for (auto _ : state) timer.Time([&] { fork.Run(); });
  timer.Report(fork.Bytes());
}
BENCHMARK(BM_Fork)->Arg(1)->Arg(8)->UseManualTime()->Unit(benchmark::kMicrosecond);

void BM_Memcpy(benchmark::State& state) {
  const int64_t bytes =
      state.range(0) * kLayers * kKvHeads * BlocksFor(kSlots) * BlockElements(kHeadDim) * 4;
  std::vector<char> from(static_cast<size_t>(bytes), 1), to(static_cast<size_t>(bytes), 2);
  CallTimer timer(state);
  for (auto _ : state)
    timer.Time([&] {
      std::memcpy(to.data(), from.data(), from.size());
      benchmark::DoNotOptimize(to.data());
      benchmark::ClobberMemory();
    });
  timer.Report(static_cast<double>(bytes));
}
BENCHMARK(BM_Memcpy)->Arg(1)->Arg(8)->UseManualTime()->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace kvcore

BENCHMARK_MAIN();
