// Attention against the oracle, for all types and shapes of heads, at every level.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <string>

#include "support/attend_call.h"
#include "support/isa_levels.h"

namespace kvcore {
namespace {

struct Heads {
  int64_t group, head_dim;
};

class Attend : public testing::TestWithParam<std::tuple<DType, Heads>> {
 protected:
  LaneShape Shape(int64_t rows, int64_t max_blocks) const {
    LaneShape s;
    s.dtype = std::get<0>(GetParam());
    s.rows = rows;
    s.layers = 2;
    s.kv_heads = 2;
    s.q_heads = 2 * std::get<1>(GetParam()).group;
    s.head_dim = std::get<1>(GetParam()).head_dim;
    s.max_blocks = max_blocks;
    return s;
  }
  static std::vector<int32_t> Lens(const LaneShape& s, const std::vector<int32_t>& row_lens) {
    std::vector<int32_t> lens;
    for (int32_t n : row_lens)
      for (int64_t lane = 0; lane < s.layers * s.kv_heads; ++lane)
        lens.push_back(n + static_cast<int32_t>(lane % 2 * (n > 2 ? 3 : 0)));  // heads may differ
    return lens;
  }
};

TEST_P(Attend, DecodeMatchesOracleAtEveryIsaLevel) {
  const LaneShape s = Shape(9, 20);
  const LaneFixture cache(s, Lens(s, {0, 1, 15, 16, 17, 31, 128, 129, 300}), 11);
  Call call = MakeCall(cache, {8, 2, 0, 1, 7, 3, 4, 6, 5}, {1, 1, 1, 1, 1, 1, 1, 1, 1}, 12);
  call.scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  const AttendResult expected = Expected(cache, call);
  for (Isa isa : SupportedIsas()) {
    const WithIsa active(isa);
    Call run = call;
    RunAttend(cache, run);
    ExpectNear(cache, run, expected, IsaName(isa));
  }
}

TEST_P(Attend, RaggedChunkMatchesOracleAtEveryIsaLevel) {
  const LaneShape s = Shape(5, 20);
  const LaneFixture cache(s, Lens(s, {40, 9, 300, 22, 17}), 13);
  // A whole prompt, part of one, nothing, decode, more tokens than one tile has rows.
  Call call = MakeCall(cache, {1, 0, 4, 3, 2}, {9, 7, 0, 1, s.q_heads > 32 ? 3 : 67}, 14);
  call.scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  const AttendResult expected = Expected(cache, call);
  for (Isa isa : SupportedIsas()) {
    const WithIsa active(isa);
    Call run = call;
    RunAttend(cache, run);
    ExpectNear(cache, run, expected, IsaName(isa));
  }
}

TEST_P(Attend, TokenIsTheSameBitsAloneAndInAnyCompany) {
  const LaneShape s = Shape(3, 20);
  const LaneFixture all(s, Lens(s, {50, 9, 290}), 15);
  for (Isa isa : SupportedIsas()) {
    const WithIsa active(isa);
    Call together = MakeCall(all, {0, 1, 2}, {50, 4, 20}, 16);
    RunAttend(all, together);
    for (const auto& [row, first, count] : {std::tuple{0, 0, 50}, {1, 50, 4}, {2, 54, 20}})
      for (int token = 0; token < count; token += 7) {
        LaneFixture then = all;  // as the lane was when that token was the newest
        for (int64_t lane = 0; lane < s.layers * s.kv_heads; ++lane)
          then.lane_len.Set({row, lane / 2, lane % 2},
                            then.lane_len.Get({row, lane / 2, lane % 2}) - (count - 1 - token));
        Call alone = MakeCall(then, {row}, {1}, 17);
        for (int64_t h = 0; h < s.q_heads; ++h)
          for (int64_t d = 0; d < s.head_dim; ++d)
            alone.query.Set({0, h, d}, together.query.Get({first + token, h, d}));
        RunAttend(then, alone);
        for (int64_t h = 0; h < s.q_heads; ++h) {
          ASSERT_EQ(alone.lse.Get({0, h}), together.lse.Get({first + token, h}));
          for (int64_t d = 0; d < s.head_dim; ++d)
            ASSERT_EQ(alone.out.Get({0, h, d}), together.out.Get({first + token, h, d}))
                << IsaName(isa) << ": row " << row << " token " << token << " head " << h;
        }
      }
  }
}

std::string ParamName(const testing::TestParamInfo<std::tuple<DType, Heads>>& info) {
  const auto& [dtype, heads] = info.param;
  return std::string(DTypeName(dtype)) + "_group" + std::to_string(heads.group) + "_dim" +
         std::to_string(heads.head_dim);
}

INSTANTIATE_TEST_SUITE_P(
    Types, Attend,
    testing::Combine(testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                     testing::Values(Heads{1, 64}, Heads{2, 8}, Heads{3, 16}, Heads{4, 40},
                                     Heads{5, 24}, Heads{6, 80}, Heads{7, 128}, Heads{8, 16},
                                     Heads{11, 56}, Heads{1, 256}, Heads{64, 16}, Heads{71, 8})),
    ParamName);

}  // namespace
}  // namespace kvcore
