// The fused R-KV pass: state and elections equal direct recomputation in double, over long runs
// with forks and chunks mixed in, for every level, type and key regime.
#include "support/rkv_stream.h"

#include <gtest/gtest.h>

#include <string>

#include "support/isa_levels.h"

namespace kvcore {
namespace {

class RkvStreamTest : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Regimes, RkvStreamTest,
                         testing::Values("iid", "cluster", "mean", "rope", "loop"));

#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kTokens = 5'000;
#else
constexpr int64_t kTokens = 100'000;
#endif

// kTokens in each of five regimes.
TEST_P(RkvStreamTest, EqualsDirectRecomputationOverALongRunWithForksAndChunks) {
  RkvStreamShape shape;
  shape.head_dim = 64;
  RkvStream stream(shape, GetParam(), 1);
  std::mt19937_64 rng(5);
  stream.Feed(50);
  for (int64_t t = 0; t < kTokens; ++t) {
    if (rng() % 5'003 == 0) stream.Feed(2 + static_cast<int64_t>(rng() % 20));
    if (rng() % 97 == 0) stream.Fork();
    stream.Feed(1);
    if (t > 60 && t % 199 == 0) {
      ASSERT_EQ(stream.Differs(0, 1e-6), "") << "token " << t;
    }
  }
  stream.CheckIntegrity();
}

// Only importance decides then, and only it is kept.
TEST_P(RkvStreamTest, WithoutRedundancyTheElectionEqualsTheOracleAtEveryLevelAndType) {
  for (const Isa isa : SupportedIsas()) {
    const WithIsa level(isa);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
      for (const int64_t group : {1, 7, 12}) {
        RkvStreamShape shape;
        shape.dtype = dtype;
        shape.group = group;
        shape.slots = 77;
        shape.rkv.mix = 1;
        shape.rkv.kernel = group == 12 ? 41 : 7;  // wider than a vector
        RkvStream stream(shape, GetParam(), 3);
        stream.Feed(30);
        for (int64_t t = 0; t < 200; ++t) {
          stream.Feed(1);
          if (t % 50 == 17) stream.Fork();
          if (t < 60 || t % 7 != 0) continue;
          ASSERT_EQ(stream.Differs(0, 1e-6), "") << IsaName(isa) << " token " << t;
        }
      }
  }
}

TEST_P(RkvStreamTest, EveryLevelAndTypeAgreesWithTheOracle) {
  for (const Isa isa : SupportedIsas()) {
    const WithIsa level(isa);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      RkvStreamShape shape;
      shape.dtype = dtype;
      shape.kv_heads = 2;
      shape.group = 7;
      shape.head_dim = 40;  // no multiple of a vector
      shape.slots = 77;
      RkvStream stream(shape, GetParam(), 2);
      stream.Feed(30);
      for (int64_t t = 0; t < 300; ++t) {
        stream.Feed(1);
        if (t < 60 || t % 23 != 0) continue;
        for (int64_t h = 0; h < 2; ++h)
          ASSERT_EQ(stream.Differs(h, 1e-6), "") << IsaName(isa) << " token " << t;
      }
    }
  }
}

}  // namespace
}  // namespace kvcore
