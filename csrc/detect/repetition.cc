#include "detect/repetition.h"

#include <algorithm>
#include <limits>

namespace kvcore {

RepetitionTail::RepetitionTail(int max_pattern_size, int min_count, int min_tokens)
    : num_equal_(max_pattern_size, 0), num_needed_(max_pattern_size) {
  for (int64_t p = 1; p <= max_pattern_size; ++p) {
    const int64_t span = std::max<int64_t>(p * min_count, min_tokens);
    // The first p tokens of the span have nothing before them to equal.
    num_needed_[p - 1] =
        static_cast<int32_t>(std::min<int64_t>(span - p, std::numeric_limits<int32_t>::max()));
  }
}

bool RepetitionTail::Push(int32_t token) {
  const int64_t sizes =
      std::min(static_cast<int64_t>(tokens_.size()), static_cast<int64_t>(num_equal_.size()));
  tokens_.push_back(token);
  const int32_t* newest = tokens_.data() + tokens_.size() - 1;
  int32_t* equal = num_equal_.data();
  const int32_t* needed = num_needed_.data();
  int32_t fired = 0;
  for (int64_t i = 0; i < sizes; ++i) {
    equal[i] = newest[-1 - i] == token ? equal[i] + 1 : 0;
    fired |= equal[i] >= needed[i];
  }
  return fired != 0;
}

}  // namespace kvcore
