// What the benchmarks share: a large cache with cheap random contents, and timing per call.
#pragma once

#include <benchmark/benchmark.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "ops/kv_cache_view.h"

namespace kvcore {

// Lanes of `slots` slots each in shuffled blocks; bf16 keys and values in (-1, 1). `spare` blocks
// follow that no lane uses.
class BenchCache {
 public:
  BenchCache(int64_t rows, int64_t layers, int64_t kv_heads, int64_t head_dim, int64_t slots,
             int64_t spare = 0)
      : head_dim_(head_dim) {
    const int64_t lanes = rows * layers * kv_heads, lane_blocks = BlocksFor(slots);
    const int64_t used = lanes * lane_blocks, blocks = used + spare;
    key_.resize(static_cast<size_t>(blocks * BlockElements(head_dim)));
    value_.resize(key_.size());
    uint64_t state = 1;
    for (size_t i = 0; i < key_.size(); ++i) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      // sign, exponent 0x3f0 to 0x3f7, random mantissa
      key_[i] = static_cast<uint16_t>((state >> 60 << 15) | 0x3e00u | ((state >> 33) & 0x1ffu));
      value_[i] = static_cast<uint16_t>((state >> 61 << 15) | 0x3e00u | ((state >> 42) & 0x1ffu));
    }
    position_.resize(static_cast<size_t>(blocks * kBlockSlots));
    table_.resize(static_cast<size_t>(used));
    std::iota(table_.begin(), table_.end(), 0);
    std::shuffle(table_.begin(), table_.end(), std::mt19937_64(1));
    lane_len_.assign(static_cast<size_t>(lanes), static_cast<int32_t>(slots));
    seq_len_.assign(static_cast<size_t>(rows), static_cast<int32_t>(slots));
    view_.key_blocks = MakeView(key_.data(), DType::kBF16, {blocks, BlockElements(head_dim)});
    view_.value_blocks = MakeView(value_.data(), DType::kBF16, {blocks, BlockElements(head_dim)});
    view_.position = MakeView(position_.data(), DType::kI32, {blocks, kBlockSlots});
    view_.block_table = MakeView(table_.data(), DType::kI32, {rows, layers, kv_heads, lane_blocks});
    view_.lane_len = MakeView(lane_len_.data(), DType::kI32, {rows, layers, kv_heads});
    view_.seq_len = MakeView(seq_len_.data(), DType::kI32, {rows});
    view_.head_dim = head_dim;
  }
  BenchCache(const BenchCache&) = delete;
  BenchCache& operator=(const BenchCache&) = delete;

  const KvCacheView& view() const { return view_; }
  const std::vector<int32_t>& table() const { return table_; }
  int64_t block_bytes() const { return 2 * BlockElements(head_dim_) * 2; }  // keys and values

 private:
  int64_t head_dim_;
  std::vector<uint16_t> key_, value_;
  std::vector<int32_t> position_, table_, lane_len_, seq_len_;
  KvCacheView view_;
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
