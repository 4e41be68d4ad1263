// Incoherent generation: the mean predictive entropy of a candidate's last tokens.
//
// At the candidate's token e (counted from 1) the mean runs over its last min(e, window) entropies
// in nats. It is tested from e = guard on and fires when mean > threshold (strictly).
// Cost: one addition per window entry and token; summed afresh in double, so it never drifts.
// Source: KV-Rescue, equations 4 and 6, appendix C (threshold 7.0, guard 24, window 12).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace kvcore {

class EntropyWindow {
 public:
  // REQUIRES: window >= 1, guard >= 0.
  EntropyWindow(int window, int guard, double threshold)
      : recent_(window), guard_(guard), threshold_(threshold) {}

  // Adds one token's entropy; true if the test fires at this token.
  bool Push(float entropy) {
    const int64_t window = static_cast<int64_t>(recent_.size());
    recent_[num_tokens_++ % window] = entropy;
    if (num_tokens_ < guard_) return false;
    const int64_t filled = std::min(num_tokens_, window);
    double sum = 0;
    for (int64_t i = num_tokens_ - filled; i < num_tokens_; ++i) sum += recent_[i % window];
    const double mean = sum / static_cast<double>(filled);
    max_mean_ = num_tested_++ == 0 ? mean : std::max(max_mean_, mean);
    return mean > threshold_;
  }

  // Largest mean among the tested tokens; NaN if none was tested.
  double max_mean() const { return max_mean_; }

 private:
  std::vector<float> recent_;  // ring
  int64_t guard_;
  double threshold_;
  int64_t num_tokens_ = 0, num_tested_ = 0;
  double max_mean_ = std::numeric_limits<double>::quiet_NaN();
};

}  // namespace kvcore
