#include "detect/entropy_window.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "support/detect_oracle.h"

namespace kvcore {
namespace {

EntropyWindow Defaults() { return EntropyWindow(12, 24, 7.0); }

TEST(EntropyWindow, IsFirstTestedAtTheGuardToken) {
  EntropyWindow window = Defaults();
  for (int e = 1; e <= 23; ++e) {
    EXPECT_FALSE(window.Push(11.0f)) << e;
    EXPECT_TRUE(std::isnan(window.max_mean()));
  }
  EXPECT_TRUE(window.Push(11.0f));
  EXPECT_EQ(window.max_mean(), 11.0);
}

TEST(EntropyWindow, MeanEqualToTheThresholdDoesNotFire) {
  EntropyWindow window = Defaults();
  for (int e = 1; e <= 40; ++e) EXPECT_FALSE(window.Push(7.0f)) << e;
  EXPECT_TRUE(window.Push(7.001f));
}

TEST(EntropyWindow, ForgetsTokensOlderThanTheWindow) {
  EntropyWindow window = Defaults();
  for (int e = 1; e <= 12; ++e) window.Push(100.0f);
  for (int e = 13; e <= 24; ++e) EXPECT_FALSE(window.Push(1.0f));
  EXPECT_EQ(window.max_mean(), 1.0);
}

TEST(EntropyWindow, GuardSmallerThanWindowAveragesWhatIsThere) {
  EntropyWindow window(12, 0, 7.0);
  EXPECT_TRUE(window.Push(8.0f));
  EXPECT_FALSE(window.Push(2.0f));
  EXPECT_EQ(window.max_mean(), 8.0);
}

TEST(EntropyWindow, EqualsTheOracleAtEveryToken) {
  std::mt19937_64 rng(7);
  for (int round = 0; round < 200; ++round) {
    DetectorConfig config;
    config.entropy_window = 1 + static_cast<int>(rng() % 20);
    config.entropy_guard = static_cast<int>(rng() % 30);
    config.entropy_threshold = 1.0f + static_cast<float>(rng() % 8);
    EntropyWindow window(config.entropy_window, config.entropy_guard, config.entropy_threshold);
    std::vector<float> nats;
    double max_mean = std::nan("");
    for (int e = 0; e < 60; ++e) {
      nats.push_back(static_cast<float>(rng() % 12000) / 1000.0f);
      double mean;
      EXPECT_EQ(detect_oracle::EntropyFires(nats, config, &mean), window.Push(nats.back()));
      max_mean = std::fmax(max_mean, mean);
      EXPECT_TRUE(max_mean == window.max_mean() || std::isnan(max_mean)) << max_mean;
    }
  }
}

}  // namespace
}  // namespace kvcore
