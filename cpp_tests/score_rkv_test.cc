// R-KV scores equal the n x n oracle for every level, type, key regime and border length.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <string>

#include "base/parallel.h"
#include "cpu/cpu_ops.h"
#include "support/isa_levels.h"
#include "support/lane_fixture.h"
#include "support/rkv_oracle.h"

namespace kvcore {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int64_t kSpareSlots = 5;

struct Settings {
  int64_t protect = 8, kernel = 7;
  float mix = 0.1f, threshold = 0.5f;
  bool pool_first = false;
  std::optional<float> scale = {};
};

std::vector<int64_t> SlotsByPosition(const LaneFixture& cache, int64_t row, int64_t layer,
                                     int64_t head) {
  std::vector<int64_t> slots;
  for (int64_t slot = 0; slot < cache.Len(row, layer, head); ++slot) slots.push_back(slot);
  std::sort(slots.begin(), slots.end(), [&](int64_t a, int64_t b) {
    return cache.Position(row, layer, head, a) < cache.Position(row, layer, head, b);
  });
  return slots;
}

RkvOracleInput OracleInput(const LaneFixture& cache, int64_t row, int64_t layer, int64_t head,
                           const Settings& set) {
  const LaneShape& s = cache.shape();
  RkvOracleInput in;
  in.protect = set.protect;
  in.kernel = set.kernel;
  in.mix = set.mix;
  in.threshold = set.threshold;
  in.pool_first = set.pool_first;
  if (set.scale) in.scale = *set.scale;
  for (int64_t slot : SlotsByPosition(cache, row, layer, head)) {
    in.keys.emplace_back();
    for (int64_t d = 0; d < s.head_dim; ++d)
      in.keys.back().push_back(cache.Key(row, layer, head, slot, d));
  }
  const int64_t group = s.q_heads / s.kv_heads;
  const int64_t total = static_cast<int64_t>(cache.seq_len.Get({row}));
  for (int64_t at = std::max<int64_t>(0, total - s.window); at < total; ++at) {
    in.queries.emplace_back();
    for (int64_t g = 0; g < group; ++g) {
      in.queries.back().emplace_back();
      for (int64_t d = 0; d < s.head_dim; ++d)
        in.queries.back().back().push_back(
            cache.query_ring.Get({row, layer, head * group + g, at % s.window, d}));
    }
  }
  return in;
}

OwnedTensor Score(const LaneFixture& cache, const OwnedTensor& rows, const Settings& set,
                  int64_t slots) {
  const LaneShape& s = cache.shape();
  OwnedTensor score(DType::kF32, {rows.numel(), s.layers, s.kv_heads, slots});
  score.Fill(std::nan(""));
  const int64_t bytes = ScoreRkvScratchBytes(cache.view(), slots, NumThreads());
  std::vector<uint8_t> scratch(static_cast<size_t>(bytes) + 64, 0xcd);  // 64 more as a guard
  ScoreRkvParams p;
  p.rows = rows.view();
  p.score = score.view();
  p.scratch = MakeView(scratch.data(), DType::kU8, {bytes});
  p.protect = set.protect;
  p.kernel = set.kernel;
  p.mix = set.mix;
  p.threshold = set.threshold;
  p.pool_first = set.pool_first;
  p.scale = set.scale;
  ScoreRkvCpu(cache.view(), p, 0);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(scratch[static_cast<size_t>(bytes) + i], 0xcd);
  return score;
}

// Scores of the last and the first row against the oracle. The redundancy term alone is compared
// relative to its size, about 1 / n: one wrong pointer moves it by 1e-3 of that.
void ExpectOracle(const LaneFixture& cache, Settings set) {
  const LaneShape& s = cache.shape();
  const OwnedTensor rows = OwnedTensor::I32({static_cast<int32_t>(s.rows - 1), 0});
  const int64_t slots = s.max_blocks * kBlockSlots + kSpareSlots;
  const OwnedTensor score = Score(cache, rows, set, slots);
  Settings redundancy_only = set;
  redundancy_only.mix = 0;
  const OwnedTensor redundancy = Score(cache, rows, redundancy_only, slots);
  for (int64_t i = 0; i < rows.numel(); ++i)
    for (int64_t layer = 0; layer < s.layers; ++layer)
      for (int64_t head = 0; head < s.kv_heads; ++head) {
        const int64_t row = static_cast<int64_t>(rows.Get({i}));
        const RkvOracleResult want = RkvOracle(OracleInput(cache, row, layer, head, set));
        const std::vector<int64_t> order = SlotsByPosition(cache, row, layer, head);
        const int64_t n = static_cast<int64_t>(order.size());
        for (int64_t e = 0; e < n; ++e) {
          const double got = score.Get({i, layer, head, order[e]});
          if (e >= n - set.protect) {
            ASSERT_EQ(got, kInf) << "entry " << e << " of " << n;
            continue;
          }
          ASSERT_NEAR(got, want.score[e], 1e-6) << "entry " << e << " of " << n;
          ASSERT_NEAR(-redundancy.Get({i, layer, head, order[e]}) / want.redundancy[e], 1, 1e-5)
              << "entry " << e << " of " << n;
        }
        for (int64_t slot = n; slot < slots; ++slot)
          ASSERT_EQ(score.Get({i, layer, head, slot}), -kInf);
      }
}

// Key regimes, applied to a lane in position order.
enum class Keys { kIndependent, kCommon, kLoop, kClusters, kOrthogonal };

void Shape(LaneFixture* cache, Keys keys, uint64_t seed) {
  const LaneShape& s = cache->shape();
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal;
  for (int64_t row = 0; row < s.rows; ++row)
    for (int64_t layer = 0; layer < s.layers; ++layer)
      for (int64_t head = 0; head < s.kv_heads; ++head) {
        const std::vector<int64_t> order = SlotsByPosition(*cache, row, layer, head);
        for (size_t e = 0; e < order.size(); ++e)
          for (int64_t d = 0; d < s.head_dim; ++d) {
            double x = cache->Key(row, layer, head, order[e], d);
            if (keys == Keys::kCommon) x += 2;
            if (keys == Keys::kLoop && e >= 11)
              x = cache->Key(row, layer, head, order[e - 11], d) + 0.2 * normal(rng);
            if (keys == Keys::kClusters && e % 3 != 0)
              x = cache->Key(row, layer, head, order[e / 5], d) + 0.7 * normal(rng);
            if (keys == Keys::kOrthogonal)
              x = d == static_cast<int64_t>(e) % s.head_dim ? 3.0 : 0.01 * x;
            cache->SetKey(row, layer, head, order[e], d, x);
          }
      }
}

class ScoreRkvTest : public testing::TestWithParam<std::tuple<Isa, DType>> {
 protected:
  ScoreRkvTest() : isa_(std::get<0>(GetParam())) {}

  static LaneShape MakeShape(int64_t group = 2, int64_t head_dim = 16, int64_t window = 8) {
    LaneShape s;
    s.dtype = std::get<1>(GetParam());
    s.rows = 3;
    s.layers = 2;
    s.kv_heads = 2;
    s.q_heads = 2 * group;
    s.head_dim = head_dim;
    s.window = window;
    s.max_blocks = 12;
    return s;
  }

  // Twelve lanes of the lengths around blocks, panels and protect.
  static std::vector<int32_t> Lengths() { return {1, 8, 9, 15, 0, 0, 0, 0, 17, 31, 64, 161}; }

  WithIsa isa_;
};

INSTANTIATE_TEST_SUITE_P(All, ScoreRkvTest,
                         testing::Combine(testing::ValuesIn(SupportedIsas()),
                                          testing::Values(DType::kF32, DType::kBF16, DType::kF16)),
                         [](const auto& info) {
                           return std::string(IsaName(std::get<0>(info.param))) + "_" +
                                  DTypeName(std::get<1>(info.param));
                         });

TEST_P(ScoreRkvTest, EqualsTheOracleForEveryKeyRegime) {
  for (Keys keys :
       {Keys::kIndependent, Keys::kCommon, Keys::kLoop, Keys::kClusters, Keys::kOrthogonal}) {
    SCOPED_TRACE(static_cast<int>(keys));
    LaneFixture cache(MakeShape(), Lengths(), 21);
    Shape(&cache, keys, 22);
    ExpectOracle(cache, {});
  }
}

TEST_P(ScoreRkvTest, EqualsTheOracleForEveryGroupDimAndWindow) {
  struct Case {
    int64_t group, head_dim, window;
  };
  for (const Case& c : {Case{1, 8, 1}, Case{7, 128, 8}, Case{5, 24, 3}, Case{40, 16, 2},
                        Case{3, 80, 40}, Case{2, 256, 5}}) {
    SCOPED_TRACE("group " + std::to_string(c.group));
    LaneFixture cache(MakeShape(c.group, c.head_dim, c.window), Lengths(), 23);
    Shape(&cache, Keys::kClusters, 24);
    ExpectOracle(cache, {});
  }
}

TEST_P(ScoreRkvTest, EqualsTheOracleForEverySetting) {
  LaneFixture cache(MakeShape(), Lengths(), 25);
  Shape(&cache, Keys::kLoop, 26);
  for (const Settings& set :
       {Settings{.protect = 0}, Settings{.protect = 1}, Settings{.protect = 20},
        Settings{.protect = 160}, Settings{.protect = 1000}, Settings{.kernel = 1},
        Settings{.kernel = 31}, Settings{.kernel = 1001}, Settings{.pool_first = true},
        Settings{.kernel = 31, .mix = 1.0f, .pool_first = true}, Settings{.mix = 1.0f},
        Settings{.mix = 0.5f}, Settings{.threshold = 0.05f}, Settings{.threshold = 0.9f},
        Settings{.threshold = 2.0f}, Settings{.threshold = -0.25f},
        Settings{.mix = 1.0f, .scale = 0.02f}, Settings{.mix = 0.9f, .scale = 0.75f},
        Settings{.mix = 1.0f, .pool_first = true, .scale = 2.5f}}) {
    SCOPED_TRACE("protect " + std::to_string(set.protect) + " kernel " +
                 std::to_string(set.kernel) + " threshold " + std::to_string(set.threshold));
    ExpectOracle(cache, set);
  }
}

TEST_P(ScoreRkvTest, ZeroAndTinyKeysScoreFinite) {
  LaneFixture cache(MakeShape(), Lengths(), 27);
  const LaneShape& s = cache.shape();
  for (int64_t layer = 0; layer < s.layers; ++layer)
    for (int64_t head = 0; head < s.kv_heads; ++head)
      for (int64_t slot = 0; slot < cache.Len(2, layer, head); ++slot)
        for (int64_t d = 0; d < s.head_dim; ++d)
          cache.SetKey(2, layer, head, slot, d,
                       slot % 5 == 0 ? 0 : 1e-4 * cache.Key(2, layer, head, slot, d));
  ExpectOracle(cache, {});
}

TEST_P(ScoreRkvTest, NonFiniteKeysAndQueriesAreErrorsThatNameTheLane) {
  const LaneFixture clean(MakeShape(), Lengths(), 28);
  const OwnedTensor rows = OwnedTensor::I32({0, 2});
  for (double bad : {std::nan(""), kInf, -kInf})
    for (bool in_key : {true, false}) {
      LaneFixture cache = clean;
      if (in_key)
        cache.SetKey(2, 1, 0, 63, 3, bad);
      else
        cache.query_ring.Set({2, 1, 1, 4, 3}, bad);
      try {
        Score(cache, rows, {}, 200);
        ADD_FAILURE() << "no error for " << bad << (in_key ? " in a key" : " in a query");
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("row 2, layer 1, kv head 0"), std::string::npos)
            << e.what();
      }
    }
}

TEST_P(ScoreRkvTest, ChangesNothingButTheScores) {
  const LaneFixture cache(MakeShape(), Lengths(), 29);
  const LaneFixture before = cache;
  Score(cache, OwnedTensor::I32({2, 1, 0}), {}, 200);
  EXPECT_TRUE(SameBytes(cache.key_blocks, before.key_blocks));
  EXPECT_TRUE(SameBytes(cache.value_blocks, before.value_blocks));
  EXPECT_TRUE(SameBytes(cache.position, before.position));
  EXPECT_TRUE(SameBytes(cache.query_ring, before.query_ring));
}

TEST(ScoreRkvErrors, NameTheArgument) {
  LaneShape s;
  s.window = 4;
  s.max_blocks = 3;
  const LaneFixture cache(s, {40}, 30);
  const OwnedTensor rows = OwnedTensor::I32({0});
  const auto error = [&](const LaneFixture& from, const OwnedTensor& some_rows, Settings set,
                         int64_t slots) -> std::string {
    try {
      Score(from, some_rows, set, slots);
    } catch (const Error& e) {
      return std::string(e.what()).substr(0, 8);
    }
    return "none";
  };
  EXPECT_EQ(error(cache, rows, {}, 40), "none");
  EXPECT_EQ(error(cache, rows, {.protect = -1}, 40), "protect:");
  EXPECT_EQ(error(cache, rows, {.kernel = 6}, 40), "kernel: ");
  EXPECT_EQ(error(cache, rows, {.kernel = -1}, 40), "kernel: ");
  EXPECT_EQ(error(cache, rows, {.mix = 1.5f}, 40), "mix: exp");
  EXPECT_EQ(error(cache, rows, {.mix = std::nanf("")}, 40), "mix: exp");
  EXPECT_EQ(error(cache, rows, {.threshold = std::nanf("")}, 40), "threshol");
  for (const float scale : {0.0f, -1.0f, std::nanf(""), std::numeric_limits<float>::infinity()})
    EXPECT_EQ(error(cache, rows, {.scale = scale}, 40), "scale: e");
  EXPECT_EQ(error(cache, OwnedTensor::I32({1}), {}, 40), "rows[0]:");
  EXPECT_EQ(error(cache, rows, {}, 39), "score: e");
  s.window = 0;
  EXPECT_EQ(error(LaneFixture(s, {40}, 31), rows, {}, 40), "query_ri");

  OwnedTensor score(DType::kF32, {1, 1, 1, 40});
  std::vector<uint8_t> scratch(1000);
  ScoreRkvParams p;
  p.rows = rows.view();
  p.score = score.view();
  p.scratch = MakeView(scratch.data(), DType::kU8, {1000});
  EXPECT_THROW(ScoreRkvCpu(cache.view(), p, 0), Error);
}

TEST(ScoreRkvErrors, NoRowsIsLegal) {
  LaneShape s;
  s.window = 4;
  const LaneFixture cache(s, {40}, 32);
  EXPECT_EQ(Score(cache, OwnedTensor::I32({}), {}, 40).numel(), 0);
}

}  // namespace
}  // namespace kvcore
