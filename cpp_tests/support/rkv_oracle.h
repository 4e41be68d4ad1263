// R-KV scores of one lane in double, step by step as ops/score_rkv.h states them, n x n matrix
// included.
#pragma once

#include <cstdint>
#include <vector>

namespace kvcore {

struct RkvOracleInput {
  std::vector<std::vector<double>> keys;                  // [n][head_dim], oldest first
  std::vector<std::vector<std::vector<double>>> queries;  // [num_queries][group][head_dim]
  int64_t protect = 8, kernel = 7;
  double mix = 0.1, threshold = 0.5;
  bool pool_first = false;
  double scale = 0;  // of the attention; 0 = 1 / sqrt(head_dim)
};

struct RkvOracleResult {
  std::vector<double> importance;   // [past], after pooling
  std::vector<int64_t> pointer;     // [n]
  std::vector<double> column_mean;  // [n]
  std::vector<double> redundancy;   // [n]
  std::vector<double> score;        // [n], +inf for protected entries
};

RkvOracleResult RkvOracle(const RkvOracleInput& in);

}  // namespace kvcore
