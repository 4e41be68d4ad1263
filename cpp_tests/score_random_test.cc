// Random scores are a pure function of (seed, layer, head, position).
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "base/rng.h"
#include "cpu/cpu_ops.h"
#include "support/lane_fixture.h"

namespace kvcore {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

LaneShape Shape() {
  LaneShape s;
  s.rows = 2;
  s.layers = 2;
  s.kv_heads = 2;
  s.q_heads = 2;
  s.head_dim = 8;
  return s;
}

OwnedTensor Score(const LaneFixture& cache, const OwnedTensor& rows, uint64_t seed,
                  int64_t protect) {
  OwnedTensor score(DType::kF32, {rows.numel(), 2, 2, 100});
  score.Fill(std::nan(""));
  ScoreRandomParams p;
  p.rows = rows.view();
  p.score = score.view();
  p.seed = seed;
  p.protect = protect;
  ScoreRandomCpu(cache.view(), p, 0);
  return score;
}

TEST(ScoreRandom, EqualsTheGeneratorAtThePosition) {
  const LaneFixture cache(Shape(), {0, 1, 16, 17, 90, 8, 9, 33}, 5);
  const OwnedTensor rows = OwnedTensor::I32({1, 0});
  for (int64_t protect : {0, 1, 8, 200}) {
    const OwnedTensor score = Score(cache, rows, 42, protect);
    for (int64_t i = 0; i < 2; ++i)
      for (int64_t layer = 0; layer < 2; ++layer)
        for (int64_t head = 0; head < 2; ++head) {
          const int64_t row = 1 - i, len = cache.Len(row, layer, head);
          for (int64_t slot = 0; slot < 100; ++slot) {
            const double got = score.Get({i, layer, head, slot});
            if (slot >= len) {
              ASSERT_EQ(got, -kInf);
              continue;
            }
            const int64_t at = cache.Position(row, layer, head, slot);
            int64_t newer = 0;
            for (int64_t other = 0; other < len; ++other)
              newer += cache.Position(row, layer, head, other) > at;
            const uint64_t key =
                HashKey(HashKey(42, static_cast<uint64_t>(layer)), static_cast<uint64_t>(head));
            ASSERT_EQ(got, newer < protect ? kInf : UniformFloat(key, static_cast<uint64_t>(at)));
          }
        }
  }
}

TEST(ScoreRandom, ATokenKeepsItsScoreInAnotherRowAndSlot) {
  LaneFixture cache(Shape(), {60, 60, 60, 60, 60, 60, 60, 60}, 6);
  for (int64_t layer = 0; layer < 2; ++layer)
    for (int64_t head = 0; head < 2; ++head)
      for (int64_t slot = 0; slot < 60; ++slot)
        cache.SetPosition(1, layer, head, 59 - slot, cache.Position(0, layer, head, slot));
  const OwnedTensor score = Score(cache, OwnedTensor::I32({0, 1}), 9, 8);
  for (int64_t layer = 0; layer < 2; ++layer)
    for (int64_t head = 0; head < 2; ++head)
      for (int64_t slot = 0; slot < 60; ++slot)
        ASSERT_EQ(score.Get({0, layer, head, slot}), score.Get({1, layer, head, 59 - slot}));
}

TEST(ScoreRandom, DiffersByLayerHeadAndSeed) {
  LaneFixture cache(Shape(), {1, 1, 1, 1, 1, 1, 1, 1}, 7);
  std::set<double> seen;
  for (uint64_t seed : {1, 2}) {
    for (int64_t layer = 0; layer < 2; ++layer)
      for (int64_t head = 0; head < 2; ++head) cache.SetPosition(0, layer, head, 0, 123);
    const OwnedTensor score = Score(cache, OwnedTensor::I32({0}), seed, 0);
    for (int64_t layer = 0; layer < 2; ++layer)
      for (int64_t head = 0; head < 2; ++head) seen.insert(score.Get({0, layer, head, 0}));
  }
  EXPECT_EQ(seen.size(), 8u);
}

TEST(ScoreRandom, RefusesBadArguments) {
  const LaneFixture cache(Shape(), {1, 1, 1, 1, 1, 1, 1, 101}, 8);
  EXPECT_THROW(Score(cache, OwnedTensor::I32({0}), 1, -1), Error);  // protect
  EXPECT_THROW(Score(cache, OwnedTensor::I32({2}), 1, 8), Error);   // row
  EXPECT_THROW(Score(cache, OwnedTensor::I32({1}), 1, 8), Error);   // 101 slots into 100
}

}  // namespace
}  // namespace kvcore
