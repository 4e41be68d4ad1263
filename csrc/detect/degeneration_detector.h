// The online degeneration detector of one candidate: which test ends it, and at which token.
//
// Source: KV-Rescue, online degeneration detection (equations 4 to 6); the repetition test is ours.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "detect/compression_window.h"
#include "detect/entropy_window.h"
#include "detect/repetition.h"

namespace kvcore {

struct DetectorConfig {
  // Most that is kept of a candidate; kvcore/config.py says the same, and a test compares.
  static constexpr int kMaxTokens = 1 << 20;
  static constexpr int kMaxGzipWindow = 1 << 15;  // bytes: what deflate looks back

  // Incoherent text: mean entropy above the threshold.
  bool entropy = true;
  float entropy_threshold = 7.0f;  // nats, of the raw full-vocabulary distribution
  int entropy_window = 12;         // tokens
  int entropy_guard = 24;          // first token that is tested, from 1

  // Repetition loops: gzip ratio below the threshold.
  bool gzip = true;
  double gzip_threshold = 0.18;
  int gzip_window = CompressionWindow::kLargestSkipping;  // bytes
  // Compress at every token instead of skipping ahead; larger windows always do.
  bool gzip_exact = false;

  // Exact loops, beyond the paper. With these values none of 8,678 human solutions to problems of
  // mathematics fires (docs/results/degenerate.md).
  bool repetition = false;
  int repetition_max_pattern_size = 64;  // tokens
  int repetition_min_count = 3;          // copies of the pattern
  int repetition_min_tokens = 80;        // all copies together

  // Throws Error naming the first field of an enabled test that is out of range.
  void Validate() const;
};

enum class Firing : uint8_t { kNone = 0, kEntropy = 1, kGzip = 2, kRepetition = 3 };

// Feed it one token at a time. When several tests fire at the same token the first of entropy,
// gzip, repetition is reported. After firing nothing is tested any more. Not thread-safe.
class DegenerationDetector {
 public:
  // REQUIRES: config.Validate() does not throw.
  explicit DegenerationDetector(const DetectorConfig& config);

  // Adds a token; `text_bytes` is the length of the candidate's text including it. True if the
  // verdict needs a compression: TestWindow() must then come before the next Push().
  bool Push(int32_t token, float entropy, int64_t text_bytes);
  // REQUIRES: the last Push() returned true; `text` is the candidate's text, all of it.
  void TestWindow(std::string_view text, GzipSizer* sizer);

  // The test that fired, or kNone.
  Firing firing() const { return firing_; }
  // The token at which it fired, counted from 1; 0 if none did.
  int64_t fired_at() const { return fired_at_; }
  double max_mean_entropy() const;  // see EntropyWindow; NaN without that test
  double min_gzip_ratio() const;    // see CompressionWindow; NaN without that test

 private:
  void Fire(Firing firing);

  std::optional<EntropyWindow> entropy_;
  std::optional<CompressionWindow> gzip_;
  std::optional<RepetitionTail> repetition_;
  bool repeated_ = false;  // the repetition test fires at this token if gzip does not
  Firing firing_ = Firing::kNone;
  int64_t num_tokens_ = 0, fired_at_ = 0;
};

}  // namespace kvcore
