// Lanes longer than one split: right, and the same bits whoever does which split.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/parallel.h"
#include "cpu/attend_kernels.h"
#include "cpu/cpu_ops.h"
#include "support/attend_oracle.h"
#include "support/isa_levels.h"
#include "support/lane_fixture.h"

namespace kvcore {
namespace {

constexpr float kScale = 0.3f;
constexpr auto kSplit = static_cast<int32_t>(kAttendSplit);

class WithThreads {
 public:
  explicit WithThreads(int threads) : before_(NumThreads()) { SetNumThreads(threads); }
  ~WithThreads() { SetNumThreads(before_); }

 private:
  int before_;
};

struct Result {
  OwnedTensor out, lse;
};

Result Attend(const LaneFixture& cache, const OwnedTensor& query, const std::vector<int32_t>& rows,
              const std::vector<int32_t>& cu_tokens, int scratch_threads = 0) {
  const OwnedTensor r = OwnedTensor::I32(rows), cu = OwnedTensor::I32(cu_tokens);
  Result result{query, OwnedTensor(DType::kF32, {cu_tokens.back(), cache.shape().q_heads})};
  result.out.Fill(std::nan(""));
  const int threads = scratch_threads > 0 ? scratch_threads : NumThreads();
  const int64_t bytes = AttendScratchBytes(cache.view(), threads);
  OwnedTensor scratch(DType::kU8, {bytes + 64});
  scratch.Fill(255);  // NaN: nothing may be read before it was written
  AttendParams p;
  p.query = query.view();
  p.out = result.out.view();
  p.lse = result.lse.view();
  p.scratch = scratch.view();
  p.scratch.shape[0] = bytes;
  p.batch = {r.view(), cu.view()};
  p.scale = kScale;
  AttendCpu(cache.view(), p, 0);
  for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(scratch.At(bytes + i), 255) << "scratch overrun";
  return result;
}

LaneShape Shape(DType dtype, int64_t rows, int64_t group, int64_t head_dim) {
  LaneShape s;
  s.dtype = dtype;
  s.rows = rows;
  s.kv_heads = 2;
  s.q_heads = 2 * group;
  s.head_dim = head_dim;
  s.max_blocks = (5 * kSplit + 100) / 16;
  return s;
}

OwnedTensor Queries(const LaneShape& s, int64_t tokens) {
  OwnedTensor query(s.dtype, {tokens, s.q_heads, s.head_dim});
  std::mt19937_64 rng(3);
  query.FillNormal(rng);
  return query;
}

TEST(AttendSplit, EqualsTheOracleAroundTheEndsOfSplits) {
  const std::vector<int32_t> lens = {
      kSplit - 1,     kSplit,     kSplit + 1,       2 * kSplit - 1, 2 * kSplit,
      2 * kSplit + 1, 5 * kSplit, 4 * kSplit + 130, 3 * kSplit + 7, 1};
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
    for (const auto& [group, head_dim] : {std::pair{1, 40}, {7, 64}, {20, 24}}) {
      const LaneShape s = Shape(dtype, 5, group, head_dim);
      const LaneFixture cache(s, lens, 11);
      const std::vector<int32_t> rows = {4, 0, 2, 1, 3}, cu = {0, 1, 4, 5, 6, 7};
      const OwnedTensor query = Queries(s, 7);
      const AttendResult want = AttendOracle(cache, query, rows, cu, 0, kScale);
      const double rounding = dtype == DType::kF32    ? 0
                              : dtype == DType::kBF16 ? 1 / 256.
                                                      : 1 / 2048.;
      for (const Isa isa : SupportedIsas())
        for (const int threads : {1, 2, 9}) {
          const WithIsa level(isa);
          const WithThreads number(threads);
          const Result got = Attend(cache, query, rows, cu);
          for (int64_t i = 0; i < query.numel(); ++i) {
            const double x = want.out[static_cast<size_t>(i)];
            ASSERT_NEAR(got.out.At(i), x, 1e-5 + (1e-5 + rounding) * std::fabs(x))
                << IsaName(isa) << " group " << group << " threads " << threads << " at " << i;
          }
          for (int64_t i = 0; i < got.lse.numel(); ++i)
            ASSERT_NEAR(got.lse.At(i), want.lse[static_cast<size_t>(i)], 1e-4);
        }
    }
}

// Large logits first, last and in the middle: what earlier splits had is scaled down, or that of
// later ones is.
TEST(AttendSplit, EqualsTheOracleWhereverTheLargestLogitLies) {
  const LaneShape s = Shape(DType::kF32, 1, 3, 16);
  for (const int64_t at : {0, kSplit - 1, kSplit, 2 * kSplit + 500, 3 * kSplit + 6}) {
    LaneFixture cache(s, {3 * kSplit + 7, 3 * kSplit + 7}, 12);
    const OwnedTensor query = Queries(s, 1);
    for (int64_t d = 0; d < 16; ++d) cache.SetKey(0, 0, 0, at, d, 20 * query.Get({0, 1, d}));
    const AttendResult want = AttendOracle(cache, query, {0}, {0, 1}, 0, kScale);
    for (const int threads : {1, 2}) {
      const WithThreads number(threads);
      const Result got = Attend(cache, query, {0}, {0, 1});
      for (int64_t i = 0; i < query.numel(); ++i)
        ASSERT_NEAR(got.out.At(i), want.out[static_cast<size_t>(i)], 1e-5) << at;
    }
  }
}

TEST(AttendSplit, IsTheSameBitsWithAnyNumberOfThreadsAloneInABatchAndInAChunk) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const LaneShape s = Shape(dtype, 3, 7, 64);
    const LaneFixture cache(
        s, {4 * kSplit + 99, 2 * kSplit + 3, kSplit + 10, kSplit + 2, 300, 2 * kSplit}, 13);
    // Row 1's chunk goes over the end of a split in both heads.
    const std::vector<int32_t> rows = {0, 1, 2}, cu = {0, 1, 21, 22};
    const OwnedTensor query = Queries(s, 22);
    for (const Isa isa : SupportedIsas()) {
      const WithIsa level(isa);
      SetNumThreads(1);
      const Result want = Attend(cache, query, rows, cu);
      for (const int threads : {1, 2, 3, 5, 16}) {
        const WithThreads number(threads);
        const Result got = Attend(cache, query, rows, cu);
        EXPECT_TRUE(SameBytes(got.out, want.out)) << IsaName(isa) << " threads " << threads;
        EXPECT_TRUE(SameBytes(got.lse, want.lse)) << IsaName(isa) << " threads " << threads;
        for (const int64_t token : {0, 1, 8, 9, 10, 11, 20, 21}) {
          const int32_t row = token == 0 ? 0 : token == 21 ? 2 : 1;
          LaneFixture then = cache;  // as the lane was when that token was the newest
          for (int64_t h = 0; h < 2; ++h)
            then.lane_len.Set({row, 0, h}, cache.lane_len.Get({row, 0, h}) -
                                               static_cast<double>(row == 1 ? 20 - token : 0));
          OwnedTensor mine(dtype, {1, s.q_heads, s.head_dim});
          for (int64_t i = 0; i < mine.numel(); ++i)
            mine.SetAt(i, query.At(token * mine.numel() + i));
          const Result alone = Attend(then, mine, {row}, {0, 1});
          for (int64_t i = 0; i < mine.numel(); ++i)
            ASSERT_EQ(alone.out.At(i), want.out.At(token * mine.numel() + i))
                << IsaName(isa) << " threads " << threads << " token " << token;
        }
      }
    }
  }
  SetNumThreads(1);
}

// A number of threads that was raised since scratch was made is not used in full.
TEST(AttendSplit, ScratchForFewerThreadsIsNeverOverrun) {
  const LaneShape s = Shape(DType::kF32, 2, 4, 32);
  const LaneFixture cache(s, {5 * kSplit, 40, 200, 3000}, 14);
  const OwnedTensor query = Queries(s, 2);
  const WithThreads number(8);
  const Result want = Attend(cache, query, {0, 1}, {0, 1, 2});
  for (const int threads : {1, 2, 5}) {
    const Result got = Attend(cache, query, {0, 1}, {0, 1, 2}, threads);
    EXPECT_TRUE(SameBytes(got.out, want.out));
  }
}

}  // namespace
}  // namespace kvcore
