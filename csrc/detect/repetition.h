// Exact loops: the tail of a candidate's token ids repeats itself.
//
// Fires at the first token after which, for some pattern size p in [1, max_pattern_size], the last
// max(p * min_count, min_tokens) tokens are periodic with p. It sees loops that the compression
// window cannot: shorter than 800 bytes, or with a long period.
//
// Cost: max_pattern_size comparisons per token (vectorised). Not thread-safe.
// Source: not in the paper; names as in vLLM's repetition detection.
#pragma once

#include <cstdint>
#include <vector>

namespace kvcore {

class RepetitionTail {
 public:
  // REQUIRES: max_pattern_size >= 1, min_count >= 2, min_tokens >= 0.
  RepetitionTail(int max_pattern_size, int min_count, int min_tokens);

  // Adds one token; true if the test fires at this token.
  bool Push(int32_t token);

 private:
  std::vector<int32_t> tokens_;
  std::vector<int32_t> num_equal_;   // [p - 1]: newest tokens that equal the one p before
  std::vector<int32_t> num_needed_;  // [p - 1]: fires when num_equal_ reaches this
};

}  // namespace kvcore
