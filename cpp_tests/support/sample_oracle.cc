#include "support/sample_oracle.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvcore {

int64_t SampleOracleResult::Token(double uniform) const {
  double sum = 0;
  for (size_t i = 0; i < kept.size(); ++i) {
    sum += probability[i];
    if (sum > uniform) return kept[i];
  }
  return kept.back();
}

double SampleOracleResult::Margin(double uniform) const {
  double sum = 0, margin = 1;
  for (size_t i = 0; i + 1 < kept.size(); ++i) {
    sum += probability[i];
    margin = std::min(margin, std::abs(sum - uniform));
  }
  return margin;
}

SampleOracleResult SampleOracle(const std::vector<double>& logits, double temperature,
                                int64_t top_k, double top_p, double min_p) {
  SampleOracleResult out;
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (double z : logits) sum += std::exp(z - top);
  for (double z : logits) {
    out.log_softmax.push_back(z - top - std::log(sum));
    if (std::isfinite(z)) out.entropy -= std::exp(out.log_softmax.back()) * out.log_softmax.back();
  }

  for (size_t id = 0; id < logits.size(); ++id)
    if (std::isfinite(logits[id])) out.kept.push_back(static_cast<int64_t>(id));
  std::stable_sort(out.kept.begin(), out.kept.end(),
                   [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
  if (temperature == 0) {
    out.kept.resize(1);
    out.probability = {1.0};
    return out;
  }
  const auto too_small = [&](int64_t id) {
    return std::exp((logits[id] - top) / temperature) < min_p;
  };
  out.kept.erase(std::remove_if(out.kept.begin(), out.kept.end(), too_small), out.kept.end());
  if (top_k > 0 && static_cast<int64_t>(out.kept.size()) > top_k) out.kept.resize(top_k);
  const auto renormalise = [&] {
    double total = 0;
    out.probability.clear();
    for (int64_t id : out.kept) {
      out.probability.push_back(std::exp((logits[id] - top) / temperature));
      total += out.probability.back();
    }
    for (double& p : out.probability) p /= total;
  };
  renormalise();
  if (top_p < 1) {
    // From the least likely upwards, remove while the running sum stays within 1 - top_p.
    double tail = 0;
    while (out.kept.size() > 1 && (tail += out.probability.back()) <= 1 - top_p) {
      out.kept.pop_back();
      out.probability.pop_back();
    }
    renormalise();
  }
  return out;
}

}  // namespace kvcore
