#include "store/kv_store.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <set>

#include "support/store_model.h"

namespace kvcore {
namespace {

// Everything that an operation which throws must leave alone.
struct State {
  std::vector<uint8_t> tensors;
  int64_t free_blocks, free_rows, num_sequences;
  bool operator==(const State&) const = default;
};
State StateOf(const ModelledStore& m) {
  return {m.tensors.Snapshot(), m.store.FreeBlocks(), m.store.FreeRows(), m.store.NumSequences()};
}

template <typename E>
std::string MessageOf(const std::function<void()>& change) {
  try {
    change();
  } catch (const E& e) {
    return e.what();
  }
  return "nothing thrown";
}

// `change` throws E with a message that contains `text`, and changes nothing.
template <typename E>
void ExpectRefused(ModelledStore& m, const std::string& text, const std::function<void()>& change) {
  const State before = StateOf(m);
  const std::string message = MessageOf<E>(change);
  EXPECT_NE(message.find(text), std::string::npos) << message << "\nlacks: " << text;
  EXPECT_TRUE(StateOf(m) == before) << "changed by: " << message;
  EXPECT_NO_THROW(m.store.CheckIntegrity());
}

void ExpectSound(const ModelledStore& m) {
  EXPECT_EQ(m.Difference(), "");
  EXPECT_NO_THROW(m.store.CheckIntegrity());
}

SeqId CreateWith(ModelledStore& m, int64_t num_tokens) {
  const SeqId seq = m.Create();
  m.Append({seq}, {num_tokens});
  return seq;
}

// ---- handles

TEST(KvStore, StartsEmptyWhateverTheTensorsHeld) {
  ModelledStore m({.rows = 3, .blocks = 10});
  EXPECT_EQ(m.store.FreeRows(), 3);
  EXPECT_EQ(m.store.FreeBlocks(), 10);
  EXPECT_EQ(m.store.NumSequences(), 0);
  const SeqId seq = m.Create();
  EXPECT_EQ(m.store.SeqLen(seq), 0);
  EXPECT_EQ(m.store.MaxLaneLen(seq), 0);
  EXPECT_EQ(m.store.NumBlocks(seq), 0);
  ExpectSound(m);
}

TEST(KvStore, HandlesAreNeverReused) {
  ModelledStore m({.rows = 2});
  std::set<SeqId> seen;
  for (int i = 0; i < 10; ++i) {
    const SeqId seq = CreateWith(m, 3);
    EXPECT_TRUE(seen.insert(seq).second) << seq;
    m.Release(seq);
    EXPECT_FALSE(m.store.IsLive(seq));
  }
  EXPECT_EQ(m.store.FreeBlocks(), m.shape().blocks);
  ExpectSound(m);
}

TEST(KvStore, AStaleHandleIsRefusedEverywhere) {
  ModelledStore m({});
  const SeqId live = CreateWith(m, 3), dead = CreateWith(m, 20);
  m.Release(dead);
  CreateWith(m, 5);  // somebody else in the row of `dead`
  const auto refused = [&](const std::function<void()>& change) {
    ExpectRefused<Error>(m, "seq: expected a live sequence, got " + std::to_string(dead), change);
  };
  KvStore& s = m.store;
  refused([&] { s.Release(dead); });
  refused([&] { s.Extend({live, dead}, {1, 1}); });
  refused([&] { s.BlocksToExtend({dead}, {1}); });
  refused([&] { s.Truncate(dead, 1); });
  refused([&] { s.Fork(dead, 1, false); });
  refused([&] { s.BlocksToFork(dead, 1, true); });
  refused([&] { s.Adopt(live, dead); });
  refused([&] { s.Adopt(dead, live); });
  refused([&] { m.Evict({live, dead}, DropLists(2, {{}, {}, {}, {}})); });
  refused([&] { s.Row(dead); });
  refused([&] { s.SeqLen(dead); });
  refused([&] { s.MaxLaneLen(dead); });
  refused([&] { s.TotalSlots(dead); });
  refused([&] { s.NumBlocks(dead); });
}

TEST(KvStore, RowsRunOutLikeBlocks) {
  ModelledStore m({.rows = 2});
  const SeqId seq = CreateWith(m, 3);
  ExpectRefused<OutOfBlocks>(m, "Fork: needs 2 rows, 1 are free",
                             [&] { m.store.Fork(seq, 2, false); });
  m.Create();
  ExpectRefused<OutOfBlocks>(m, "all 2 rows are taken", [&] { m.store.Create(); });
}

// ---- extend and truncate

TEST(KvStore, ExtendTakesBlocksOnlyAtBlockBoundaries) {
  ModelledStore m({.max_blocks = 8});
  const SeqId seq = m.Create();
  int64_t len = 0;
  for (const int64_t count : {1, 14, 1, 1, 0, 15, 16, 33, 47}) {
    const int64_t free = m.store.FreeBlocks();
    const int64_t needed = m.num_lanes() * (BlocksFor(len + count) - BlocksFor(len));
    EXPECT_EQ(m.store.BlocksToExtend({seq}, {count}), needed);
    m.Append({seq}, {count});
    len += count;
    EXPECT_EQ(m.store.FreeBlocks(), free - needed);
    EXPECT_EQ(m.store.SeqLen(seq), len);
    EXPECT_EQ(m.store.MaxLaneLen(seq), len);
    EXPECT_EQ(m.store.TotalSlots(seq), m.num_lanes() * len);
    EXPECT_EQ(m.store.NumBlocks(seq), m.num_lanes() * BlocksFor(len));
    ExpectSound(m);
  }
}

TEST(KvStore, ExtendIsAllOrNothing) {
  ModelledStore m({.blocks = 11});  // 4 lanes: two blocks each for two sequences do not fit
  const SeqId a = CreateWith(m, 15), b = m.Create();
  ExpectRefused<OutOfBlocks>(m, "Extend: needs 8 blocks, 7 of 11 are free",
                             [&] { m.store.Extend({a, b}, {2, 1}); });
  m.Append({a, b}, {1, 1});
  ExpectSound(m);
}

TEST(KvStore, ExtendRefusesBadInput) {
  ModelledStore m({.max_blocks = 2});
  const SeqId a = CreateWith(m, 5), b = CreateWith(m, 5);
  const auto refused = [&](const std::string& text, const std::vector<SeqId>& seqs,
                           const std::vector<int64_t>& counts) {
    ExpectRefused<Error>(m, text, [&] { m.store.Extend(seqs, counts); });
    EXPECT_NE(MessageOf<Error>([&] { m.store.BlocksToExtend(seqs, counts); }).find(text),
              std::string::npos);
  };
  refused("counts: expected one for each of 2 seqs, got 1", {a, b}, {1});
  refused("counts[1]: expected >= 0, got -1", {a, b}, {1, -1});
  refused("seqs: expected each sequence once", {a, b, a}, {1, 1, 1});
  refused("expected at most 32 in all, got 28 more", {a, b}, {1, 28});
  refused("counts[0]", {a}, {std::numeric_limits<int64_t>::max()});
  m.Append({a, b}, {0, 27});
  ExpectSound(m);
}

// The capacity of a lane is checked for the longest one.
TEST(KvStore, LanesOfOneSequenceMayDiffer) {
  ModelledStore m({.max_blocks = 3});
  const SeqId a = CreateWith(m, 40), b = CreateWith(m, 17);
  m.Evict({a, b}, {{{0, 1, 2, 3, 4, 5, 6, 7, 39}, {}, {20}, {1, 2}}, {{}, {0}, {0, 16}, {3}}});
  EXPECT_EQ(m.store.MaxLaneLen(a), 40);
  EXPECT_EQ(m.store.TotalSlots(a), 4 * 40 - 12);
  EXPECT_EQ(m.store.NumBlocks(a), 2 + 3 + 3 + 3);
  ExpectRefused<Error>(m, "holds 40 slots", [&] { m.store.Extend({a}, {9}); });
  for (const int64_t count : {1, 2, 5}) {
    const int64_t free = m.store.FreeBlocks();
    const int64_t needed = m.store.BlocksToExtend({b, a}, {count, count});
    m.Append({b, a}, {count, count});
    EXPECT_EQ(m.store.FreeBlocks(), free - needed);
    ExpectSound(m);
  }
}

TEST(KvStore, TruncateUndoesExtend) {
  ModelledStore m({});
  for (const int64_t len : {0, 1, 15, 16, 17, 40}) {
    const SeqId seq = CreateWith(m, len);
    for (const int64_t count : {0, 1, 16, 20}) {
      const int64_t free = m.store.FreeBlocks();
      m.store.Extend({seq}, {count});  // no forward: the slots stay unwritten
      m.store.Truncate(seq, count);
      EXPECT_EQ(m.store.FreeBlocks(), free);
      ExpectSound(m);
    }
    m.Release(seq);
  }
}

TEST(KvStore, TruncateRefusesMoreThanThereIs) {
  ModelledStore m({});
  const SeqId seq = CreateWith(m, 20);
  ExpectRefused<Error>(m, "count", [&] { m.store.Truncate(seq, 21); });
  ExpectRefused<Error>(m, "count", [&] { m.store.Truncate(seq, -1); });
  m.Evict({seq}, {{{}, {}, {0, 1, 2}, {}}});
  ExpectRefused<Error>(m, "lane 2", [&] { m.store.Truncate(seq, 18); });
}

// ---- fork and adopt

class KvStoreFork : public ::testing::TestWithParam<std::tuple<int64_t, bool>> {};

TEST_P(KvStoreFork, TakesWhatItSaysAndSharesWhatItMay) {
  const auto [len, copy] = GetParam();
  ModelledStore m({.blocks = 80});
  const SeqId parent = CreateWith(m, len);
  const int64_t free = m.store.FreeBlocks();
  const int64_t per_lane = copy ? BlocksFor(len) : len % kBlockSlots != 0;
  EXPECT_EQ(m.store.BlocksToFork(parent, 3, copy), 3 * m.num_lanes() * per_lane);
  const auto children = m.Fork(parent, 3, copy);
  EXPECT_EQ(children.size(), 3u);
  EXPECT_EQ(m.store.FreeBlocks(), free - 3 * m.num_lanes() * per_lane);
  ExpectSound(m);
  m.Release(parent);
  ExpectSound(m);  // children do not depend on their parent
}

TEST_P(KvStoreFork, ForkThenExtendLeavesParentUnchanged) {
  const auto [len, copy] = GetParam();
  ModelledStore m({.blocks = 100});
  const SeqId parent = CreateWith(m, len);
  const auto children = m.Fork(parent, 3, copy);
  m.Append(children, {1, 16, 20});
  ExpectSound(m);
  m.Append({parent}, {7});
  ExpectSound(m);
}

TEST_P(KvStoreFork, ForkThenEvictLeavesParentUnchanged) {
  const auto [len, copy] = GetParam();
  if (len == 0) return;
  ModelledStore m({.blocks = 100});
  const SeqId parent = CreateWith(m, len);
  const auto children = m.Fork(parent, 2, copy);
  m.Evict({children[1]}, {{{0}, {}, {0}, {static_cast<int32_t>(len) - 1}}});
  ExpectSound(m);
  m.Append({children[1], parent, children[0]}, {2, 2, 2});
  ExpectSound(m);
}

TEST_P(KvStoreFork, AForkThatDoesNotFitChangesNothing) {
  const auto [len, copy] = GetParam();
  ModelledStore m({.blocks = 4 * BlocksFor(len) + 2});
  const SeqId parent = CreateWith(m, len);
  const int64_t needed = m.store.BlocksToFork(parent, 2, copy);
  if (needed == 0) return;
  ExpectRefused<OutOfBlocks>(m, "Fork: needs " + std::to_string(needed) + " blocks, 2 of",
                             [&, copy = copy] { m.store.Fork(parent, 2, copy); });
}

INSTANTIATE_TEST_SUITE_P(Lengths, KvStoreFork,
                         ::testing::Combine(::testing::Values(0, 1, 15, 16, 17, 40),
                                            ::testing::Bool()));

TEST(KvStore, ForkOfNothingIsLegal) {
  ModelledStore m({});
  const SeqId parent = CreateWith(m, 20);
  EXPECT_TRUE(m.Fork(parent, 0, true).empty());
  ExpectRefused<Error>(m, "count: expected >= 0", [&] { m.store.Fork(parent, -1, true); });
}

TEST(KvStore, WorksWithoutAQueryRing) {
  ModelledStore m({.window = 0});
  const SeqId parent = CreateWith(m, 20);
  m.Append(m.Fork(parent, 2, false), {3, 13});
  ExpectSound(m);
}

TEST(KvStore, AdoptMakesTheParentWhatTheChildIs) {
  ModelledStore m({});
  const SeqId parent = CreateWith(m, 20);
  const int64_t free = m.store.FreeBlocks();
  const auto children = m.Fork(parent, 3, false);
  m.Append(children, {1, 5, 9});
  const int64_t row = m.store.Row(children[1]);
  m.Adopt(parent, children[1]);
  EXPECT_EQ(m.store.Row(parent), row);
  EXPECT_EQ(m.store.SeqLen(parent), 25);
  EXPECT_FALSE(m.store.IsLive(children[1]));
  ExpectSound(m);
  m.Release(children[0]);
  m.Release(children[2]);
  EXPECT_EQ(m.store.FreeBlocks(), free);
  ExpectRefused<Error>(m, "child", [&] { m.store.Adopt(parent, parent); });
  m.Append({parent}, {10});
  ExpectSound(m);
}

// ---- sharing of open blocks

TEST(KvStore, AnOpenBlockThatTruncationLeavesSharedIsCopiedBeforeItGrows) {
  ModelledStore m({});
  const SeqId parent = CreateWith(m, 32);
  const SeqId child = m.Fork(parent, 1, false)[0];
  m.Truncate(child, 3);
  EXPECT_EQ(m.store.BlocksToExtend({child}, {1}), m.num_lanes());
  m.Append({child}, {1});
  ExpectSound(m);
  EXPECT_EQ(m.store.BlocksToExtend({child}, {1}), 0);
}

TEST(KvStore, TheLastOwnerOfAnOpenBlockKeepsIt) {
  ModelledStore m({.blocks = 4 * 2 + 2 * 4});  // the parent's blocks and copies for two of three
  const SeqId parent = CreateWith(m, 32);
  const auto children = m.Fork(parent, 2, false);
  const std::vector<SeqId> all = {parent, children[0], children[1]};
  for (const SeqId seq : all) m.Truncate(seq, 1 + seq % 2);
  EXPECT_EQ(m.store.BlocksToExtend(all, {1, 1, 1}), 2 * m.num_lanes());
  EXPECT_EQ(m.store.BlocksToExtend(all, {1, 0, 1}), 2 * m.num_lanes());
  EXPECT_EQ(m.store.BlocksToExtend(all, {0, 0, 0}), 0);
  m.Append(all, {1, 1, 1});
  EXPECT_EQ(m.store.FreeBlocks(), 0);
  ExpectSound(m);
}

TEST(KvStore, ExtendThatCannotCopyItsSharedOpenBlocksChangesNothing) {
  ModelledStore m({.blocks = 4 * 2 + 3});
  const SeqId parent = CreateWith(m, 32);
  const SeqId child = m.Fork(parent, 1, false)[0];
  m.Truncate(child, 3);
  ExpectRefused<OutOfBlocks>(m, "Extend: needs 4 blocks, 3 of 11 are free",
                             [&] { m.store.Extend({child}, {1}); });
  ExpectSound(m);
}

}  // namespace
}  // namespace kvcore
