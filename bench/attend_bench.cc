// Decode attention of one sequence and one layer: 4 kv heads, 28 query heads, head_dim 128, bf16,
// one thread. Warm: the same lanes again and again. Cold: lanes in turn from a pool larger than the
// caches. ReadBound reads the same blocks and does nothing else. Prefill: a prompt of 512 tokens at
// once, bf16 and fp32 arithmetic. Long: one sequence of 16,384 slots, 7 query heads a kv head, in
// wall time by number of kv heads and threads.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/parallel.h"
#include "bench_cache.h"
#include "cpu/cpu_ops.h"
#include "cpu/isa.h"
#include "support/attend_oracle.h"

namespace kvcore {
namespace {

constexpr int64_t kKvHeads = 4, kGroup = 7, kQueryHeads = kGroup * kKvHeads, kHeadDim = 128;
constexpr int64_t kColdBytes = 640ll << 20;

// A call that brings the `tokens` newest tokens of one row; the row can be exchanged.
class Call {
 public:
  explicit Call(int64_t tokens, int64_t kv_heads = kKvHeads)
      : query_(DType::kBF16, {tokens, kGroup * kv_heads, kHeadDim}),
        out_(query_),
        scratch_(DType::kU8, {4 << 20}) {
    cu_[0] = 0;
    cu_[1] = static_cast<int32_t>(tokens);
    std::mt19937_64 rng(1);
    query_.FillNormal(rng);
    p_.query = query_.view();
    p_.out = out_.view();
    p_.scratch = scratch_.view();
    p_.batch = {MakeView(&row_, DType::kI32, {1}), MakeView(cu_, DType::kI32, {2})};
    p_.scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void Run(const KvCacheView& view, int64_t row) {
    row_ = static_cast<int32_t>(row);
    AttendCpu(view, p_, 0);
  }
  const OwnedTensor& query() const { return query_; }
  const OwnedTensor& out() const { return out_; }
  double scale() const { return p_.scale; }

 private:
  OwnedTensor query_, out_, scratch_;
  int32_t row_ = 0, cu_[2];
  AttendParams p_;
};

bool MatchesOracle(int64_t tokens, int64_t slots) {
  LaneShape shape;
  shape.dtype = DType::kBF16;
  shape.kv_heads = kKvHeads;
  shape.q_heads = kQueryHeads;
  shape.head_dim = kHeadDim;
  shape.max_blocks = BlocksFor(slots);
  const LaneFixture cache(shape, std::vector<int32_t>(kKvHeads, static_cast<int32_t>(slots)), 1);
  Call call(tokens);
  call.Run(cache.view(), 0);
  const AttendResult expected =
      AttendOracle(cache, call.query(), {0}, {0, static_cast<int32_t>(tokens)}, 0, call.scale());
  for (int64_t i = 0; i < call.out().numel(); ++i) {
    const double want = expected.out[static_cast<size_t>(i)];
    if (!(std::fabs(call.out().At(i) - want) <= 1e-5 + std::fabs(want) / 200)) return false;
  }
  return true;
}

#if defined(__x86_64__)
__attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
void ReadBlocks(const BenchCache& cache, const KvCacheView& v, int64_t row) {
  const int64_t entries = kKvHeads * v.max_blocks(), lines = BlockElements(kHeadDim) / 32;
  typedef uint64_t Line __attribute__((vector_size(64)));
  Line sum[4] = {};
  for (int64_t i = 0; i < entries; ++i) {
    const int64_t block = cache.table()[row * entries + i];
    for (const TensorView* t : {&v.key_blocks, &v.value_blocks}) {
      const char* p = t->ptr<char>() + block * BlockElements(kHeadDim) * 2;
      for (int64_t w = 0; w < lines; w += 4, p += 256) {
        Line line[4];
        std::memcpy(line, p, 256);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) sum[k] += line[k];
      }
    }
  }
  benchmark::DoNotOptimize(sum);
}

const Isa kFastest = ActiveIsa();

enum Mode { kWarm, kCold };

void Bench(benchmark::State& state, int64_t slots, Mode mode, Isa isa, bool read_only) {
  SetNumThreads(1);
  SetIsa(isa);
  if (!read_only && !MatchesOracle(1, slots)) {
    state.SkipWithError("result differs from the oracle");
    return;
  }
  const int64_t row_bytes = kKvHeads * BlocksFor(slots) * BlockElements(kHeadDim) * 2 * 2;
  const int64_t rows = mode == kWarm ? 1 : kColdBytes / row_bytes;
  const BenchCache cache(rows, 1, kKvHeads, kHeadDim, slots);
  const KvCacheView view = cache.view();
  Call decode(1);
  CallTimer timer(state);
  const auto call = [&](int64_t row) {
    if (read_only)
      ReadBlocks(cache, view, row);
    else
      decode.Run(view, row);
  };
  int64_t row = 0;
  for (int i = 0; i < 100; ++i) call(row = (row + 1) % rows);
  for (auto _ : state) timer.Time([&] { call(row = (row + 1) % rows); });
  timer.Report(static_cast<double>(row_bytes));
}

void Prefill(benchmark::State& state, int64_t tokens, Isa isa) {
  SetNumThreads(1);
  SetIsa(isa);
  if (!MatchesOracle(100, 150)) {
    state.SkipWithError("result differs from the oracle");
    return;
  }
  const BenchCache cache(1, 1, kKvHeads, kHeadDim, tokens);
  const KvCacheView view = cache.view();
  Call call(tokens);
  CallTimer timer(state);
  for (auto _ : state) timer.Time([&] { call.Run(view, 0); });
  timer.Report(4.0 * kQueryHeads * kHeadDim * static_cast<double>(tokens * (tokens + 1) / 2));
  state.counters["GFLOP/s"] = state.counters["GB/s"];  // the work above is operations, not bytes
  state.counters.erase("GB/s");
}

void Long(benchmark::State& state, int64_t kv_heads, int threads) {
  constexpr int64_t kSlots = 16'384;
  SetNumThreads(threads);
  SetIsa(kFastest);
  if (!MatchesOracle(1, 3000)) {
    state.SkipWithError("result differs from the oracle");
    return;
  }
  const BenchCache cache(1, 1, kv_heads, kHeadDim, kSlots);
  const KvCacheView view = cache.view();
  Call call(1, kv_heads);
  for (int i = 0; i < 20; ++i) call.Run(view, 0);
  std::vector<double> seconds;
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    call.Run(view, 0);
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    state.SetIterationTime(seconds.back());
  }
  std::sort(seconds.begin(), seconds.end());
  state.counters["p10_us"] = seconds[seconds.size() / 10] * 1e6;
  state.counters["median_us"] = seconds[seconds.size() / 2] * 1e6;
}

void Register() {
  for (const int64_t kv_heads : {1, 2, 4})
    for (const int threads : {1, 2})
      benchmark::RegisterBenchmark(
          ("Long/kv_heads:" + std::to_string(kv_heads) + "/threads:" + std::to_string(threads))
              .c_str(),
          [=](benchmark::State& s) { Long(s, kv_heads, threads); })
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
  for (Isa isa : {Isa::kBase, Isa::kV3, Isa::kV4, Isa::kV4Bf16})
    if (IsaSupported(isa))
      benchmark::RegisterBenchmark((std::string("Prefill/isa:") + IsaName(isa)).c_str(),
                                   [=](benchmark::State& s) { Prefill(s, 512, isa); })
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
  for (int64_t slots : {192, 640})
    for (Mode mode : {kWarm, kCold}) {
      const std::string shape =
          "/slots:" + std::to_string(slots) + (mode == kWarm ? "/warm" : "/cold");
      const auto add = [&](const std::string& name, Isa isa, bool read_only) {
        benchmark::RegisterBenchmark(
            (name + shape).c_str(),
            [=](benchmark::State& s) { Bench(s, slots, mode, isa, read_only); })
            ->UseManualTime()
            ->Unit(benchmark::kMicrosecond);
      };
      for (Isa isa : {Isa::kBase, Isa::kV3, Isa::kV4, Isa::kV4Bf16})
        if (IsaSupported(isa)) add(std::string("Attend/isa:") + IsaName(isa), isa, false);
      add("ReadBound", ActiveIsa(), true);
    }
}

}  // namespace
}  // namespace kvcore

int main(int argc, char** argv) {
  kvcore::Register();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
