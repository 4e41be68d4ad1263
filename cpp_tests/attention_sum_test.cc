// Attention that slots have got: what attend adds, what append, evict, copy and fork do with it.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "base/parallel.h"
#include "cpu/cpu_ops.h"
#include "ops/attend.h"
#include "store/kv_store.h"
#include "support/attend_oracle.h"
#include "support/isa_levels.h"
#include "support/lane_fixture.h"

namespace kvcore {
namespace {

constexpr float kScale = 0.25f;

LaneShape Shape(DType dtype, int64_t group) {
  LaneShape s;
  s.dtype = dtype;
  s.rows = 3;
  s.layers = 2;
  s.kv_heads = 2;
  s.q_heads = 2 * group;
  s.head_dim = 40;
  s.max_blocks = 24;
  s.attention_sum = true;
  return s;
}

OwnedTensor Queries(const LaneShape& s, int64_t tokens) {
  OwnedTensor query(s.dtype, {tokens, s.q_heads, s.head_dim});
  std::mt19937_64 rng(5);
  query.FillNormal(rng);
  return query;
}

// Attends from tokens [first, last) of `query`, which are the newest of the rows' tokens.
void Accumulate(const LaneFixture& cache, const OwnedTensor& query,
                const std::vector<int32_t>& rows, const std::vector<int32_t>& cu_tokens,
                int64_t layer) {
  const OwnedTensor r = OwnedTensor::I32(rows), cu = OwnedTensor::I32(cu_tokens);
  OwnedTensor out = query, scratch(DType::kU8, {AttendScratchBytes(cache.view(), NumThreads())});
  scratch.Fill(255);  // NaN: nothing may be read before it was written
  AttendParams p;
  p.query = query.view();
  p.out = out.view();
  p.scratch = scratch.view();
  p.batch = {r.view(), cu.view()};
  p.layer = layer;
  p.scale = kScale;
  p.accumulate = true;
  AttendCpu(cache.view(), p, 0);
}

TEST(AttentionSum, GrowsByTheMeanAttentionOfTheGroupAtEveryLevelAndType) {
  for (const Isa isa : SupportedIsas())
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
      for (const int64_t group : {1, 3, 7, 20}) {
        const WithIsa level(isa);
        const LaneFixture before(Shape(dtype, group), {5, 5, 300, 200, 0, 0, 130, 17, 1, 1, 64, 64},
                                 group);
        const LaneFixture cache = before;
        // Row 2 brings one token, row 0 a chunk of 13.
        const OwnedTensor query = Queries(cache.shape(), 14);
        Accumulate(cache, query, {2, 0}, {0, 1, 14}, 1);
        const AttendResult want = AttendOracle(cache, query, {2, 0}, {0, 1, 14}, 1, kScale);
        const int64_t of_row[] = {1, -1, 0};
        for (int64_t row = 0; row < 3; ++row)
          for (int64_t layer = 0; layer < 2; ++layer)
            for (int64_t h = 0; h < 2; ++h)
              for (int64_t slot = 0; slot < cache.Len(row, layer, h); ++slot) {
                const double was = before.AttentionSum(row, layer, h, slot);
                const bool sees = layer == 1 && of_row[row] >= 0;
                const double added = sees ? want.received[static_cast<size_t>(of_row[row] * 2 + h)]
                                                         [static_cast<size_t>(slot)]
                                          : 0.0;
                ASSERT_NEAR(cache.AttentionSum(row, layer, h, slot), was + added,
                            sees ? 1e-5 * (1 + was + added) : 0.0)
                    << IsaName(isa) << " group " << group << " row " << row << " slot " << slot;
              }
      }
}

TEST(AttentionSum, IsTheSameBitsHoweverTokensAreBatched) {
  const LaneFixture start(Shape(DType::kF32, 7), {200, 150, 200, 150, 90, 80, 90, 80, 3, 3, 3, 3},
                          3);
  const OwnedTensor query = Queries(start.shape(), 60);
  const LaneFixture at_once = start;
  Accumulate(at_once, query, {0, 1}, {0, 40, 60}, 0);
  for (const int threads : {1, 3}) {
    SetNumThreads(threads);
    // The same tokens in pieces: what a piece must not see yet is cut off its lanes.
    LaneFixture pieces = start;
    const auto feed = [&](int32_t row, int64_t first, int64_t tokens, int64_t begin, int64_t end) {
      const OwnedTensor len = pieces.lane_len;
      for (int64_t h = 0; h < 2; ++h)
        pieces.lane_len.Set({row, 0, h}, len.Get({row, 0, h}) - static_cast<double>(tokens - end));
      OwnedTensor part(DType::kF32, {end - begin, 14, 40});
      for (int64_t i = 0; i < part.numel(); ++i)
        part.SetAt(i, query.At((first + begin) * 14 * 40 + i));
      Accumulate(pieces, part, {row}, {0, static_cast<int32_t>(end - begin)}, 0);
      pieces.lane_len = len;
    };
    for (int64_t t = 0; t < 40; t += 8) feed(0, 0, 40, t, t + 8);
    for (int64_t t = 0; t < 20; ++t) feed(1, 40, 20, t, t + 1);
    EXPECT_TRUE(SameBytes(pieces.attention_sum, at_once.attention_sum)) << threads << " threads";
  }
  SetNumThreads(1);
}

TEST(AttentionSum, AppendingZeroesAndEvictingMovesIt) {
  LaneFixture cache(Shape(DType::kF32, 1), std::vector<int32_t>(12, 40), 9);
  const LaneFixture before = cache;
  const OwnedTensor rows = OwnedTensor::I32({1});
  OwnedTensor drop(DType::kI32, {1, 2, 2, 2}), count(DType::kI32, {1, 2, 2});
  count.Fill(2);
  for (int64_t i = 0; i < 4; ++i) drop.SetAt(2 * i, 3), drop.SetAt(2 * i + 1, 38);
  EvictSlotsCpu(cache.view(), {rows.view(), drop.view(), count.view()}, 0);
  EXPECT_EQ(cache.AttentionSum(1, 0, 0, 3), before.AttentionSum(1, 0, 0, 39));
  EXPECT_EQ(cache.AttentionSum(1, 1, 1, 2), before.AttentionSum(1, 1, 1, 2));
  EXPECT_EQ(cache.AttentionSum(0, 1, 1, 3), before.AttentionSum(0, 1, 1, 3));

  cache.Extend(2, 1);
  const OwnedTensor one = OwnedTensor::I32({2}), cu = OwnedTensor::I32({0, 1});
  const OwnedTensor key(DType::kF32, {1, 2, 40});
  AppendKvParams p;
  p.key = p.value = key.view();
  p.batch = {one.view(), cu.view()};
  p.layer = 1;
  AppendKvCpu(cache.view(), p, 0);
  for (int64_t h = 0; h < 2; ++h) {
    EXPECT_EQ(cache.AttentionSum(2, 1, h, 40), 0.0);
    EXPECT_EQ(cache.AttentionSum(2, 1, h, 39), before.AttentionSum(2, 1, h, 39));
  }
}

// A fork that shares blocks would let one child add to what the other reads.
TEST(AttentionSum, ForksNeverShareIt) {
  LaneShape shape = Shape(DType::kF32, 1);
  shape.spare_blocks = 80;
  LaneFixture cache(shape, std::vector<int32_t>(12, 0), 4);
  KvStore store(cache.view());
  const SeqId parent = store.Create();
  store.Extend({parent}, {40});
  cache.attention_sum.Fill(2.5);
  const SeqId child = store.Fork(parent, 1, false)[0];
  EXPECT_EQ(store.BlocksToFork(parent, 1, false), 12);
  for (int64_t lane = 0; lane < 4; ++lane)
    for (int64_t b = 0; b < 3; ++b) {
      const int64_t mine =
          static_cast<int64_t>(cache.block_table.Get({store.Row(parent), lane / 2, lane % 2, b}));
      const int64_t its =
          static_cast<int64_t>(cache.block_table.Get({store.Row(child), lane / 2, lane % 2, b}));
      EXPECT_NE(mine, its);
      EXPECT_EQ(cache.attention_sum.Get({its, 7}), 2.5);
    }
  store.CheckIntegrity();
}

TEST(AttentionSum, IsRefusedWithoutThePlane) {
  LaneShape shape = Shape(DType::kF32, 1);
  shape.attention_sum = false;
  const LaneFixture cache(shape, std::vector<int32_t>(12, 4), 4);
  try {
    Accumulate(cache, Queries(shape, 1), {0}, {0, 1}, 0);
    FAIL() << "accepted";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("accumulate: the cache keeps no attention_sum"),
              std::string::npos)
        << e.what();
  }
}

}  // namespace
}  // namespace kvcore
