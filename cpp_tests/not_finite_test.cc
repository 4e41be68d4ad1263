// Whatever is not finite in a live key, value or query is reported, whichever bits it has and
// wherever it lies, at every level and in every pass that reads it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "base/parallel.h"
#include "cpu/cpu_ops.h"
#include "ops/score_tova.h"
#include "store/kv_store.h"
#include "support/bad_numbers.h"
#include "support/isa_levels.h"
#include "support/lane_fixture.h"
#include "support/rkv_stream.h"

namespace kvcore {
namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

LaneShape Shape(DType dtype, int64_t group) {
  LaneShape s;
  s.dtype = dtype;
  s.rows = 2;
  s.kv_heads = 2;
  s.q_heads = 2 * group;
  s.head_dim = 24;
  s.max_blocks = 90;
  s.window = 3;
  return s;
}

int64_t KeyOffset(const LaneFixture& c, int64_t row, int64_t head, int64_t slot, int64_t dim) {
  return c.Block(row, 0, head, slot) * BlockElements(c.shape().head_dim) +
         CpuKeyOffset(slot % kBlockSlots, dim);
}
int64_t ValueOffset(const LaneFixture& c, int64_t row, int64_t head, int64_t slot, int64_t dim) {
  return c.Block(row, 0, head, slot) * BlockElements(c.shape().head_dim) +
         RowMajorOffset(slot % kBlockSlots, dim, c.shape().head_dim);
}

struct Result {
  OwnedTensor out, lse, not_finite;
};

// Each of the two rows brings two tokens.
Result Attend(const LaneFixture& cache, const OwnedTensor& query, bool accumulate = false) {
  const OwnedTensor rows = OwnedTensor::I32({0, 1}), cu = OwnedTensor::I32({0, 2, 4});
  Result r{query, OwnedTensor(DType::kF32, {4, cache.shape().q_heads}), OwnedTensor::I32({0, 0})};
  OwnedTensor scratch(DType::kU8, {AttendScratchBytes(cache.view(), NumThreads())});
  KvCacheView view = cache.view();
  view.row_states.Set("not_finite", r.not_finite.view());
  AttendParams p;
  p.query = query.view();
  p.out = r.out.view();
  p.lse = r.lse.view();
  p.scratch = scratch.view();
  p.batch = {rows.view(), cu.view()};
  p.scale = 0.2f;
  p.accumulate = accumulate;
  AttendCpu(view, p, 0);
  return r;
}

OwnedTensor Queries(const LaneShape& s, int64_t tokens) {
  OwnedTensor query(s.dtype, {tokens, s.q_heads, s.head_dim});
  std::mt19937_64 rng(7);
  query.FillNormal(rng);
  return query;
}

// Rows that should be NaN are so in every dim; the others have not changed by a bit.
void ExpectBadRows(const LaneShape& s, const Result& clean, const Result& got,
                   const std::vector<std::pair<int64_t, int64_t>>& bad, const std::string& what) {
  for (int64_t t = 0; t < 4; ++t)
    for (int64_t h = 0; h < s.q_heads; ++h) {
      const bool is_bad = std::find(bad.begin(), bad.end(), std::pair{t, h}) != bad.end();
      for (int64_t d = 0; d < s.head_dim; ++d) {
        const double x = got.out.Get({t, h, d});
        if (is_bad)
          ASSERT_TRUE(std::isnan(x)) << what << ": token " << t << " head " << h << " dim " << d;
        else
          ASSERT_EQ(x, clean.out.Get({t, h, d})) << what << ": token " << t << " head " << h;
      }
    }
}

class NotFinite : public testing::TestWithParam<std::tuple<Isa, DType, int64_t>> {
 protected:
  NotFinite() : level_(std::get<0>(GetParam())) {}
  DType dtype() const { return std::get<1>(GetParam()); }
  int64_t group() const { return std::get<2>(GetParam()); }

 private:
  WithIsa level_;
};

std::string Name(const testing::TestParamInfo<NotFinite::ParamType>& info) {
  const auto& [isa, dtype, group] = info.param;
  return std::string(IsaName(isa)) + "_" + DTypeName(dtype) + "_" + std::to_string(group);
}

INSTANTIATE_TEST_SUITE_P(All, NotFinite,
                         testing::Combine(testing::ValuesIn(SupportedIsas()),
                                          testing::ValuesIn(kTypes), testing::Values(1, 3, 9)),
                         Name);

// Directly in the blocks, past what append_kv does. Lanes of one chunk, of several and of several
// splits; the first slot, the last that both tokens see, one that only the second sees.
TEST_P(NotFinite, AttentionOfWhatSeesItIsNanAndNothingElseChanges) {
  const LaneShape s = Shape(dtype(), group());
  const LaneFixture clean(s, {330, 70, 1100, 1100}, 3);
  const OwnedTensor query = Queries(s, 4);
  const Result before = Attend(clean, query);
  EXPECT_EQ(before.not_finite.Get({0}), 0);
  EXPECT_EQ(before.not_finite.Get({1}), 0);
  for (const int64_t row : {0, 1})
    for (const uint32_t bits : BadBits(dtype()))
      for (const bool in_key : {true, false})
        for (const int64_t back : {0, 1, 60, -1}) {  // -1 = the first slot
          const int64_t len = clean.Len(row, 0, 1), slot = back < 0 ? 0 : len - 1 - back;
          const OwnedTensor& blocks = in_key ? clean.key_blocks : clean.value_blocks;
          const int64_t at =
              in_key ? KeyOffset(clean, row, 1, slot, 13) : ValueOffset(clean, row, 1, slot, 13);
          const double was = blocks.At(at);
          SetBits(blocks, at, bits);
          const Result got = Attend(clean, query);
          const_cast<OwnedTensor&>(blocks).SetAt(at, was);
          std::vector<std::pair<int64_t, int64_t>> bad;
          for (int64_t t = 2 * row + (back == 0); t < 2 * row + 2; ++t)
            for (int64_t g = 0; g < s.q_heads / 2; ++g) bad.emplace_back(t, s.q_heads / 2 + g);
          ExpectBadRows(s, before, got, bad,
                        (in_key ? "key " : "value ") + std::to_string(bits) + " in slot " +
                            std::to_string(slot));
          const double position = clean.seq_len.Get({row}) - 2 + (back == 0);
          EXPECT_EQ(got.not_finite.Get({row}), position + 1);
          EXPECT_EQ(got.not_finite.Get({1 - row}), 0);
        }
}

TEST_P(NotFinite, AttentionOfSuchAQueryIsNanInItsOwnHeadOnly) {
  const LaneShape s = Shape(dtype(), group());
  const LaneFixture cache(s, {330, 70, 1100, 1100}, 4);
  const OwnedTensor query = Queries(s, 4);
  const Result before = Attend(cache, query);
  for (const uint32_t bits : BadBits(dtype()))
    for (int64_t head = 0; head < s.q_heads; ++head)
      for (const int64_t dim : {0, 7, 23}) {
        OwnedTensor bad = query;
        SetBits(bad, (2 * s.q_heads + head) * s.head_dim + dim, bits);
        const Result got = Attend(cache, bad);
        ExpectBadRows(s, before, got, {{2, head}}, "query " + std::to_string(bits));
        EXPECT_TRUE(std::isnan(got.lse.Get({2, head})));
        EXPECT_EQ(got.not_finite.Get({1}), cache.seq_len.Get({1}) - 1);
        EXPECT_EQ(got.not_finite.Get({0}), 0);
      }
}

// Logits that overflow to minus infinity would weigh nothing and leave no trace.
TEST_P(NotFinite, ProductsThatOverflowAreNotLostEither) {
  if (dtype() == DType::kF16) return;  // its numbers are too small
  LaneShape s = Shape(dtype(), group());
  LaneFixture cache(s, {40, 40, 40, 40}, 5);
  OwnedTensor query = Queries(s, 4);
  query.Fill(1e20);
  for (int64_t d = 0; d < s.head_dim; ++d) cache.SetKey(0, 0, 0, 11, d, -1e20);
  const Result got = Attend(cache, query);
  for (int64_t g = 0; g < group(); ++g) EXPECT_TRUE(std::isnan(got.out.Get({0, g, 3})));
}

TEST_P(NotFinite, AttentionStatsKeepIt) {
  for (const int64_t channels : {int64_t{1}, 3 * group()}) {
    LaneShape s = Shape(dtype(), group());
    s.planes = {{kAttentionStats, DType::kF32, channels}};
    for (const uint32_t bits : BadBits(dtype()))
      for (const bool in_query : {true, false}) {
        const LaneFixture cache(s, {150, 40, 150, 40}, 6);
        OwnedTensor query = Queries(s, 4);
        const int64_t g = group() - 1;  // of kv head 0
        if (in_query)
          SetBits(query, (2 * s.q_heads + g) * s.head_dim + 5, bits);
        else
          SetBits(cache.key_blocks, KeyOffset(cache, 1, 0, 77, 5), bits);
        Attend(cache, query, true);
        for (int64_t c = 0; c < channels; ++c) {
          const bool hit = channels == 1 || !in_query || c % group() == g;
          EXPECT_EQ(std::isnan(cache.Number(1, 0, 0, 30, c)), hit) << "channel " << c;
          EXPECT_FALSE(std::isnan(cache.Number(1, 0, 1, 30, c)));
          EXPECT_FALSE(std::isnan(cache.Number(0, 0, 0, 30, c)));
        }
      }
  }
}

TEST_P(NotFinite, ScoresRefuseItInEveryHeadAndSlot) {
  const LaneShape s = Shape(dtype(), group());
  const LaneFixture clean(s, {100, 70, 100, 100}, 8);
  const OwnedTensor rows = OwnedTensor::I32({0, 1});
  OwnedTensor score(DType::kF32, {2, 1, 2, 100});
  OwnedTensor scratch(DType::kU8, {ScoreRkvScratchBytes(clean.view(), 100, NumThreads())});
  const auto refused_by_rkv = [&](const LaneFixture& cache, float mix) {
    ScoreRkvParams p;
    p.rows = rows.view();
    p.score = score.view();
    p.scratch = scratch.view();
    p.protect = 10;
    p.mix = mix;
    try {
      ScoreRkvCpu(cache.view(), p, 0);
    } catch (const Error& e) {
      return std::string(e.what()).find("row 1, layer 0, kv head 1") != std::string::npos;
    }
    return false;
  };
  const auto refused_by_tova = [&](const LaneFixture& cache) {
    ScoreTovaParams p;
    p.rows = rows.view();
    p.score = score.view();
    try {
      ScoreTovaCpu(cache.view(), p, 0);
    } catch (const Error&) {
      return true;
    }
    return false;
  };
  const auto refused_by_keys = [&](const LaneFixture& cache, KeyScore kind) {
    ScoreKeysParams p;
    p.rows = rows.view();
    p.score = score.view();
    p.kind = kind;
    try {
      ScoreKeysCpu(cache.view(), p, 0);
    } catch (const Error&) {
      return true;
    }
    return false;
  };
  EXPECT_FALSE(refused_by_rkv(clean, 0.1f));
  EXPECT_FALSE(refused_by_tova(clean));
  const int64_t newest = static_cast<int64_t>(clean.seq_len.Get({1})) - 1;
  for (const uint32_t bits : BadBits(dtype())) {
    for (int64_t g = 0; g < group(); ++g)
      for (int64_t cell = 0; cell < s.window; ++cell) {
        const LaneFixture cache = clean;
        SetBits(cache.query_ring, (((s.q_heads + group() + g) * s.window) + cell) * s.head_dim + 9,
                bits);
        for (const float mix : {0.0f, 0.1f, 1.0f})
          EXPECT_TRUE(refused_by_rkv(cache, mix)) << bits << " head " << g << " mix " << mix;
        EXPECT_EQ(refused_by_tova(cache), cell == newest % s.window) << bits << " head " << g;
      }
    for (const int64_t slot : {0, 40, 99}) {
      const LaneFixture cache = clean;
      SetBits(cache.key_blocks, KeyOffset(cache, 1, 1, slot, 17), bits);
      for (const float mix : {0.0f, 0.1f, 1.0f})
        EXPECT_TRUE(refused_by_rkv(cache, mix)) << bits << " slot " << slot << " mix " << mix;
      EXPECT_TRUE(refused_by_tova(cache)) << bits;
      EXPECT_TRUE(refused_by_keys(cache, KeyScore::kNorm)) << bits;
      EXPECT_TRUE(refused_by_keys(cache, KeyScore::kDifference)) << bits;
    }
  }
}

// The fused pass, while it keeps the state and when it is built anew after a chunk.
TEST_P(NotFinite, TheFusedPassElectsNothing) {
  for (const float mix : {0.1f, 1.0f})
    for (const int64_t count : {1, 5})
      for (const uint32_t bits : BadBits(dtype()))
        for (const RkvPoison::What what : {RkvPoison::kKey, RkvPoison::kValue, RkvPoison::kQuery})
          for (const int64_t head :
               what != RkvPoison::kQuery
                   ? std::set<int64_t>{0, 1}
                   : std::set<int64_t>{0, group() / 2, group() - 1, 2 * group() - 1}) {
            RkvStreamShape shape;
            shape.dtype = dtype();
            shape.kv_heads = 2;
            shape.group = group();
            shape.head_dim = 24;
            shape.slots = 70;
            shape.rkv.mix = mix;
            RkvStream stream(shape, "iid", 4);
            stream.Feed(68);
            for (int t = 0; t < 5; ++t) stream.Feed(1);
            ASSERT_GE(stream.Elected(0), 0);
            stream.Poison({what, head, bits});
            stream.Feed(count);
            const int64_t lane = what == RkvPoison::kQuery ? head / group() : head;
            EXPECT_EQ(stream.NotFinite(), 73 + 1) << "the first token of the chunk";
            // Building reads no values; what was noted tells.
            if (what == RkvPoison::kValue && count > 1) continue;
            EXPECT_EQ(stream.Elected(lane), -2) << bits << " head " << head << " mix " << mix;
            if (count == 1) {
              EXPECT_GE(stream.Elected(1 - lane), 0);
            }
          }
}

TEST_P(NotFinite, AppendStoresNanThroughoutAndNotesTheFirstPosition) {
  const LaneShape s = [&] {
    LaneShape shape = Shape(dtype(), group());
    shape.spare_blocks = 9;
    return shape;
  }();
  for (const uint32_t bits : BadBits(dtype()))
    for (int what = 0; what < 3; ++what) {
      LaneFixture cache(s, {20, 20, 20, 20}, 9);
      cache.Extend(0, 2);
      cache.Extend(1, 6);
      OwnedTensor key(s.dtype, {8, 2, 24}), value = key, query = Queries(s, 8);
      std::mt19937_64 rng(1);
      key.FillNormal(rng);
      value.FillNormal(rng);
      // Tokens 3 and 5 of the batch are row 1's second and fourth; the ring forgets both.
      for (const int64_t t : {5, 3}) {
        if (what == 0) SetBits(key, (t * 2 + 1) * 24 + 23, bits);
        if (what == 1) SetBits(value, (t * 2 + 1) * 24 + 23, bits);
        if (what == 2) SetBits(query, (t * s.q_heads + s.q_heads - 1) * 24 + 23, bits);
      }
      const OwnedTensor rows = OwnedTensor::I32({0, 1}), cu = OwnedTensor::I32({0, 2, 8});
      const OwnedTensor plane = OwnedTensor::I32({0, 0});
      KvCacheView view = cache.view();
      view.row_states.Set("not_finite", plane.view());
      AppendKvParams p;
      p.key = key.view();
      p.value = value.view();
      p.query = query.view();
      p.batch = {rows.view(), cu.view()};
      AppendKvCpu(view, p, 0);
      EXPECT_EQ(plane.Get({0}), 0);
      EXPECT_EQ(plane.Get({1}), cache.seq_len.Get({1}) - 6 + 1 + 1);
      for (int64_t t = 0; t < 6; ++t)
        for (int64_t h = 0; h < 2; ++h)
          for (int64_t d = 0; d < 24; ++d) {
            const bool bad = h == 1 && (t == 1 || t == 3);
            EXPECT_EQ(std::isnan(cache.Key(1, 0, h, 20 + t, d)), what == 0 && bad);
            EXPECT_EQ(std::isnan(cache.Value(1, 0, h, 20 + t, d)), what == 1 && bad);
          }
    }
}

TEST(NotFinitePlane, LivesAndDiesWithItsSequence) {
  LaneShape s = Shape(DType::kF32, 1);
  s.rows = 4;
  s.spare_blocks = 60;
  const LaneFixture cache(s, std::vector<int32_t>(8, 0), 10);
  OwnedTensor plane = OwnedTensor::I32({7, 7, 7, 7});
  KvCacheView view = cache.view();
  view.row_states.Set("not_finite", plane.view());
  KvStore store(view);
  for (int64_t row = 0; row < 4; ++row) EXPECT_EQ(plane.Get({row}), 0);
  const SeqId a = store.Create();
  store.Extend({a}, {20});
  plane.Set({store.Row(a)}, 18);  // position 17
  const SeqId b = store.Fork(a, 1, false)[0];
  EXPECT_EQ(plane.Get({store.Row(b)}), 18);
  store.Truncate(b, 2);  // positions 18 and 19 go
  EXPECT_EQ(plane.Get({store.Row(b)}), 18);
  store.Truncate(b, 1);
  EXPECT_EQ(plane.Get({store.Row(b)}), 0);
  EXPECT_EQ(plane.Get({store.Row(a)}), 18);
  const int64_t row = store.Row(a);
  store.Release(a);
  EXPECT_EQ(plane.Get({row}), 0);
}

}  // namespace
}  // namespace kvcore
