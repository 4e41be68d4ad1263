#include "detect/degeneration_detector.h"

#include <cmath>

#include "base/check.h"

namespace kvcore {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

void CheckRange(const char* field, int value, int low, int high) {
  KV_CHECK(value >= low && value <= high)
      << field << ": expected " << low << " <= value <= " << high << ", got " << value;
}

}  // namespace

void DetectorConfig::Validate() const {
  if (entropy) {
    KV_CHECK(std::isfinite(entropy_threshold))
        << "entropy_threshold: expected a finite number of nats, got " << entropy_threshold;
    CheckRange("entropy_window", entropy_window, 1, kMaxTokens);
    CheckRange("entropy_guard", entropy_guard, 0, kMaxTokens);
  }
  if (gzip) {
    KV_CHECK(std::isfinite(gzip_threshold) && gzip_threshold > 0)
        << "gzip_threshold: expected a finite ratio above 0, got " << gzip_threshold;
    CheckRange("gzip_window", gzip_window, 1, kMaxGzipWindow);
  }
  if (repetition) {
    CheckRange("repetition_max_pattern_size", repetition_max_pattern_size, 1, kMaxTokens);
    CheckRange("repetition_min_count", repetition_min_count, 2, kMaxTokens);
    CheckRange("repetition_min_tokens", repetition_min_tokens, 0, kMaxTokens);
  }
}

DegenerationDetector::DegenerationDetector(const DetectorConfig& c) {
  if (c.entropy) entropy_.emplace(c.entropy_window, c.entropy_guard, c.entropy_threshold);
  if (c.gzip) gzip_.emplace(c.gzip_window, c.gzip_threshold, c.gzip_exact);
  if (c.repetition) {
    repetition_.emplace(c.repetition_max_pattern_size, c.repetition_min_count,
                        c.repetition_min_tokens);
  }
}

void DegenerationDetector::Fire(Firing firing) {
  firing_ = firing;
  fired_at_ = num_tokens_;
}

bool DegenerationDetector::Push(int32_t token, float entropy, int64_t text_bytes) {
  ++num_tokens_;
  if (firing_ != Firing::kNone) return false;
  if (entropy_ && entropy_->Push(entropy)) {
    Fire(Firing::kEntropy);
    return false;
  }
  repeated_ = repetition_ && repetition_->Push(token);
  if (gzip_ && gzip_->Due(text_bytes)) return true;
  if (repeated_) Fire(Firing::kRepetition);
  return false;
}

void DegenerationDetector::TestWindow(std::string_view text, GzipSizer* sizer) {
  if (gzip_->Test(text, sizer)) {
    Fire(Firing::kGzip);
  } else if (repeated_) {
    Fire(Firing::kRepetition);
  }
}

double DegenerationDetector::max_mean_entropy() const {
  return entropy_ ? entropy_->max_mean() : kNaN;
}

double DegenerationDetector::min_gzip_ratio() const { return gzip_ ? gzip_->min_ratio() : kNaN; }

}  // namespace kvcore
