#include "support/attend_oracle.h"

#include <cmath>
#include <limits>

namespace kvcore {

AttendResult AttendOracle(const LaneFixture& cache, const OwnedTensor& query,
                          const std::vector<int32_t>& rows, const std::vector<int32_t>& cu_tokens,
                          int64_t layer, double scale) {
  const int64_t tokens = query.view().shape[0], q_heads = query.view().shape[1];
  const int64_t head_dim = cache.shape().head_dim, group = q_heads / cache.shape().kv_heads;
  AttendResult result;
  result.out.assign(static_cast<size_t>(tokens * q_heads * head_dim), 0.0);
  result.lse.assign(static_cast<size_t>(tokens * q_heads),
                    -std::numeric_limits<double>::infinity());
  const auto at = [head_dim](int64_t i, int64_t d) {
    return static_cast<size_t>(i * head_dim + d);
  };
  for (size_t s = 0; s < rows.size(); ++s) {
    // [kv_heads][slots, head_dim] of this row, read once.
    std::vector<std::vector<double>> keys, values;
    for (int64_t h = 0; h < cache.shape().kv_heads; ++h) {
      keys.emplace_back();
      values.emplace_back();
      for (int64_t r = 0; r < cache.Len(rows[s], layer, h); ++r)
        for (int64_t d = 0; d < head_dim; ++d) {
          keys.back().push_back(cache.Key(rows[s], layer, h, r, d));
          values.back().push_back(cache.Value(rows[s], layer, h, r, d));
        }
    }
    for (int64_t h = 0; h < q_heads; ++h) {
      const size_t slots = static_cast<size_t>(cache.Len(rows[s], layer, h / group));
      result.largest.emplace_back(slots);
      result.smallest.emplace_back(slots, std::numeric_limits<double>::infinity());
      result.total.emplace_back(slots);
    }
    for (int64_t t = cu_tokens[s]; t < cu_tokens[s + 1]; ++t)
      for (int64_t h = 0; h < q_heads; ++h) {
        const std::vector<double>& key = keys[static_cast<size_t>(h / group)];
        const std::vector<double>& value = values[static_cast<size_t>(h / group)];
        const int64_t seen = cache.Len(rows[s], layer, h / group) - (cu_tokens[s + 1] - t) + 1;
        if (seen <= 0) continue;
        std::vector<double> logit(static_cast<size_t>(seen));
        double max = -std::numeric_limits<double>::infinity(), sum = 0;
        for (int64_t r = 0; r < seen; ++r) {
          double dot = 0;
          for (int64_t d = 0; d < head_dim; ++d) dot += query.Get({t, h, d}) * key[at(r, d)];
          logit[static_cast<size_t>(r)] = scale * dot;
          max = std::fmax(max, scale * dot);
        }
        for (double x : logit) sum += std::exp(x - max);
        for (int64_t r = 0; r < seen; ++r) {
          const double weight = std::exp(logit[static_cast<size_t>(r)] - max) / sum;
          const size_t at_head = s * static_cast<size_t>(q_heads) + static_cast<size_t>(h);
          const size_t slot = static_cast<size_t>(r);
          result.largest[at_head][slot] = std::fmax(result.largest[at_head][slot], weight);
          result.smallest[at_head][slot] = std::fmin(result.smallest[at_head][slot], weight);
          result.total[at_head][slot] += weight;
          for (int64_t d = 0; d < head_dim; ++d)
            result.out[static_cast<size_t>((t * q_heads + h) * head_dim + d)] +=
                weight * value[at(r, d)];
        }
        result.lse[static_cast<size_t>(t * q_heads + h)] = max + std::log(sum);
      }
  }
  return result;
}

}  // namespace kvcore
