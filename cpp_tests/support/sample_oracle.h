// The distribution of one sampled row in double, by sorting the whole vocabulary; filters as
// transformers' TemperatureLogitsWarper, MinPLogitsWarper, TopKLogitsWarper and TopPLogitsWarper in
// that order.
#pragma once

#include <cstdint>
#include <vector>

namespace kvcore {

struct SampleOracleResult {
  double entropy = 0;               // nats, raw distribution
  std::vector<double> log_softmax;  // raw, by id
  std::vector<int64_t> kept;        // by falling probability, then rising id
  std::vector<double> probability;  // of kept, sums to 1

  // The token of a uniform number.
  int64_t Token(double uniform) const;
  // Distance from `uniform` to the nearest border between two tokens: draws this close to a border
  // may fall on either side of it.
  double Margin(double uniform) const;
};

// REQUIRES: no NaN or +inf, something finite.
SampleOracleResult SampleOracle(const std::vector<double>& logits, double temperature,
                                int64_t top_k, double top_p, double min_p = 0);

}  // namespace kvcore
