// Which slots a lane drops, by sorting them all.
#pragma once

#include <cstdint>
#include <vector>

namespace kvcore {

// Ascending slot ids of the max(0, n - keep) slots of lowest score, older positions first among
// equals.
std::vector<int64_t> SelectOracle(const std::vector<double>& score,
                                  const std::vector<int64_t>& position, int64_t keep);

}  // namespace kvcore
