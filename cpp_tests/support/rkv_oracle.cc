#include "support/rkv_oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvcore {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

double Dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

std::vector<double> Softmax(std::vector<double> x) {
  double top = -kInf, sum = 0;
  for (double v : x) top = std::max(top, v);
  for (double& v : x) sum += v = std::exp(v - top);
  for (double& v : x) v /= sum;
  return x;
}

std::vector<double> MaxPool(const std::vector<double>& x, int64_t kernel) {
  const int64_t n = static_cast<int64_t>(x.size());
  std::vector<double> out(x.size(), -kInf);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < n; ++j)
      if (std::abs(i - j) <= kernel / 2) out[i] = std::max(out[i], x[j]);
  return out;
}

}  // namespace

RkvOracleResult RkvOracle(const RkvOracleInput& in) {
  const int64_t n = static_cast<int64_t>(in.keys.size());
  const int64_t past = std::max<int64_t>(0, n - in.protect);
  RkvOracleResult out;
  out.score.assign(static_cast<size_t>(n), kInf);
  if (past == 0) return out;
  const auto& keys = in.keys;
  const double scale =
      in.scale > 0 ? in.scale : 1.0 / std::sqrt(static_cast<double>(keys[0].size()));

  std::vector<double> mean(static_cast<size_t>(past), 0.0);
  for (const auto& heads : in.queries) {
    std::vector<double> logit(static_cast<size_t>(past), -kInf);
    for (int64_t i = 0; i < past; ++i)
      for (const auto& q : heads) logit[i] = std::max(logit[i], scale * Dot(q, keys[i]));
    std::vector<double> p = Softmax(logit);
    if (in.pool_first) p = MaxPool(p, in.kernel);
    for (int64_t i = 0; i < past; ++i) mean[i] += p[i] / static_cast<double>(in.queries.size());
  }
  out.importance = in.pool_first ? mean : MaxPool(mean, in.kernel);

  std::vector<std::vector<double>> s(static_cast<size_t>(n));
  for (int64_t r = 0; r < n; ++r) {
    const double norm = std::sqrt(Dot(keys[r], keys[r])) + 1e-8;
    for (int64_t j = 0; j < n; ++j) {
      const double other = std::sqrt(Dot(keys[j], keys[j])) + 1e-8;
      s[r].push_back(r == j ? 0.0 : Dot(keys[r], keys[j]) / (norm * other));
    }
  }
  for (int64_t r = 0; r < n; ++r) {
    int64_t newest = 0;
    for (int64_t j = 0; j < n; ++j)
      if (s[r][j] > in.threshold) newest = j;
    out.pointer.push_back(newest);
  }
  for (int64_t r = 0; r < n; ++r) s[r][out.pointer[r]] = 0;
  for (int64_t j = 0; j < n; ++j) {
    double sum = 0;
    for (int64_t r = 0; r < n; ++r) sum += s[r][j];
    out.column_mean.push_back(sum / static_cast<double>(n));
  }
  out.redundancy = Softmax(out.column_mean);
  for (int64_t i = 0; i < past; ++i)
    out.score[i] = in.mix * out.importance[i] - (1 - in.mix) * out.redundancy[i];
  return out;
}

}  // namespace kvcore
