// One call of attend on a fixture, and its comparison with the oracle.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/parallel.h"
#include "cpu/cpu_ops.h"
#include "support/attend_oracle.h"
#include "support/lane_fixture.h"

namespace kvcore {

struct Call {
  std::vector<int32_t> rows, cu_tokens;
  OwnedTensor query, out, lse;
  float scale = 0.25f;
  int64_t layer = 0;
};

// A batch of rows with counts[i] new tokens each, random queries, outputs full of NaN.
inline Call MakeCall(const LaneFixture& cache, const std::vector<int32_t>& rows,
                     const std::vector<int32_t>& counts, uint64_t seed) {
  Call call;
  call.rows = rows;
  call.cu_tokens = {0};
  for (int32_t n : counts) call.cu_tokens.push_back(call.cu_tokens.back() + n);
  const int64_t tokens = call.cu_tokens.back();
  const LaneShape& s = cache.shape();
  call.query = OwnedTensor(s.dtype, {tokens, s.q_heads, s.head_dim});
  std::mt19937_64 rng(seed);
  call.query.FillNormal(rng);
  call.out = call.query;
  call.out.Fill(std::nan(""));
  call.lse = OwnedTensor(DType::kF32, {tokens, s.q_heads});
  call.lse.Fill(std::nan(""));
  call.layer = s.layers - 1;
  return call;
}

inline void RunAttend(const LaneFixture& cache, Call& call) {
  const OwnedTensor rows = OwnedTensor::I32(call.rows), cu = OwnedTensor::I32(call.cu_tokens);
  const int64_t bytes = AttendScratchBytes(cache.view(), NumThreads());
  OwnedTensor scratch(DType::kU8, {bytes});
  scratch.Fill(255);  // NaN: nothing may be read before it was written
  AttendParams p;
  p.query = call.query.view();
  p.out = call.out.view();
  p.lse = call.lse.view();
  p.scratch = scratch.view();
  p.batch = {rows.view(), cu.view()};
  p.layer = call.layer;
  p.scale = call.scale;
  AttendCpu(cache.view(), p, 0);
}

// fp32 arithmetic: 1e-5 absolute and relative. The output is then rounded to its type.
inline double Tolerance(DType dtype, double expected) {
  const double rounding = dtype == DType::kBF16  ? 1.0 / 256
                          : dtype == DType::kF16 ? 1.0 / 2048
                                                 : 0.0;
  return 1e-5 + (1e-5 + rounding) * std::fabs(expected) + (dtype == DType::kF16 ? 1e-7 : 0);
}

inline AttendResult Expected(const LaneFixture& cache, const Call& call) {
  return AttendOracle(cache, call.query, call.rows, call.cu_tokens, call.layer, call.scale);
}

inline void ExpectNear(const LaneFixture& cache, const Call& call, const AttendResult& expected,
                       const std::string& what) {
  const int64_t tokens = call.cu_tokens.back(), heads = cache.shape().q_heads,
                dims = cache.shape().head_dim;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t d = 0; d < dims; ++d) {
        const double want = expected.out[static_cast<size_t>((t * heads + h) * dims + d)];
        ASSERT_NEAR(call.out.Get({t, h, d}), want, Tolerance(cache.shape().dtype, want))
            << what << ": token " << t << " head " << h << " dim " << d;
      }
      const double want = expected.lse[static_cast<size_t>(t * heads + h)];
      if (std::isinf(want))
        ASSERT_EQ(call.lse.Get({t, h}), want) << what << ": lse of token " << t;
      else
        ASSERT_NEAR(call.lse.Get({t, h}), want, Tolerance(DType::kF32, want))
            << what << ": lse of token " << t << " head " << h;
    }
}

}  // namespace kvcore
