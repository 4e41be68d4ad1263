// Counter-based random numbers: known answers and ranges.
#include "base/rng.h"

#include <gtest/gtest.h>

#include <set>

namespace kvcore {
namespace {

void ExpectWords(const Philox4& got, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  EXPECT_EQ(got.x[0], a);
  EXPECT_EQ(got.x[1], b);
  EXPECT_EQ(got.x[2], c);
  EXPECT_EQ(got.x[3], d);
}

// Known answers of philox4x32-10 published with the Random123 library.
TEST(Philox, GivesTheKnownAnswers) {
  ExpectWords(Philox(0, 0, 0), 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8);
  ExpectWords(Philox(~0ull, ~0ull, ~0ull), 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd);
  ExpectWords(Philox(0x299f31d0a4093822ull, 0x85a308d3243f6a88ull, 0x0370734413198a2eull),
              0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1);
}

TEST(Uniform, StaysBelowOneAndCoversTheInterval) {
  const int n = 20000;
  double sum_float = 0, sum_double = 0;
  int tenths[10] = {};
  for (int i = 0; i < n; ++i) {
    const float f = UniformFloat(7, static_cast<uint64_t>(i));
    const double d = UniformDouble(7, static_cast<uint64_t>(i));
    ASSERT_GE(f, 0.0f);
    ASSERT_LT(f, 1.0f);
    ASSERT_GE(d, 0.0);
    ASSERT_LT(d, 1.0);
    sum_float += f;
    sum_double += d;
    ++tenths[static_cast<int>(d * 10)];
  }
  // Standard deviation of the mean: sqrt(1 / 12 / n) = 0.002; five of them.
  EXPECT_NEAR(sum_float / n, 0.5, 0.0103);
  EXPECT_NEAR(sum_double / n, 0.5, 0.0103);
  for (int count : tenths) EXPECT_NEAR(count, n / 10, 5 * 42.5);  // sqrt(n * 0.1 * 0.9) = 42.4
}

TEST(HashKey, DependsOnEveryWordAndItsPlace) {
  std::set<uint64_t> seen;
  for (uint64_t seed = 0; seed < 8; ++seed)
    for (uint64_t a = 0; a < 8; ++a)
      for (uint64_t b = 0; b < 8; ++b) seen.insert(HashKey(HashKey(seed, a), b));
  EXPECT_EQ(seen.size(), 512u);
}

}  // namespace
}  // namespace kvcore
