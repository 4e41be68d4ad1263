#include "support/select_oracle.h"

#include <algorithm>
#include <numeric>

namespace kvcore {

std::vector<int64_t> SelectOracle(const std::vector<double>& score,
                                  const std::vector<int64_t>& position, int64_t keep) {
  const int64_t n = static_cast<int64_t>(score.size());
  std::vector<int64_t> slots(score.size());
  std::iota(slots.begin(), slots.end(), 0);
  std::sort(slots.begin(), slots.end(), [&](int64_t a, int64_t b) {
    return score[a] != score[b] ? score[a] < score[b] : position[a] < position[b];
  });
  slots.resize(static_cast<size_t>(std::max<int64_t>(0, n - keep)));
  std::sort(slots.begin(), slots.end());
  return slots;
}

}  // namespace kvcore
