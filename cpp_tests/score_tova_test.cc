// TOVA scores equal their definition in double, for every type and length, and lanes of a layer
// agree.
#include "ops/score_tova.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "cpu/cpu_ops.h"
#include "support/lane_fixture.h"

namespace kvcore {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int64_t kSlots = 100;

LaneShape Shape(int64_t window, DType dtype = DType::kF32) {
  LaneShape s;
  s.dtype = dtype;
  s.rows = s.layers = s.kv_heads = 2;
  s.q_heads = 6;
  s.head_dim = 24;
  s.window = window;
  return s;
}

OwnedTensor Score(const LaneFixture& cache, const OwnedTensor& rows, int64_t protect,
                  std::optional<float> scale = {}) {
  OwnedTensor score(DType::kF32, {rows.numel(), 2, 2, kSlots});
  score.Fill(std::nan(""));
  ScoreTovaParams p;
  p.rows = rows.view();
  p.score = score.view();
  p.protect = protect;
  p.scale = scale;
  ScoreTovaCpu(cache.view(), p, 0);
  return score;
}

// By position: what the query heads of a layer attend to, divided by their number.
std::vector<double> Expected(const LaneFixture& cache, int64_t row, int64_t layer,
                             std::optional<float> given) {
  const LaneShape& s = cache.shape();
  const int64_t total = static_cast<int64_t>(cache.seq_len.Get({row}));
  std::vector<double> received(static_cast<size_t>(total));
  const double scale = given ? *given : 1 / std::sqrt(static_cast<double>(s.head_dim));
  for (int64_t q_head = 0; q_head < s.q_heads; ++q_head) {
    const int64_t head = q_head / (s.q_heads / s.kv_heads), len = cache.Len(row, layer, head);
    std::vector<double> weight;
    double sum = 0;
    for (int64_t slot = 0; slot < len; ++slot) {
      double dot = 0;
      for (int64_t d = 0; d < s.head_dim; ++d)
        dot += cache.query_ring.Get({row, layer, q_head, (total - 1) % s.window, d}) *
               cache.Key(row, layer, head, slot, d);
      weight.push_back(std::exp(scale * dot));
      sum += weight.back();
    }
    for (int64_t slot = 0; slot < len; ++slot)
      received[static_cast<size_t>(cache.Position(row, layer, head, slot))] +=
          weight[static_cast<size_t>(slot)] / sum / static_cast<double>(s.q_heads);
  }
  return received;
}

TEST(ScoreTova, EqualsItsDefinition) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
    for (const auto& [window, scale] :
         {std::pair{int64_t{1}, std::optional<float>()}, {3, 0.03f}, {8, 0.9f}})
      for (int64_t protect : {0, 1, 8, 200}) {
        const LaneFixture cache(Shape(window, dtype), {0, 1, 16, 17, 90, 8, 9, 33}, 5);
        const OwnedTensor score = Score(cache, OwnedTensor::I32({1, 0}), protect, scale);
        for (int64_t i = 0; i < 2; ++i)
          for (int64_t layer = 0; layer < 2; ++layer)
            for (int64_t head = 0; head < 2; ++head) {
              const int64_t row = 1 - i, len = cache.Len(row, layer, head);
              const std::vector<double> expected = Expected(cache, row, layer, scale);
              for (int64_t slot = 0; slot < kSlots; ++slot) {
                const double got = score.Get({i, layer, head, slot});
                if (slot >= len) {
                  ASSERT_EQ(got, -kInf);
                  continue;
                }
                const int64_t at = cache.Position(row, layer, head, slot);
                int64_t newer = 0;
                for (int64_t other = 0; other < len; ++other)
                  newer += cache.Position(row, layer, head, other) > at;
                if (newer < protect)
                  ASSERT_EQ(got, kInf);
                else
                  ASSERT_NEAR(got, expected[static_cast<size_t>(at)], 1e-6);
              }
            }
      }
}

TEST(ScoreTova, APositionScoresTheSameInEveryHeadOfALayerInWhateverSlot) {
  LaneFixture cache(Shape(1), {60, 60, 60, 60, 60, 60, 60, 60}, 6);
  for (int64_t layer = 0; layer < 2; ++layer)
    for (int64_t slot = 0; slot < 60; ++slot)
      cache.SetPosition(0, layer, 1, 59 - slot, cache.Position(0, layer, 0, slot));
  const OwnedTensor score = Score(cache, OwnedTensor::I32({0}), 0);
  for (int64_t layer = 0; layer < 2; ++layer) {
    double sum = 0;
    for (int64_t slot = 0; slot < 60; ++slot) {
      ASSERT_EQ(score.Get({0, layer, 0, slot}), score.Get({0, layer, 1, 59 - slot}));
      sum += score.Get({0, layer, 0, slot});
    }
    EXPECT_NEAR(sum, 1.0, 1e-5);
  }
  EXPECT_NE(score.Get({0, 0, 0, 3}), score.Get({0, 1, 0, 3}));
}

TEST(ScoreTova, LargeLogitsDoNotOverflow) {
  LaneFixture cache(Shape(2), {9, 9, 9, 9, 9, 9, 9, 9}, 7);
  for (int64_t d = 0; d < 24; ++d) {  // one of the two goes far above zero, whatever the query
    cache.SetKey(0, 0, 0, 4, d, 1e4);
    cache.SetKey(0, 0, 0, 5, d, -1e4);
  }
  const OwnedTensor score = Score(cache, OwnedTensor::I32({0}), 0);
  for (int64_t slot = 0; slot < 9; ++slot) EXPECT_TRUE(std::isfinite(score.Get({0, 0, 0, slot})));
}

TEST(ScoreTova, NonFiniteKeysAndQueriesAreErrorsThatNameTheLane) {
  const LaneFixture clean(Shape(2), {5, 5, 5, 5, 5, 5, 5, 5}, 8);
  const int64_t newest = static_cast<int64_t>(clean.seq_len.Get({1})) - 1;
  for (double bad : {std::nan(""), kInf, -kInf})
    for (bool in_key : {true, false}) {
      LaneFixture cache = clean;
      if (in_key)
        cache.SetKey(1, 1, 1, 3, 7, bad);
      else
        cache.query_ring.Set({1, 1, 4, newest % 2, 7}, bad);
      try {
        Score(cache, OwnedTensor::I32({0, 1}), 8);
        ADD_FAILURE() << "no error for " << bad << (in_key ? " in a key" : " in a query");
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("row 1, layer 1, kv head 1"), std::string::npos)
            << error.what();
      }
      EXPECT_NO_THROW(Score(cache, OwnedTensor::I32({0}), 8));
    }
}

TEST(ScoreTova, RefusesBadArgumentsByName) {
  const LaneFixture cache(Shape(1), {1, 1, 1, 1, 1, 1, 1, 101}, 9);
  const auto error = [](const LaneFixture& from, int32_t row, int64_t protect) -> std::string {
    try {
      Score(from, OwnedTensor::I32({row}), protect);
    } catch (const Error& e) {
      return std::string(e.what()).substr(0, 8);
    }
    return "none";
  };
  EXPECT_EQ(error(cache, 0, 8), "none");
  EXPECT_EQ(error(cache, 0, -1), "protect:");
  EXPECT_EQ(error(cache, 2, 8), "rows[0]:");
  for (const float scale : {0.0f, -1.0f, std::nanf(""), std::numeric_limits<float>::infinity()})
    EXPECT_THROW(Score(cache, OwnedTensor::I32({0}), 8, scale), Error);
  EXPECT_EQ(error(cache, 1, 8), "score: e");  // 101 slots into 100
  EXPECT_EQ(error(LaneFixture(Shape(0), {1, 1, 1, 1, 1, 1, 1, 1}, 9), 0, 8), "query_ri");
  LaneFixture torn = cache;
  torn.seq_len.Set({0}, 0);
  EXPECT_EQ(error(torn, 0, 8), "seq_len:");
}

TEST(ScoreTova, NoRowsIsLegal) {
  const LaneFixture cache(Shape(1), {1, 1, 1, 1, 1, 1, 1, 1}, 10);
  EXPECT_EQ(Score(cache, OwnedTensor::I32({}), 8).numel(), 0);
}

}  // namespace
}  // namespace kvcore
