// What the benchmarks share: a large cache with cheap random contents, and timing per call.
#pragma once

#include <benchmark/benchmark.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "support/cache_tensors.h"

namespace kvcore {

// Lanes of `slots` slots each in shuffled blocks; bf16 keys and values in (-1, 1). `spare` blocks
// follow that no lane uses.
class BenchCache : public CacheTensors {
 public:
  BenchCache(int64_t rows, int64_t layers, int64_t kv_heads, int64_t head_dim, int64_t slots,
             int64_t spare = 0)
      : CacheTensors({.dtype = DType::kBF16,
                      .rows = rows,
                      .layers = layers,
                      .kv_heads = kv_heads,
                      .q_heads = kv_heads,
                      .head_dim = head_dim,
                      .max_blocks = BlocksFor(slots),
                      .blocks = rows * layers * kv_heads * BlocksFor(slots) + spare,
                      .window = 0}) {
    uint64_t state = 1;
    uint16_t* const key = key_blocks.view().ptr<uint16_t>();
    uint16_t* const value = value_blocks.view().ptr<uint16_t>();
    for (int64_t i = 0; i < key_blocks.numel(); ++i) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      // sign, exponent 0x3f0 to 0x3f7, random mantissa
      key[i] = static_cast<uint16_t>((state >> 60 << 15) | 0x3e00u | ((state >> 33) & 0x1ffu));
      value[i] = static_cast<uint16_t>((state >> 61 << 15) | 0x3e00u | ((state >> 42) & 0x1ffu));
    }
    std::iota(table(), table() + block_table.numel(), 0);
    std::shuffle(table(), table() + block_table.numel(), std::mt19937_64(1));
    position.Fill(0);
    lane_len.Fill(static_cast<double>(slots));
    seq_len.Fill(static_cast<double>(slots));
  }

  int32_t* table() const { return block_table.view().ptr<int32_t>(); }
  int64_t block_bytes() const { return 2 * key_blocks.view().stride[0] * 2; }  // keys and values
};

// Times every call by itself in CPU time of this thread, so that a call that lost its core to
// somebody else does not count the wait, and reports p10, median and p90 in microseconds
// and bytes per second at the median. For work on one thread.
class CallTimer {
 public:
  explicit CallTimer(benchmark::State& state) : state_(state) {}

  template <typename Call>
  void Time(Call&& call) {
    const double start = Now();
    call();
    const double took = Now() - start;
    state_.SetIterationTime(took);
    seconds_.push_back(took);
  }
  // Median over calls timed in turn, this one's time over the other's.
  double MedianRatio(const CallTimer& other) const {
    std::vector<double> ratio;
    for (size_t i = 0; i < seconds_.size(); ++i) ratio.push_back(seconds_[i] / other.seconds_[i]);
    std::sort(ratio.begin(), ratio.end());
    return ratio[ratio.size() / 2];
  }
  double Median() {
    std::sort(seconds_.begin(), seconds_.end());
    return seconds_[seconds_.size() / 2];
  }
  void Report(double bytes) {
    std::sort(seconds_.begin(), seconds_.end());
    const auto at = [&](double q) {
      return seconds_[static_cast<size_t>(q * (seconds_.size() - 1))];
    };
    state_.counters["p10_us"] = at(0.1) * 1e6;
    state_.counters["median_us"] = at(0.5) * 1e6;
    state_.counters["p90_us"] = at(0.9) * 1e6;
    state_.counters["GB/s"] = bytes / at(0.5) * 1e-9;
  }

 private:
  static double Now() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  }

  benchmark::State& state_;
  std::vector<double> seconds_;
};

}  // namespace kvcore
