#include "ops/append_kv.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cpu/cpu_ops.h"
#include "support/lane_fixture.h"

namespace kvcore {
namespace {

struct New {
  OwnedTensor key, value, query;
};

New MakeNew(const LaneShape& s, int64_t tokens, uint64_t seed) {
  std::mt19937_64 rng(seed);
  New n;
  n.key = OwnedTensor(s.dtype, {tokens, s.kv_heads, s.head_dim});
  n.value = n.key;
  n.query = OwnedTensor(s.dtype, {tokens, s.q_heads, s.head_dim});
  n.key.FillNormal(rng);
  n.value.FillNormal(rng);
  n.query.FillNormal(rng);
  return n;
}

void Append(const LaneFixture& cache, const New& n, const std::vector<int32_t>& rows,
            const std::vector<int32_t>& cu_tokens, int64_t layer) {
  const OwnedTensor r = OwnedTensor::I32(rows), cu = OwnedTensor::I32(cu_tokens);
  AppendKvParams p;
  p.key = n.key.view();
  p.value = n.value.view();
  if (cache.shape().window > 0) p.query = n.query.view();
  p.batch = {r.view(), cu.view()};
  p.layer = layer;
  AppendKvCpu(cache.view(), p, 0);
}

// What the contract says, slot by slot, written through the fixture.
void Oracle(LaneFixture& cache, const New& n, const std::vector<int32_t>& rows,
            const std::vector<int32_t>& cu_tokens, int64_t layer) {
  const LaneShape& s = cache.shape();
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t row = rows[i], count = cu_tokens[i + 1] - cu_tokens[i];
    const auto total = static_cast<int64_t>(cache.seq_len.Get({row}));
    for (int64_t t = 0; t < count; ++t) {
      const int64_t token = cu_tokens[i] + t, position = total - count + t;
      for (int64_t h = 0; h < s.kv_heads; ++h) {
        const int64_t slot = cache.Len(row, layer, h) - count + t;
        cache.SetPosition(row, layer, h, slot, position);
        for (int64_t d = 0; d < s.head_dim; ++d) {
          cache.SetKey(row, layer, h, slot, d, n.key.Get({token, h, d}));
          cache.SetValue(row, layer, h, slot, d, n.value.Get({token, h, d}));
        }
      }
      if (s.window > 0 && t >= count - s.window)
        for (int64_t h = 0; h < s.q_heads; ++h)
          for (int64_t d = 0; d < s.head_dim; ++d)
            cache.query_ring.Set({row, layer, h, position % s.window, d},
                                 n.query.Get({token, h, d}));
    }
  }
}

void ExpectSame(const LaneFixture& a, const LaneFixture& b) {
  EXPECT_TRUE(SameBytes(a.key_blocks, b.key_blocks));
  EXPECT_TRUE(SameBytes(a.value_blocks, b.value_blocks));
  EXPECT_TRUE(SameBytes(a.position, b.position));
  EXPECT_TRUE(SameBytes(a.query_ring, b.query_ring));
  EXPECT_TRUE(SameBytes(a.block_table, b.block_table));
  EXPECT_TRUE(SameBytes(a.lane_len, b.lane_len));
  EXPECT_TRUE(SameBytes(a.seq_len, b.seq_len));
}

class AppendKv : public testing::TestWithParam<std::tuple<DType, int64_t>> {
 protected:
  LaneShape Shape() const {
    LaneShape s;
    s.dtype = std::get<0>(GetParam());
    s.window = std::get<1>(GetParam());
    s.rows = 5;
    s.layers = 2;
    s.kv_heads = 2;
    s.q_heads = 6;
    s.head_dim = 24;
    s.max_blocks = 6;
    s.spare_blocks = 60;
    return s;
  }
};

TEST_P(AppendKv, WritesExactlyTheNewestSlotsPositionsAndQueries) {
  const LaneShape s = Shape();
  std::vector<int32_t> lens;
  for (int32_t n : {0, 1, 15, 16, 33})
    for (int lane = 0; lane < 4; ++lane) lens.push_back(n > 0 ? n + lane : 0);
  for (int64_t layer : {0, 1}) {
    LaneFixture cache(s, lens, 41);
    const std::vector<int32_t> rows = {3, 0, 4, 1}, counts = {1, 20, 0, 5};
    std::vector<int32_t> cu = {0};
    for (size_t i = 0; i < rows.size(); ++i) {
      cache.Extend(rows[i], counts[i]);
      cu.push_back(cu.back() + counts[i]);
    }
    const New n = MakeNew(s, cu.back(), 42);
    LaneFixture expected = cache;
    Oracle(expected, n, rows, cu, layer);
    Append(cache, n, rows, cu, layer);
    ExpectSame(cache, expected);
  }
}

TEST_P(AppendKv, ManyTokensAtOnceEqualOneByOne) {
  const LaneShape s = Shape();
  const std::vector<int32_t> lens(20, 0);
  LaneFixture at_once(s, lens, 43);
  at_once.Extend(2, 37);
  LaneFixture one_by_one = at_once;
  const New all = MakeNew(s, 37, 44);
  Append(at_once, all, {2}, {0, 37}, 1);
  for (int64_t t = 0; t < 37; ++t) {
    one_by_one.seq_len.Set({2}, static_cast<double>(t + 1));
    for (int64_t lane = 0; lane < 4; ++lane)
      one_by_one.lane_len.Set({2, lane / 2, lane % 2}, static_cast<double>(t + 1));
    New one = MakeNew(s, 1, 45);
    for (int64_t d = 0; d < s.head_dim; ++d) {
      for (int64_t h = 0; h < s.kv_heads; ++h) {
        one.key.Set({0, h, d}, all.key.Get({t, h, d}));
        one.value.Set({0, h, d}, all.value.Get({t, h, d}));
      }
      for (int64_t h = 0; h < s.q_heads; ++h) one.query.Set({0, h, d}, all.query.Get({t, h, d}));
    }
    Append(one_by_one, one, {2}, {0, 1}, 1);
  }
  ExpectSame(at_once, one_by_one);
}

TEST_P(AppendKv, StridesOfTheInputsAreFree) {
  const LaneShape s = Shape();
  LaneFixture dense(s, std::vector<int32_t>(20, 10), 46);
  dense.Extend(1, 9);
  LaneFixture strided = dense;
  New n = MakeNew(s, 9, 47);
  Append(dense, n, {1}, {0, 9}, 0);
  const auto respread = [&](OwnedTensor& t, int64_t heads) {  // heads outermost, padded rows
    OwnedTensor spread(s.dtype, {9, heads, 24}, {31, 9 * 31, 1});
    spread.Fill(std::nan(""));
    for (int64_t i = 0; i < 9; ++i)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t d = 0; d < 24; ++d) spread.Set({i, h, d}, t.Get({i, h, d}));
    t = spread;
  };
  respread(n.key, s.kv_heads);
  respread(n.value, s.kv_heads);
  respread(n.query, s.q_heads);
  Append(strided, n, {1}, {0, 9}, 0);
  ExpectSame(dense, strided);
}

INSTANTIATE_TEST_SUITE_P(Types, AppendKv,
                         testing::Combine(testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                                          testing::Values(0, 1, 8)));

TEST(AppendKvErrors, NameTheArgumentAndChangeNothing) {
  LaneShape s;
  s.rows = 2;
  s.kv_heads = 2;
  s.q_heads = 4;
  s.head_dim = 16;
  s.window = 4;
  LaneFixture base(s, {5, 5, 20, 20}, 48);
  base.Extend(0, 2);
  base.Extend(1, 1);
  const auto error = [&](auto&& spoil) -> std::string {
    LaneFixture cache = base;
    New n = MakeNew(s, 3, 49);
    OwnedTensor rows = OwnedTensor::I32({0, 1}), cu = OwnedTensor::I32({0, 2, 3});
    AppendKvParams p;
    p.key = n.key.view();
    p.value = n.value.view();
    p.query = n.query.view();
    p.batch = {rows.view(), cu.view()};
    KvCacheView view = cache.view();
    spoil(view, p);
    const LaneFixture before = cache;
    try {
      AppendKvCpu(view, p, 0);
    } catch (const Error& e) {
      ExpectSame(cache, before);
      const std::string text = e.what();
      return text.substr(0, text.find_first_of(":["));
    }
    return "none";
  };
  const OwnedTensor bf16(DType::kBF16, {3, 2, 16}), heads(DType::kF32, {3, 3, 16});
  EXPECT_EQ(error([](auto&, auto&) {}), "none");
  EXPECT_EQ(error([&](auto&, auto& p) { p.key = bf16.view(); }), "key");
  EXPECT_EQ(error([&](auto&, auto& p) { p.key = p.value = heads.view(); }), "key");
  EXPECT_EQ(error([&](auto&, auto& p) { p.value = heads.view(); }), "value");
  EXPECT_EQ(error([&](auto&, auto& p) { p.query = heads.view(); }), "query");
  EXPECT_EQ(error([&](auto&, auto& p) { p.query = TensorView(); }), "query");
  EXPECT_EQ(error([&](auto& v, auto&) { v.row_states = KvCacheView().row_states; }), "query");
  EXPECT_EQ(error([&](auto&, auto& p) { p.layer = 1; }), "layer");
  EXPECT_EQ(error([&](auto& v, auto&) { v.lane_len.template ptr<int32_t>()[1] = 1; }), "lane_len");
  EXPECT_EQ(error([&](auto& v, auto&) { v.seq_len.template ptr<int32_t>()[0] = 1; }), "seq_len");
  EXPECT_EQ(error([&](auto& v, auto&) { v.block_table.template ptr<int32_t>()[0] = 1 << 30; }),
            "block_table");
  EXPECT_EQ(error([&](auto& v, auto&) { v.block_table.template ptr<int32_t>()[0] = -1; }),
            "block_table");
}

}  // namespace
}  // namespace kvcore
