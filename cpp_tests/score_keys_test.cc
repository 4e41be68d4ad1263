// Scores from keys alone equal their definition in double, for every type and length.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cpu/cpu_ops.h"
#include "cpu/slot_scores.h"
#include "support/lane_fixture.h"

namespace kvcore {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int64_t kSlots = 100;

LaneShape Shape(DType dtype = DType::kF32) {
  LaneShape s;
  s.dtype = dtype;
  s.rows = s.layers = s.kv_heads = s.q_heads = 2;
  s.head_dim = 24;
  return s;
}

OwnedTensor Score(const LaneFixture& cache, const OwnedTensor& rows, KeyScore kind,
                  int64_t protect) {
  OwnedTensor score(DType::kF32, {rows.numel(), 2, 2, kSlots});
  score.Fill(std::nan(""));
  ScoreKeysParams p;
  p.rows = rows.view();
  p.score = score.view();
  p.kind = kind;
  p.protect = protect;
  ScoreKeysCpu(cache.view(), p, 0);
  return score;
}

double Norm(const std::vector<double>& x) {
  double sum = 0;
  for (double v : x) sum += v * v;
  return std::sqrt(sum);
}

std::vector<double> Expected(const LaneFixture& cache, int64_t row, int64_t layer, int64_t head,
                             KeyScore kind) {
  const int64_t len = cache.Len(row, layer, head), dim = cache.shape().head_dim;
  std::vector<std::vector<double>> key(static_cast<size_t>(len));
  for (int64_t s = 0; s < len; ++s)
    for (int64_t d = 0; d < dim; ++d)
      key[static_cast<size_t>(s)].push_back(cache.Key(row, layer, head, s, d));
  std::vector<double> score, mean(static_cast<size_t>(dim));
  for (const auto& k : key)
    for (size_t d = 0; d < mean.size(); ++d) mean[d] += k[d] / Norm(k) / static_cast<double>(len);
  for (const auto& k : key) {
    double dot = 0;
    for (size_t d = 0; d < mean.size(); ++d) dot += k[d] * mean[d];
    score.push_back(kind == KeyScore::kNorm ? -Norm(k) : -dot / Norm(k) / Norm(mean));
  }
  return score;
}

TEST(ScoreKeys, EqualsItsDefinition) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
    for (KeyScore kind : {KeyScore::kNorm, KeyScore::kDifference}) {
      const LaneFixture cache(Shape(dtype), {0, 1, 16, 17, 90, 8, 9, 33}, 5);
      const OwnedTensor rows = OwnedTensor::I32({1, 0});
      for (int64_t protect : {0, 1, 8, 200}) {
        const OwnedTensor score = Score(cache, rows, kind, protect);
        for (int64_t i = 0; i < 2; ++i)
          for (int64_t layer = 0; layer < 2; ++layer)
            for (int64_t head = 0; head < 2; ++head) {
              const int64_t row = 1 - i, len = cache.Len(row, layer, head);
              const std::vector<double> expected = Expected(cache, row, layer, head, kind);
              for (int64_t slot = 0; slot < kSlots; ++slot) {
                const double got = score.Get({i, layer, head, slot});
                if (slot >= len) {
                  ASSERT_EQ(got, -kInf);
                  continue;
                }
                int64_t newer = 0;
                for (int64_t other = 0; other < len; ++other)
                  newer += cache.Position(row, layer, head, other) >
                           cache.Position(row, layer, head, slot);
                if (newer < protect)
                  ASSERT_EQ(got, kInf);
                else
                  ASSERT_NEAR(got / expected[static_cast<size_t>(slot)], 1.0, 1e-5);
              }
            }
      }
    }
}

TEST(ScoreKeys, AZeroKeyScoresZero) {
  LaneFixture cache(Shape(), {5, 5, 5, 5, 5, 5, 5, 5}, 6);
  for (int64_t d = 0; d < cache.shape().head_dim; ++d) cache.SetKey(0, 0, 0, 2, d, 0.0);
  for (KeyScore kind : {KeyScore::kNorm, KeyScore::kDifference})
    EXPECT_EQ(Score(cache, OwnedTensor::I32({0}), kind, 0).Get({0, 0, 0, 2}), 0.0);
}

// A rotation by position, and a forward whose rounding errors are of the order of 1e-6.
TEST(ScoreKeys, NormsOfRotatedKeysTie) {
  LaneFixture cache(Shape(), {60, 60, 60, 60, 60, 60, 60, 60}, 10);
  for (int64_t slot = 1; slot < 60; ++slot)
    for (int64_t d = 0; d < cache.shape().head_dim; d += 2) {
      const double angle = static_cast<double>(slot) / static_cast<double>(d + 1);
      const double noise = 1 + 1e-6 * std::sin(static_cast<double>(slot));
      const double x = noise * cache.Key(0, 0, 0, 0, d), y = noise * cache.Key(0, 0, 0, 0, d + 1);
      cache.SetKey(0, 0, 0, slot, d, x * std::cos(angle) - y * std::sin(angle));
      cache.SetKey(0, 0, 0, slot, d + 1, x * std::sin(angle) + y * std::cos(angle));
    }
  const OwnedTensor score = Score(cache, OwnedTensor::I32({0}), KeyScore::kNorm, 0);
  for (int64_t slot = 1; slot < 60; ++slot)
    EXPECT_EQ(score.Get({0, 0, 0, slot}), score.Get({0, 0, 0, 0}));
}

TEST(ScoreKeys, NamesTheFirstLaneWhoseKeysAreNotFinite) {
  LaneFixture cache(Shape(), {5, 5, 5, 5, 5, 5, 5, 5}, 7);
  cache.SetKey(1, 1, 1, 3, 7, std::nan(""));
  cache.SetKey(1, 0, 1, 4, 0, kInf);  // protected, and still told
  for (KeyScore kind : {KeyScore::kNorm, KeyScore::kDifference}) {
    try {
      Score(cache, OwnedTensor::I32({0, 1}), kind, 2);
      FAIL() << "expected an Error";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("row 1, layer 0, kv head 1"), std::string::npos)
          << error.what();
    }
    EXPECT_NO_THROW(Score(cache, OwnedTensor::I32({0}), kind, 2));
  }
}

TEST(ScoreKeys, TheFirstBadLaneIsTheFirstInOrderNotInTime) {
  const LaneFixture cache(Shape(), {5, 5, 5, 5, 5, 5, 5, 5}, 11);
  const OwnedTensor rows = OwnedTensor::I32({0, 1});
  const KvCacheView view = cache.view();
  const LanesOfRows lanes(view, rows.view());
  FirstBadLane bad(lanes);
  EXPECT_NO_THROW(bad.Check("op", "cause"));
  for (int64_t index : {6, 3, 5}) bad.Add(index);
  try {
    bad.Check("op", "cause");
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("row 0, layer 1, kv head 1"), std::string::npos)
        << error.what();
  }
}

TEST(ScoreKeys, RefusesBadArgumentsByName) {
  const LaneFixture cache(Shape(), {1, 1, 1, 1, 1, 1, 1, 101}, 8);
  const auto error = [&cache](int32_t row, int64_t kind, int64_t protect) -> std::string {
    try {
      Score(cache, OwnedTensor::I32({row}), static_cast<KeyScore>(kind), protect);
    } catch (const Error& e) {
      return std::string(e.what()).substr(0, 6);
    }
    return "none";
  };
  EXPECT_EQ(error(0, 1, 8), "none");
  EXPECT_EQ(error(0, 0, -1), "protec");
  EXPECT_EQ(error(2, 0, 8), "rows[0");
  EXPECT_EQ(error(1, 0, 8), "score:");  // 101 slots into 100
  EXPECT_EQ(error(0, 2, 8), "kind: ");
  EXPECT_EQ(error(0, -1, 8), "kind: ");
}

TEST(ScoreKeys, NoRowsIsLegal) {
  const LaneFixture cache(Shape(), {1, 1, 1, 1, 1, 1, 1, 1}, 9);
  EXPECT_EQ(Score(cache, OwnedTensor::I32({}), KeyScore::kNorm, 8).numel(), 0);
}

}  // namespace
}  // namespace kvcore
