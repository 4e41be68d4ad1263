// Attention in double, one scalar at a time, from the numbers that the fixture stores.
#pragma once

#include <cstdint>
#include <vector>

#include "support/lane_fixture.h"

namespace kvcore {

struct AttendResult {
  std::vector<double> out;  // [tokens, q_heads, head_dim]
  std::vector<double> lse;  // [tokens, q_heads]
  // [seqs * q_heads][slots]: the largest and the smallest share that a token gives the slot (0 and
  // infinity where none sees it), and the sum of all.
  std::vector<std::vector<double>> largest, smallest, total;
};

// query is [tokens, q_heads, head_dim]; rows and cu_tokens as in ops/batch.h.
AttendResult AttendOracle(const LaneFixture& cache, const OwnedTensor& query,
                          const std::vector<int32_t>& rows, const std::vector<int32_t>& cu_tokens,
                          int64_t layer, double scale);

}  // namespace kvcore
