#include "detect/compression_window.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "support/detect_oracle.h"

namespace kvcore {
namespace {

using detect_oracle::GzipBytes;
using detect_oracle::MakeText;
using detect_oracle::TextKind;

std::string Repeat(const std::string& phrase, size_t bytes) {
  std::string s;
  while (s.size() < bytes) s += phrase;
  s.resize(bytes);
  return s;
}

TextKind Kind(uint64_t i) { return static_cast<TextKind>(i % (1 + uint64_t(TextKind::kLast))); }

const std::string& Prose() {
  static const std::string prose =
      "To determine how many apples are left, subtract the number sold on Monday from the number "
      "picked on Sunday. There were 384 apples picked on Sunday and 127 sold on Monday, so "
      "384 - 127 = 257 apples are left. ";
  return prose;
}

std::string Counting(int last, size_t bytes) {
  std::string s;
  for (int i = 1; i < last; ++i) {
    s += std::to_string(i) + ". The number is " + std::to_string(i * i) + ".\n";
  }
  return s.substr(0, bytes);
}

// len(gzip.compress(data)) of Python 3.11 with zlib 1.2.13.
TEST(GzipSize, EqualsTheGzipFilesOfPython) {
  std::string all_bytes;
  for (int i = 0; i < 1024; ++i) all_bytes += static_cast<char>(i % 256);
  EXPECT_EQ(GzipSize(""), 20);
  EXPECT_EQ(GzipSize("a"), 21);
  EXPECT_EQ(GzipSize(std::string(800, 'a')), 28);  // ratio 0.035: the frame counts
  EXPECT_EQ(GzipSize(Repeat("ab", 800)), 29);
  EXPECT_EQ(GzipSize(Prose()), 146);
  EXPECT_EQ(GzipSize(Repeat(Prose().substr(0, 100), 800)), 107);
  EXPECT_EQ(GzipSize(Repeat(Prose().substr(0, 150), 800)), 135);
  EXPECT_EQ(GzipSize(Counting(60, 800)), 213);
  EXPECT_EQ(GzipSize(all_bytes), 298);
  EXPECT_EQ(GzipSize(std::string(5000, '0')), 41);
  EXPECT_EQ(GzipSize(Counting(400, 5000)), 1112);
  EXPECT_EQ(GzipSize(Repeat("数学的答案是二十五。", 800)), 60);
}

TEST(GzipSize, ReusedStateEqualsOneCallZlib) {
  GzipSizer sizer;
  std::mt19937_64 rng(11);
  for (uint64_t i = 0; i < 3000; ++i) {
    const int64_t bytes = int64_t(i % 50 ? rng() % 1200 : rng() % 100000);
    const std::string text = MakeText(Kind(i), bytes, i);
    ASSERT_EQ(sizer.Size(text), GzipBytes(text)) << "text " << i;
  }
}

TEST(CompressionWindow, ExistsFromTheTokenThatFillsIt) {
  GzipSizer sizer;
  CompressionWindow window(800, 0.18, false);
  const std::string text(801, 'a');
  EXPECT_FALSE(window.Due(0));
  EXPECT_FALSE(window.Due(799));
  EXPECT_TRUE(std::isnan(window.min_ratio()));
  ASSERT_TRUE(window.Due(800));
  EXPECT_TRUE(window.Test(text.substr(0, 800), &sizer));
  EXPECT_EQ(window.min_ratio(), 0.035);
}

TEST(CompressionWindow, RatioEqualToTheThresholdDoesNotFire) {
  GzipSizer sizer;
  const std::string text = Counting(60, 800);
  const double ratio = 213 / 800.0;
  EXPECT_FALSE(CompressionWindow(800, ratio, true).Test(text, &sizer));
  EXPECT_TRUE(CompressionWindow(800, std::nextafter(ratio, 1.0), true).Test(text, &sizer));
}

TEST(CompressionWindow, SeesOnlyTheLastBytes) {
  GzipSizer sizer;
  const std::string loop(800, 'x');
  CompressionWindow after(800, 0.18, true), before(800, 0.18, true);
  EXPECT_TRUE(after.Test(Prose() + loop, &sizer));
  EXPECT_FALSE(before.Test(loop + MakeText(TextKind::kNatural, 800, 5), &sizer));
}

double DropBound(double num_bytes) { return 2 * num_bytes + 32; }

// The bound behind skipping ahead, for every pair of positions at most 600 bytes apart.
TEST(CompressionWindow, SizeFallsNoFasterThanTheBound) {
  GzipSizer sizer;
  double worst = -1e9;
  for (uint64_t i = 0; i < 140; ++i) {
    const std::string text = MakeText(Kind(i), 1500, 1000 + i);
    std::vector<double> size;
    for (size_t end = 800; end <= text.size(); ++end) {
      size.push_back(double(sizer.Size(std::string_view(text).substr(end - 800, 800))));
    }
    for (size_t p = 0; p < size.size(); ++p) {
      for (size_t q = p + 1; q < std::min(size.size(), p + 600); ++q) {
        worst = std::max(worst, size[p] - size[q] - DropBound(double(q - p)));
      }
    }
  }
  EXPECT_LE(worst, 0);
}

// A text whose gzip size a hill climb makes fall as far as it can between the window that ends at
// byte 800 and the one that ends k bytes later.
std::string SteepFall(size_t k, GzipSizer* sizer, int64_t* fall) {
  std::mt19937_64 rng(k);
  std::string text;
  while (text.size() < k) text += static_cast<char>(rng() % 256);
  while (text.size() < 800 + k) text += static_cast<char>('a' + text.size() % 3);
  const auto drop = [&](const std::string& s) {
    return sizer->Size(std::string_view(s).substr(0, 800)) -
           sizer->Size(std::string_view(s).substr(k, 800));
  };
  *fall = drop(text);
  for (int step = 0; step < 3000; ++step) {
    std::string changed = text;
    if (step % 2) {
      changed[rng() % (step % 4 == 1 ? k : changed.size())] = static_cast<char>(rng() % 256);
    } else {
      changed[rng() % changed.size()] = text[rng() % k];
    }
    const int64_t now = drop(changed);
    if (now < *fall) continue;
    *fall = now;
    text = changed;
  }
  return text;
}

// The threshold lies where only the last of these windows fires, which a window that trusted a
// bound of k + 16 would have skipped.
TEST(CompressionWindow, SteepestFallThatASearchFindsIsNotSkipped) {
  GzipSizer sizer;
  for (size_t k : {16, 30, 52, 80}) {
    int64_t fall = 0;
    const std::string text = SteepFall(k, &sizer, &fall);
    EXPECT_GT(fall, int64_t(k) + 16) << "the search finds nothing that could be skipped";
    EXPECT_LE(double(fall), DropBound(double(k)));
    const double last = double(sizer.Size(std::string_view(text).substr(k)));
    const double threshold = (last + 0.5) / 800;
    CompressionWindow skipping(800, threshold, false);
    int64_t fired_at = -1, exact_at = -1;
    for (size_t end = 800; end <= text.size() && fired_at < 0; ++end) {
      const std::string_view seen = std::string_view(text).substr(0, end);
      if (exact_at < 0 && CompressionWindow(800, threshold, true).Test(seen, &sizer)) {
        exact_at = int64_t(end);
      }
      if (skipping.Due(int64_t(end)) && skipping.Test(seen, &sizer)) fired_at = int64_t(end);
    }
    EXPECT_GT(exact_at, 800) << "k " << k;
    EXPECT_EQ(fired_at, exact_at) << "k " << k;
  }
}

// Token ends at which the window fires first, and how often it compressed.
struct Outcome {
  int64_t fired_at_bytes = -1, num_tests = 0, num_tokens = 0;
  double min_ratio = 0;
};
Outcome RunWindow(const std::string& text, int window_bytes, double threshold, bool exact,
                  int64_t max_token_bytes, uint64_t seed, GzipSizer* sizer) {
  CompressionWindow window(window_bytes, threshold, exact);
  std::mt19937_64 rng(seed);
  Outcome run;
  for (int64_t end = 0; end < int64_t(text.size()) && run.fired_at_bytes < 0;) {
    end = std::min<int64_t>(text.size(), end + int64_t(rng() % (max_token_bytes + 1)));
    ++run.num_tokens;
    if (!window.Due(end)) continue;
    ++run.num_tests;
    if (window.Test(std::string_view(text).substr(0, end), sizer)) run.fired_at_bytes = end;
  }
  run.min_ratio = window.min_ratio();
  return run;
}

TEST(CompressionWindow, SkippingFiresWhereTestingEveryTokenFires) {
  GzipSizer sizer;
  std::mt19937_64 rng(21);
  int num_fired = 0;
  for (uint64_t i = 0; i < 400; ++i) {
    const int window = i % 4 ? 800 : 100 + int(rng() % 700);
    const double threshold = i % 3 ? 0.18 : 0.05 + double(rng() % 30) / 100;
    const int64_t token_bytes = 1 + int64_t(rng() % 9);
    const std::string text = MakeText(Kind(i), 2400, 5000 + i);
    const Outcome exact = RunWindow(text, window, threshold, true, token_bytes, i, &sizer);
    const Outcome skip = RunWindow(text, window, threshold, false, token_bytes, i, &sizer);
    ASSERT_EQ(exact.fired_at_bytes, skip.fired_at_bytes) << "text " << i << " window " << window;
    EXPECT_LE(skip.num_tests, exact.num_tests);
    EXPECT_GE(skip.min_ratio, exact.min_ratio);
    num_fired += exact.fired_at_bytes >= 0;
  }
  EXPECT_GT(num_fired, 100);  // both outcomes are exercised
  EXPECT_LT(num_fired, 300);
}

// The bound behind skipping was found for windows of at most 800 bytes. Larger ones get every text
// that fires at the last moment a bound would have allowed, and such as a hill climb makes.
TEST(CompressionWindow, LargeWindowsFireWhereTestingEveryTokenFires) {
  GzipSizer sizer;
  for (const int window : {801, 1024, 4096, 32768}) {
    const uint64_t texts = window > 4096 ? 2 : 12;
    int num_fired = 0;
    for (uint64_t i = 0; i < texts; ++i) {
      const TextKind kind = i % 2 ? Kind(i) : TextKind::kLateLoop;
      // Noise scrolls out of a loop in the last part.
      const std::string text = MakeText(kind, window, 9000 + i) + std::string(size_t(window), 'a');
      const Outcome exact = RunWindow(text, window, 0.18, true, 1 + window / 512, i, &sizer);
      const Outcome skip = RunWindow(text, window, 0.18, false, 1 + window / 512, i, &sizer);
      ASSERT_EQ(exact.fired_at_bytes, skip.fired_at_bytes) << "text " << i << " window " << window;
      EXPECT_EQ(exact.num_tests, skip.num_tests) << "every token is tested";
      EXPECT_EQ(exact.min_ratio, skip.min_ratio);
      num_fired += exact.fired_at_bytes >= 0;
    }
    EXPECT_GT(num_fired, 0);
  }
}

// The threshold lies between the sizes before and after a fall that a hill climb has made steep:
// whoever skips the one byte that brings it fires late.
TEST(CompressionWindow, SteepFallsAreSeenInWindowsOfEverySize) {
  GzipSizer sizer;
  for (const size_t window : {100, 800, 801, 1024, 4096})
    for (const size_t k : {1, 16, 40}) {
      std::mt19937_64 rng(window + k);
      std::string text;
      while (text.size() < k) text += static_cast<char>(rng() % 256);
      while (text.size() < window + k) text += static_cast<char>('a' + text.size() % 3);
      const auto fall = [&](const std::string& s) {
        return sizer.Size(std::string_view(s).substr(0, window)) -
               sizer.Size(std::string_view(s).substr(k, window));
      };
      int64_t best = fall(text);
      for (int step = 0; step < 400; ++step) {
        std::string changed = text;
        changed[rng() % changed.size()] =
            step % 2 ? static_cast<char>(rng() % 256) : changed[rng() % k];
        const int64_t now = fall(changed);
        if (now < best) continue;
        best = now;
        text = changed;
      }
      const double after = double(sizer.Size(std::string_view(text).substr(k, window)));
      const double threshold = (after + 0.5) / double(window);
      if (threshold >= 1) continue;
      const Outcome exact = RunWindow(text, int(window), threshold, true, 1, 1, &sizer);
      const Outcome skip = RunWindow(text, int(window), threshold, false, 1, 1, &sizer);
      EXPECT_GE(exact.fired_at_bytes, 0);
      EXPECT_EQ(exact.fired_at_bytes, skip.fired_at_bytes) << window << " k " << k;
    }
}

TEST(CompressionWindow, OrdinaryTextIsRarelyCompressed) {
  GzipSizer sizer;
  const std::string text = MakeText(TextKind::kNatural, 20000, 3);
  const Outcome run = RunWindow(text, 800, 0.18, false, 7, 3, &sizer);
  EXPECT_EQ(run.fired_at_bytes, -1);
  EXPECT_LT(run.num_tests * 25, run.num_tokens);
}

}  // namespace
}  // namespace kvcore
