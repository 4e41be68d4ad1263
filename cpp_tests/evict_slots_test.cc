#include "ops/evict_slots.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "cpu/cpu_ops.h"
#include "support/lane_fixture.h"

namespace kvcore {
namespace {

using Drops = std::vector<std::vector<int32_t>>;  // per (seq, layer, head)

struct Lists {
  OwnedTensor drop, count;
};

Lists MakeLists(const LaneShape& s, int64_t seqs, const Drops& drops, int64_t max_drop) {
  Lists lists;
  lists.drop = OwnedTensor(DType::kI32, {seqs, s.layers, s.kv_heads, max_drop});
  lists.drop.Fill(kUnusedTableEntry);
  lists.count = OwnedTensor(DType::kI32, {seqs, s.layers, s.kv_heads});
  for (size_t i = 0; i < drops.size(); ++i) {
    lists.count.SetAt(static_cast<int64_t>(i), static_cast<double>(drops[i].size()));
    for (size_t j = 0; j < drops[i].size(); ++j)
      lists.drop.SetAt(static_cast<int64_t>(i) * max_drop + static_cast<int64_t>(j), drops[i][j]);
  }
  return lists;
}

void Evict(const LaneFixture& cache, const std::vector<int32_t>& rows, const Lists& lists) {
  const OwnedTensor r = OwnedTensor::I32(rows);
  EvictSlotsCpu(cache.view(), {r.view(), lists.drop.view(), lists.count.view()}, 0);
}

// Everything about one slot.
struct Slot {
  int64_t position;
  std::vector<double> key, value;
  bool operator==(const Slot&) const = default;
};

Slot ReadSlot(const LaneFixture& c, int64_t row, int64_t layer, int64_t head, int64_t slot) {
  Slot s{c.Position(row, layer, head, slot), {}, {}};
  for (int64_t d = 0; d < c.shape().head_dim; ++d) {
    s.key.push_back(c.Key(row, layer, head, slot, d));
    s.value.push_back(c.Value(row, layer, head, slot, d));
  }
  return s;
}

class EvictSlots : public testing::TestWithParam<DType> {
 protected:
  LaneShape Shape() const {
    LaneShape s;
    s.dtype = GetParam();
    s.rows = 3;
    s.layers = 2;
    s.kv_heads = 2;
    s.q_heads = 2;
    s.head_dim = 24;
    s.max_blocks = 5;
    s.window = 2;
    return s;
  }
};

TEST_P(EvictSlots, HolesTakeTheSurvivorsOfTheTailInOrder) {
  const LaneShape s = Shape();
  const std::vector<int32_t> lens = {1, 15, 16, 17, 40, 64, 65, 33, 20, 21, 22, 23};
  LaneFixture cache(s, lens, 51);
  const LaneFixture before = cache;
  const std::vector<int32_t> rows = {2, 0, 1};
  // Drop nothing, all, the tail, the head, every other slot, or a random set.
  std::mt19937 rng(52);
  Drops drops;
  for (size_t i = 0; i < 12; ++i) {
    const int32_t len = lens[static_cast<size_t>(rows[i / 4]) * 4 + i % 4];
    std::vector<int32_t> drop;
    for (int32_t slot = 0; slot < len; ++slot) {
      const bool dead[] = {false, true, slot >= len - 3, slot < 3, slot % 2 == 0, rng() % 3 == 0};
      if (dead[i % 6]) drop.push_back(slot);
    }
    drops.push_back(drop);
  }
  Evict(cache, rows, MakeLists(s, 3, drops, 70));
  for (size_t i = 0; i < 12; ++i) {
    const int64_t row = rows[i / 4], layer = i % 4 / 2, head = i % 2;
    const int64_t len = before.Len(row, layer, head),
                  new_len = len - static_cast<int64_t>(drops[i].size());
    const std::set<int64_t> dead(drops[i].begin(), drops[i].end());
    std::vector<int64_t> source(static_cast<size_t>(new_len));
    std::iota(source.begin(), source.end(), 0);
    int64_t from = new_len;
    for (int64_t hole = 0; hole < new_len; ++hole)
      if (dead.count(hole) != 0) {
        while (dead.count(from) != 0) ++from;
        source[static_cast<size_t>(hole)] = from++;
      }
    for (int64_t slot = 0; slot < new_len; ++slot)
      EXPECT_TRUE(ReadSlot(cache, row, layer, head, slot) ==
                  ReadSlot(before, row, layer, head, source[static_cast<size_t>(slot)]))
          << "lane " << i << " slot " << slot;
  }
  EXPECT_TRUE(SameBytes(cache.block_table, before.block_table));
  EXPECT_TRUE(SameBytes(cache.lane_len, before.lane_len));
  EXPECT_TRUE(SameBytes(cache.seq_len, before.seq_len));
  EXPECT_TRUE(SameBytes(cache.query_ring, before.query_ring));
}

TEST_P(EvictSlots, OtherRowsAndLanesWithoutDropsKeepEveryByte) {
  const LaneShape s = Shape();
  LaneFixture cache(s, std::vector<int32_t>(12, 40), 53);
  const LaneFixture before = cache;
  Evict(cache, {1}, MakeLists(s, 1, {{}, {0, 5, 39}, {}, {}}, 3));
  const auto last_live = [&](int64_t row, int64_t lane) { return row == 1 && lane == 1 ? 0 : 40; };
  for (int64_t row = 0; row < 3; ++row)
    for (int64_t lane = 0; lane < 4; ++lane)
      for (int64_t slot = 0; slot < last_live(row, lane); ++slot)
        ASSERT_TRUE(ReadSlot(cache, row, lane / 2, lane % 2, slot) ==
                    ReadSlot(before, row, lane / 2, lane % 2, slot));
}

TEST_P(EvictSlots, EmptyRequestsAreLegal) {
  const LaneShape s = Shape();
  LaneFixture cache(s, std::vector<int32_t>(12, 20), 54);
  const LaneFixture before = cache;
  Evict(cache, {}, MakeLists(s, 0, {}, 4));
  Evict(cache, {0}, MakeLists(s, 1, {{}, {}, {}, {}}, 0));
  EXPECT_TRUE(SameBytes(cache.key_blocks, before.key_blocks));
}

INSTANTIATE_TEST_SUITE_P(Types, EvictSlots,
                         testing::Values(DType::kF32, DType::kBF16, DType::kF16));

TEST(EvictSlotsErrors, NameTheArgumentAndChangeNothing) {
  LaneShape s;
  s.rows = 2;
  LaneFixture cache(s, {20, 5}, 55);
  const LaneFixture before = cache;
  const auto error = [&](const std::vector<int32_t>& rows, const Drops& drops,
                         int64_t max_drop) -> std::string {
    try {
      Evict(cache, rows, MakeLists(s, static_cast<int64_t>(drops.size()), drops, max_drop));
    } catch (const Error& e) {
      EXPECT_TRUE(SameBytes(cache.key_blocks, before.key_blocks));
      const std::string text = e.what();
      return text.substr(0, text.find_first_of(":["));
    }
    return "none";
  };
  EXPECT_EQ(error({0, 1}, {{1}, {5}}, 2), "drop");  // not live, after a lane that is right
  EXPECT_EQ(error({0}, {{3, 3}}, 2), "drop");       // twice
  EXPECT_EQ(error({0}, {{3, 2}}, 2), "drop");       // descending
  EXPECT_EQ(error({0}, {{-1}}, 2), "drop");
  EXPECT_EQ(error({0, 0}, {{1}, {1}}, 2), "rows");
  EXPECT_EQ(error({2}, {{1}}, 2), "rows");
  EXPECT_EQ(error({0}, {{1}, {1}}, 2), "drop");  // one row, two lists
  Lists lists = MakeLists(s, 1, {{1}}, 2);
  lists.count.SetAt(0, 3);
  EXPECT_THROW(Evict(cache, {0}, lists), Error);
  lists.count.SetAt(0, -1);
  EXPECT_THROW(Evict(cache, {0}, lists), Error);
}

}  // namespace
}  // namespace kvcore
