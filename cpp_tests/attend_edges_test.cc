// What attention must not read, change or accept. All but exp holds at the level that is active.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "cpu/attend_kernels.h"
#include "support/attend_call.h"
#include "support/isa_levels.h"

namespace kvcore {
namespace {

LaneShape SmallShape(DType dtype = DType::kF32) {
  LaneShape s;
  s.dtype = dtype;
  s.kv_heads = 1;
  s.q_heads = 3;
  s.head_dim = 24;
  return s;
}

TEST(AttendEdges, LogitsFarBelowZeroStayFiniteAndRight) {
  LaneFixture cache(SmallShape(), {20}, 21);
  for (int64_t slot = 0; slot < 20; ++slot)
    for (int64_t d = 0; d < 24; ++d) cache.SetKey(0, 0, 0, slot, d, -1.0 - 0.001 * slot);
  Call call = MakeCall(cache, {0}, {1}, 22);
  call.query.Fill(1000.0);
  call.scale = 4.0f;  // logits near -96000
  RunAttend(cache, call);
  const AttendResult expected = AttendOracle(cache, call.query, {0}, {0, 1}, 0, 4.0);
  // A float near 96000 resolves 1/128: weights carry that error, values do not.
  for (int64_t d = 0; d < 24; ++d)
    EXPECT_NEAR(call.out.Get({0, 0, d}), expected.out[static_cast<size_t>(d)], 0.02);
  EXPECT_NEAR(call.lse.Get({0, 0}), expected.lse[0], 0.05);
}

TEST(AttendEdges, GarbageBehindTheLastSlotIsNeverSeen) {
  for (double garbage : {1e3, -1e3, std::numeric_limits<double>::infinity()}) {
    LaneFixture cache(SmallShape(DType::kBF16), {18}, 23);
    Call clean = MakeCall(cache, {0}, {2}, 24), dirty = clean;
    RunAttend(cache, clean);
    cache.lane_len.Set({0, 0, 0}, 32);
    for (int64_t slot = 18; slot < 32; ++slot)
      for (int64_t d = 0; d < 24; ++d) {
        cache.SetKey(0, 0, 0, slot, d, garbage);
        cache.SetValue(0, 0, 0, slot, d, garbage);
      }
    cache.lane_len.Set({0, 0, 0}, 18);
    RunAttend(cache, dirty);
    EXPECT_TRUE(SameBytes(clean.out, dirty.out));
    EXPECT_TRUE(SameBytes(clean.lse, dirty.lse));
  }
}

TEST(AttendEdges, LaterTokensNeverReachEarlierOnes) {
  LaneFixture cache(SmallShape(), {40}, 25);
  Call before = MakeCall(cache, {0}, {10}, 26), after = before;
  RunAttend(cache, before);
  for (int64_t d = 0; d < 24; ++d) {
    cache.SetKey(0, 0, 0, 35, d, std::numeric_limits<double>::infinity());
    cache.SetValue(0, 0, 0, 35, d, std::numeric_limits<double>::quiet_NaN());
  }
  RunAttend(cache, after);
  for (int64_t t = 0; t < 10; ++t)  // token t is slot 30 + t
    for (int64_t h = 0; h < 3; ++h) {
      if (t < 5)
        EXPECT_EQ(before.out.Get({t, h, 0}), after.out.Get({t, h, 0})) << t;
      else
        EXPECT_TRUE(std::isnan(after.out.Get({t, h, 0}))) << t;
    }
}

TEST(AttendEdges, TokenThatSeesNothingGetsZero) {
  const LaneFixture cache(SmallShape(), {0}, 27);
  Call call = MakeCall(cache, {0}, {1}, 28);
  RunAttend(cache, call);
  for (int64_t h = 0; h < 3; ++h) {
    EXPECT_EQ(call.out.Get({0, h, 5}), 0.0);
    EXPECT_EQ(call.lse.Get({0, h}), -std::numeric_limits<double>::infinity());
  }
}

TEST(AttendEdges, EmptyBatchesAreLegal) {
  const LaneFixture cache(SmallShape(), {5}, 29);
  Call none = MakeCall(cache, {}, {}, 30), empty = MakeCall(cache, {0}, {0}, 31);
  RunAttend(cache, none);
  RunAttend(cache, empty);
}

TEST(AttendEdges, StridesOfQueryOutAndLseAreFree) {
  const LaneShape s = SmallShape();
  const LaneFixture cache(s, {30}, 32);
  Call dense = MakeCall(cache, {0}, {4}, 33), strided = dense;
  RunAttend(cache, dense);
  // [heads, tokens, dim] in memory, tokens 5 dims further apart than needed.
  strided.query = OwnedTensor(s.dtype, {4, 3, 24}, {29, 4 * 29, 1});
  strided.query.Fill(std::nan(""));
  strided.out = strided.query;
  strided.lse = OwnedTensor(DType::kF32, {4, 3}, {1, 4});
  for (int64_t t = 0; t < 4; ++t)
    for (int64_t h = 0; h < 3; ++h)
      for (int64_t d = 0; d < 24; ++d) strided.query.Set({t, h, d}, dense.query.Get({t, h, d}));
  RunAttend(cache, strided);
  for (int64_t t = 0; t < 4; ++t)
    for (int64_t h = 0; h < 3; ++h) {
      EXPECT_EQ(dense.lse.Get({t, h}), strided.lse.Get({t, h}));
      for (int64_t d = 0; d < 24; ++d)
        EXPECT_EQ(dense.out.Get({t, h, d}), strided.out.Get({t, h, d}));
    }
  EXPECT_TRUE(std::isnan(strided.out.At(25)));  // between the rows
}

TEST(AttendEdges, ThreadsDoNotChangeABit) {
  LaneShape s = SmallShape();
  s.rows = 3;
  s.kv_heads = 3;
  s.q_heads = 21;
  s.max_blocks = 30;
  s.head_dim = 128;
  const LaneFixture cache(s, {400, 30, 7, 90, 5, 470, 33, 33, 1}, 34);
  const int before = NumThreads();
  SetNumThreads(1);
  Call one = MakeCall(cache, {2, 0, 1}, {1, 5, 5}, 35), three = one;
  RunAttend(cache, one);
  SetNumThreads(3);
  RunAttend(cache, three);
  SetNumThreads(before);
  EXPECT_TRUE(SameBytes(one.out, three.out));
  EXPECT_TRUE(SameBytes(one.lse, three.lse));
}

TEST(AttendEdges, LseIsOptional) {
  const LaneFixture cache(SmallShape(), {30}, 36);
  Call with = MakeCall(cache, {0}, {4}, 37);
  OwnedTensor out = with.out;
  RunAttend(cache, with);
  const OwnedTensor rows = OwnedTensor::I32({0}), cu = OwnedTensor::I32({0, 4});
  OwnedTensor scratch(DType::kU8, {AttendScratchBytes(cache.view(), NumThreads())});
  AttendParams p;
  p.query = with.query.view();
  p.out = out.view();
  p.scratch = scratch.view();
  p.batch = {rows.view(), cu.view()};
  p.scale = with.scale;
  AttendCpu(cache.view(), p, 0);
  EXPECT_TRUE(SameBytes(with.out, out));
}

TEST(AttendErrors, NameTheArgumentAndChangeNothing) {
  LaneShape s = SmallShape();
  s.rows = 2;
  LaneFixture cache(s, {20, 3}, 38);
  const Call good = MakeCall(cache, {0, 1}, {2, 1}, 39);
  const auto error = [&](auto&& spoil) -> std::string {
    LaneFixture c = cache;
    Call call = good;
    OwnedTensor rows = OwnedTensor::I32({0, 1}), cu = OwnedTensor::I32({0, 2, 3});
    OwnedTensor scratch(DType::kU8, {AttendScratchBytes(c.view(), NumThreads())});
    AttendParams p;
    p.query = call.query.view();
    p.out = call.out.view();
    p.lse = call.lse.view();
    p.scratch = scratch.view();
    p.batch = {rows.view(), cu.view()};
    spoil(c, p);
    try {
      AttendCpu(c.view(), p, 0);
    } catch (const Error& e) {
      EXPECT_TRUE(SameBytes(call.out, good.out)) << e.what();
      return e.what();
    }
    return "no error";
  };
  const auto starts = [](const std::string& text, const std::string& with) {
    return text.rfind(with, 0) == 0 ? testing::AssertionSuccess()
                                    : testing::AssertionFailure() << text;
  };
  OwnedTensor bf16(DType::kBF16, {3, 3, 24}), heads(DType::kF32, {3, 4, 24}),
      dims(DType::kF32, {3, 3, 16});
  EXPECT_TRUE(starts(error([](auto&, auto&) {}), "no error"));
  EXPECT_TRUE(starts(error([&](auto&, auto& p) { p.query = bf16.view(); }), "query: "));
  EXPECT_TRUE(starts(error([&](auto&, auto& p) { p.out = heads.view(); }), "out: "));
  EXPECT_TRUE(starts(error([&](auto&, auto& p) { p.query = p.out = dims.view(); }), "query: "));
  EXPECT_TRUE(starts(error([&](auto&, auto& p) { p.lse.shape[0] = 2; }), "lse: "));
  EXPECT_TRUE(starts(error([](auto&, auto& p) { p.layer = 1; }), "layer: "));
  EXPECT_TRUE(starts(error([](auto&, auto& p) { p.layer = -1; }), "layer: "));
  EXPECT_TRUE(starts(
      error([](auto& c, auto& p) { p.scratch.shape[0] = AttendScratchBytes(c.view(), 1) - 1; }),
      "scratch: "));
  EXPECT_TRUE(starts(error([](auto&, auto& p) { p.scale = std::nanf(""); }), "scale: "));
  for (int dim : {0, 1}) {  // expanded, and rows that overlap by a number
    EXPECT_TRUE(starts(error([&](auto&, auto& p) { p.out.stride[dim] = 0; }), "out: "));
    EXPECT_TRUE(starts(error([&](auto&, auto& p) { p.out.stride[dim] = 23; }), "out: "));
    EXPECT_TRUE(starts(error([&](auto&, auto& p) { p.lse.stride[dim] = 0; }), "lse: "));
  }
  EXPECT_TRUE(starts(error([](auto&, auto& p) { p.batch.rows.template ptr<int32_t>()[1] = 2; }),
                     "rows[1]: "));
  EXPECT_TRUE(starts(error([](auto&, auto& p) { p.batch.rows.template ptr<int32_t>()[1] = 0; }),
                     "rows[1]: "));
  EXPECT_TRUE(
      starts(error([](auto&, auto& p) { p.batch.cu_tokens.template ptr<int32_t>()[1] = 4; }),
             "cu_tokens[2]: "));
  EXPECT_TRUE(
      starts(error([](auto&, auto& p) { p.batch.cu_tokens.template ptr<int32_t>()[2] = 2; }),
             "cu_tokens[2]: "));
  EXPECT_TRUE(
      starts(error([](auto&, auto& p) { p.batch.cu_tokens.template ptr<int32_t>()[0] = 1; }),
             "cu_tokens[0]: "));
  EXPECT_TRUE(
      starts(error([](auto& c, auto&) { c.lane_len.Set({0, 0, 0}, 8 * 16 + 1); }), "lane_len: "));
  EXPECT_TRUE(starts(error([](auto& c, auto&) { c.lane_len.Set({0, 0, 0}, -1); }), "lane_len: "));
  EXPECT_TRUE(
      starts(error([](auto& c, auto&) { c.lane_len.Set({0, 0, 0}, 33); }), "block_table: entry 2"));
}

TEST(AttendExp, RelativeErrorIsBelow2e7AtEveryIsaLevel) {
  for (Isa isa : SupportedIsas()) {
    const WithIsa active(isa);
    std::vector<float> x, y;
    for (int i = 0; i < 16 * 20000; ++i)
      x.push_back(-86.9f + 166.9f * static_cast<float>(i) / 320000.0f);
    y.resize(x.size());
    KV_ISA_TABLE(kAttendKernels).exp(x.data(), y.data(), static_cast<int64_t>(x.size()));
    double worst = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double want = std::exp(static_cast<double>(x[i]));
      worst = std::max(worst, std::fabs(y[i] - want) / want);
    }
    EXPECT_LT(worst, 2e-7) << IsaName(isa);
    float special[16] = {0.0f,
                         -0.0f,
                         -88.0f,
                         -1e30f,
                         -std::numeric_limits<float>::infinity(),
                         std::numeric_limits<float>::quiet_NaN()};
    KV_ISA_TABLE(kAttendKernels).exp(special, special, 16);
    EXPECT_EQ(special[0], 1.0f);
    EXPECT_EQ(special[1], 1.0f);
    EXPECT_EQ(special[2], 0.0f);
    EXPECT_EQ(special[3], 0.0f);
    EXPECT_EQ(special[4], 0.0f);
    EXPECT_TRUE(std::isnan(special[5]));
    // Every bit of the payload alone, and all ones from each on, of either sign.
    for (int bit = 0; bit < 22; ++bit)
      for (const uint32_t payload : {1u << bit, 0x3fffffu >> bit})
        for (const uint32_t sign : {0u, 0x80000000u}) {
          const uint32_t word = sign | 0x7fc00000u | payload;
          for (float& x : special) std::memcpy(&x, &word, 4);
          KV_ISA_TABLE(kAttendKernels).exp(special, special, 16);
          for (const float x : special) EXPECT_TRUE(std::isnan(x)) << std::hex << word;
        }
  }
}

}  // namespace
}  // namespace kvcore
