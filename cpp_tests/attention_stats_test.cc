// Attention that slots have got: what attend adds up, what append, evict, copy and fork do with it.
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

LaneShape Shape(DType dtype, int64_t group, int64_t channels) {
  LaneShape s;
  s.dtype = dtype;
  s.rows = 3;
  s.layers = 2;
  s.kv_heads = 2;
  s.q_heads = 2 * group;
  s.head_dim = 40;
  s.max_blocks = 24;
  if (channels > 0) s.planes = {{kAttentionStats, DType::kF32, channels}};
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

// What channel `c` of a slot must hold after attention, from what it held before.
double Wanted(const AttendResult& got, int64_t channels, int64_t seq, int64_t kv_head,
              int64_t group, int64_t slot, int64_t c, double was) {
  const size_t first = static_cast<size_t>(2 * group * seq + group * kv_head);
  const size_t r = static_cast<size_t>(slot);
  if (channels == 1) {
    for (size_t g = 0; g < static_cast<size_t>(group); ++g)
      was += got.total[first + g][r] / static_cast<double>(group);
    return was;
  }
  if (c >= 3 * group) return was;
  const size_t head = first + static_cast<size_t>(c % group);
  if (c < group) return std::fmax(was, got.largest[head][r]);
  if (c < 2 * group) return std::fmin(was, got.smallest[head][r]);
  return was + got.total[head][r];
}

TEST(AttentionStats, ChannelsAreThoseOfTheOracleAtEveryLevelAndType) {
  for (const Isa isa : SupportedIsas())
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
      for (const int64_t group : {1, 3, 7, 20})
        for (const int64_t channels : {int64_t{1}, 3 * group + 2}) {
          const WithIsa level(isa);
          const LaneFixture before(Shape(dtype, group, channels),
                                   {5, 5, 300, 200, 0, 0, 130, 17, 1, 1, 64, 64}, group);
          const LaneFixture cache = before;
          // Row 2 brings one token, row 0 a chunk of 13.
          const OwnedTensor query = Queries(cache.shape(), 14);
          Accumulate(cache, query, {2, 0}, {0, 1, 14}, 1);
          const AttendResult got = AttendOracle(cache, query, {2, 0}, {0, 1, 14}, 1, kScale);
          const int64_t seq_of_row[] = {1, -1, 0};
          for (int64_t row = 0; row < 3; ++row)
            for (int64_t layer = 0; layer < 2; ++layer)
              for (int64_t h = 0; h < 2; ++h)
                for (int64_t slot = 0; slot < cache.Len(row, layer, h); ++slot)
                  for (int64_t c = 0; c < channels; ++c) {
                    const double was = before.Number(row, layer, h, slot, c);
                    const bool sees = layer == 1 && seq_of_row[row] >= 0;
                    const double want =
                        sees ? Wanted(got, channels, seq_of_row[row], h, group, slot, c, was) : was;
                    ASSERT_NEAR(cache.Number(row, layer, h, slot, c), want,
                                want == was ? 0.0 : 1e-5 * (1 + want))
                        << IsaName(isa) << " group " << group << " row " << row << " slot " << slot
                        << " channel " << c;
                  }
        }
}

TEST(AttentionStats, IsTheSameBitsHoweverTokensAreBatched) {
  for (const int64_t channels : {1, 21}) {
    const LaneFixture start(Shape(DType::kF32, 7, channels),
                            {200, 150, 200, 150, 90, 80, 90, 80, 3, 3, 3, 3}, 3);
    const OwnedTensor query = Queries(start.shape(), 60);
    const LaneFixture at_once = start;
    Accumulate(at_once, query, {0, 1}, {0, 40, 60}, 0);
    for (const int threads : {1, 3}) {
      SetNumThreads(threads);
      // The same tokens in pieces: what a piece must not see yet is cut off its lanes.
      LaneFixture pieces = start;
      const auto feed = [&](int32_t row, int64_t first, int64_t tokens, int64_t begin,
                            int64_t end) {
        const OwnedTensor len = pieces.lane_len;
        for (int64_t h = 0; h < 2; ++h)
          pieces.lane_len.Set({row, 0, h},
                              len.Get({row, 0, h}) - static_cast<double>(tokens - end));
        OwnedTensor part(DType::kF32, {end - begin, 14, 40});
        for (int64_t i = 0; i < part.numel(); ++i)
          part.SetAt(i, query.At((first + begin) * 14 * 40 + i));
        Accumulate(pieces, part, {row}, {0, static_cast<int32_t>(end - begin)}, 0);
        pieces.lane_len = len;
      };
      for (int64_t t = 0; t < 40; t += 8) feed(0, 0, 40, t, t + 8);
      for (int64_t t = 0; t < 20; ++t) feed(1, 40, 20, t, t + 1);
      EXPECT_TRUE(SameBytes(pieces.planes[0], at_once.planes[0])) << threads << " threads";
    }
  }
  SetNumThreads(1);
}

TEST(AttentionStats, AppendingStartsAndEvictingMovesThem) {
  constexpr int64_t kChannels = 5;
  LaneFixture cache(Shape(DType::kF32, 1, kChannels), std::vector<int32_t>(12, 40), 9);
  const LaneFixture before = cache;
  const OwnedTensor rows = OwnedTensor::I32({1});
  OwnedTensor drop(DType::kI32, {1, 2, 2, 2}), count(DType::kI32, {1, 2, 2});
  count.Fill(2);
  for (int64_t i = 0; i < 4; ++i) drop.SetAt(2 * i, 3), drop.SetAt(2 * i + 1, 38);
  EvictSlotsCpu(cache.view(), {rows.view(), drop.view(), count.view()}, 0);
  for (int64_t c = 0; c < kChannels; ++c) {
    EXPECT_EQ(cache.Number(1, 0, 0, 3, c), before.Number(1, 0, 0, 39, c));
    EXPECT_EQ(cache.Number(1, 1, 1, 2, c), before.Number(1, 1, 1, 2, c));
    EXPECT_EQ(cache.Number(0, 1, 1, 3, c), before.Number(0, 1, 1, 3, c));
  }

  cache.Extend(2, 1);
  const OwnedTensor one = OwnedTensor::I32({2}), cu = OwnedTensor::I32({0, 1});
  const OwnedTensor key(DType::kF32, {1, 2, 40});
  AppendKvParams p;
  p.key = p.value = key.view();
  p.batch = {one.view(), cu.view()};
  p.layer = 1;
  AppendKvCpu(cache.view(), p, 0);
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t c = 0; c < kChannels; ++c) {
      EXPECT_EQ(cache.Number(2, 1, h, 40, c), static_cast<double>(c));
      EXPECT_EQ(cache.Number(2, 1, h, 39, c), before.Number(2, 1, h, 39, c));
    }
}

// A fork that shares blocks would let one child add to what the other reads.
TEST(AttentionStats, ForksNeverShareThem) {
  LaneShape shape = Shape(DType::kF32, 1, 3);
  shape.spare_blocks = 80;
  LaneFixture cache(shape, std::vector<int32_t>(12, 0), 4);
  KvStore store(cache.view());
  const SeqId parent = store.Create();
  store.Extend({parent}, {40});
  cache.planes[0].Fill(2.5);
  const SeqId child = store.Fork(parent, 1, false)[0];
  EXPECT_EQ(store.BlocksToFork(parent, 1, false), 12);
  for (int64_t lane = 0; lane < 4; ++lane)
    for (int64_t b = 0; b < 3; ++b) {
      const int64_t mine =
          static_cast<int64_t>(cache.block_table.Get({store.Row(parent), lane / 2, lane % 2, b}));
      const int64_t its =
          static_cast<int64_t>(cache.block_table.Get({store.Row(child), lane / 2, lane % 2, b}));
      EXPECT_NE(mine, its);
      for (int64_t c = 0; c < 3; ++c) EXPECT_EQ(cache.planes[0].Get({its, c, 7}), 2.5);
    }
  store.CheckIntegrity();
}

TEST(AttentionStats, APlaneThatCannotHoldThemIsRefused) {
  const std::pair<int64_t, const char*> cases[] = {
      {0, "accumulate: the cache keeps no attention_stats"},
      {5, "attention_stats: expected 1 channel or at least 6, got 5"},
  };
  for (const auto& [channels, message] : cases) {
    const LaneFixture cache(Shape(DType::kF32, 2, channels), std::vector<int32_t>(12, 4), 4);
    try {
      Accumulate(cache, Queries(cache.shape(), 1), {0}, {0, 1}, 0);
      FAIL() << "accepted";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(message), std::string::npos) << e.what();
    }
  }
}

}  // namespace
}  // namespace kvcore
