#include "detect/repetition.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "support/detect_oracle.h"

namespace kvcore {
namespace {

// First token (from 1) at which the test fires; 0 if none.
int64_t FiredAt(const std::vector<int64_t>& tokens, int max_pattern, int min_count,
                int min_tokens) {
  RepetitionTail tail(max_pattern, min_count, min_tokens);
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tail.Push(static_cast<int32_t>(tokens[i]))) return static_cast<int64_t>(i) + 1;
  }
  return 0;
}

std::vector<int64_t> Loop(int64_t head, int64_t period, int64_t count) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < head; ++i) tokens.push_back(1000 + i);
  for (int64_t i = 0; i < period * count; ++i) tokens.push_back(i % period);
  return tokens;
}

TEST(Repetition, FiresAtTheLastTokenOfTheLastCopy) {
  EXPECT_EQ(FiredAt(Loop(10, 4, 5), 64, 3, 0), 10 + 12);
  EXPECT_EQ(FiredAt(Loop(0, 1, 5), 64, 2, 0), 2);
  EXPECT_EQ(FiredAt(Loop(10, 64, 3), 64, 3, 0), 10 + 192);
}

TEST(Repetition, PatternLongerThanTheLimitIsNotSeen) {
  EXPECT_EQ(FiredAt(Loop(10, 65, 6), 64, 3, 0), 0);
}

TEST(Repetition, SpanMustReachMinTokens) {
  EXPECT_EQ(FiredAt(Loop(7, 4, 40), 64, 3, 80), 7 + 80);
  EXPECT_EQ(FiredAt(Loop(7, 4, 19), 64, 3, 80), 0);
  // The span need not be whole copies: 81 = 5 * 16 + 1.
  EXPECT_EQ(FiredAt(Loop(0, 5, 17), 64, 3, 81), 81);
}

TEST(Repetition, OneForeignTokenStartsOver) {
  std::vector<int64_t> tokens = Loop(0, 3, 3);
  tokens[4] = 99;
  EXPECT_EQ(FiredAt(tokens, 8, 3, 0), 0);
}

TEST(Repetition, EqualsTheOracleAtEveryToken) {
  std::mt19937_64 rng(31);
  int num_fired = 0;
  for (int round = 0; round < 400; ++round) {
    DetectorConfig config;
    config.repetition_max_pattern_size = 1 + int(rng() % 20);
    config.repetition_min_count = 2 + int(rng() % 3);
    config.repetition_min_tokens = int(rng() % 40);
    RepetitionTail tail(config.repetition_max_pattern_size, config.repetition_min_count,
                        config.repetition_min_tokens);
    const uint64_t alphabet = 1 + rng() % 4, period = 1 + rng() % 24;
    std::vector<int64_t> tokens;
    for (int i = 0; i < 120; ++i) {
      const bool copy = tokens.size() >= period && rng() % 30;
      tokens.push_back(copy ? tokens[tokens.size() - period] : int64_t(rng() % alphabet));
      const bool fires = detect_oracle::RepetitionFires(tokens, config);
      ASSERT_EQ(tail.Push(static_cast<int32_t>(tokens.back())), fires) << round << " " << i;
      num_fired += fires;
    }
  }
  EXPECT_GT(num_fired, 4000);
}

}  // namespace
}  // namespace kvcore
