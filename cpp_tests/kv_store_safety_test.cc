// What the store does not trust: slots that somebody elected, counts to undo, and operations and
// allocations that throw. Nobody sees another's write, and what fails changes nothing.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"
#include "support/store_model.h"

namespace kvcore {
namespace {

const CacheShape kShape = {.rows = 12, .max_blocks = 6, .blocks = 240, .replaces = true};

class StoreSafety : public testing::Test {
 protected:
  StoreSafety() : m(kShape) { SetNumThreads(1); }
  ~StoreSafety() override {
    EXPECT_EQ(m.Difference(), "");
    EXPECT_NO_THROW(m.store.CheckIntegrity());
  }

  SeqId CreateWith(int64_t len) {
    const SeqId seq = m.Create();
    m.Append({seq}, {len});
    return seq;
  }
  void ElectAll(SeqId seq, int32_t slot) {
    for (int64_t lane = 0; lane < m.num_lanes(); ++lane) m.Elect(seq, lane, slot);
  }
  void ExpectRefused(const std::string& text, const std::function<void()>& change) {
    const std::vector<uint8_t> before = m.tensors.Snapshot();
    const int64_t free = m.store.FreeBlocks();
    try {
      change();
      ADD_FAILURE() << "nothing thrown, expected: " << text;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
    EXPECT_TRUE(m.tensors.Snapshot() == before) << text;
    EXPECT_EQ(m.store.FreeBlocks(), free);
    EXPECT_EQ(m.Difference(), "");
    m.store.CheckIntegrity();
  }
  // After `prepare` fails `change` in every operation that it makes, one after the other, then lets
  // it happen; the same with every allocation. Returns how often it failed.
  int ExpectAllOrNothing(const std::function<void()>& prepare,
                         const std::function<void()>& change) {
    int num_failed = 0;
    for (int64_t Failures::* where : {&Failures::op, &Failures::allocation}) {
      prepare();
      for (int64_t n = 0; n < 1000; ++n) {
        const int64_t free = m.store.FreeBlocks(), rows = m.store.FreeRows();
        m.failures = {};
        m.failures.*where = n;
        bool done = false;
        try {
          change();
          done = true;
        } catch (const InjectedThrow&) {
          ++num_failed;
        }
        m.failures = {};
        EXPECT_EQ(m.Difference(), "");
        m.store.CheckIntegrity();
        if (done) break;
        EXPECT_EQ(m.store.FreeBlocks(), free);
        EXPECT_EQ(m.store.FreeRows(), rows);
      }
    }
    return num_failed;
  }

  ModelledStore m;
};

// ---- slots to overwrite

TEST_F(StoreSafety, AnOpenBlockStaysKnownAsSharedWhileSlotsAreOverwritten) {
  const SeqId parent = CreateWith(32);
  const SeqId child = m.Fork(parent, 1, /*copy=*/false)[0];
  m.Truncate(parent, 12);  // its open block is the child's second
  ElectAll(parent, 3);
  m.Append({parent}, {1});
  m.ForgetReplace(parent);
  m.Append({parent}, {3});
  EXPECT_EQ(m.Difference(child), "");
}

TEST_F(StoreSafety, ASlotThatIsNotThereIsRefusedByName) {
  const SeqId seq = CreateWith(20);
  for (const int32_t slot : {20, 40, 95, 96, 1 << 20, 2'000'000'000, 0x7fffffff}) {
    m.Elect(seq, 3, slot);
    const std::string text = "replace: expected a slot below lane_len 20 in row " +
                             std::to_string(m.store.Row(seq)) + ", layer 1, kv head 1, got " +
                             std::to_string(slot);
    ExpectRefused(text, [&] { m.store.Extend({seq}, {1}); });
    ExpectRefused(text, [&] { m.store.BlocksToExtend({seq}, {1}); });
  }
  m.Fork(seq, 1, false);
  m.Append({seq}, {2});  // several tokens go by no slot
  m.Append({seq}, {1});
}

TEST_F(StoreSafety, AnElectionDoesNotOutliveTheSlotsItWasMadeOf) {
  const SeqId seq = CreateWith(20);
  ElectAll(seq, 18);
  m.Truncate(seq, 10);
  const SeqId other = CreateWith(32);  // takes the freed blocks
  m.Append({seq}, {1});
  EXPECT_EQ(m.sequences().at(seq).lanes[0].size(), 11u);
  EXPECT_EQ(m.Difference(other), "");
}

TEST_F(StoreSafety, EvictionForgetsElectionsOnlyWhereItDropsSomething) {
  const SeqId a = CreateWith(20), b = CreateWith(20);
  ElectAll(a, 3);
  ElectAll(b, 4);
  m.Evict({a, b}, {{{}, {5}, {}, {}}, {{}, {}, {}, {}}});
  EXPECT_EQ(m.sequences().at(a).replace[0], -1);
  EXPECT_EQ(m.sequences().at(b).replace[0], 4);
  EXPECT_EQ(m.store.Undoable(a), 0);
  EXPECT_EQ(m.store.Undoable(b), 20);
}

TEST_F(StoreSafety, AForgottenElectionIsAppendedTo) {
  const SeqId seq = CreateWith(20);
  ElectAll(seq, 3);
  m.ForgetReplace(seq);
  m.Append({seq}, {1});
  EXPECT_EQ(m.store.MaxLaneLen(seq), 21);
  EXPECT_EQ(m.store.NumReplaced(seq), 0);
}

TEST_F(StoreSafety, AnElectionBetweenExtendAndAppendIsRefused) {
  const SeqId seq = CreateWith(20);
  const OwnedTensor rows = OwnedTensor::I32({static_cast<int32_t>(m.store.Row(seq))});
  const OwnedTensor one = OwnedTensor::I32({0, 1}), two = OwnedTensor::I32({0, 2});
  m.Elect(seq, 2, 7);
  m.store.Extend({seq}, {1});
  m.store.CheckAppend({rows.view(), one.view()}, 1);
  for (const int32_t slot : {8, -1}) {
    m.tensors.replace.SetAt(m.store.Row(seq) * m.num_lanes() + 2, slot);
    m.store.CheckAppend({rows.view(), one.view()}, 0);
    m.store.CheckAppend({rows.view(), two.view()}, 1);  // several tokens are appended
    EXPECT_THROW(m.store.CheckAppend({rows.view(), one.view()}, 1), Error);
  }
  m.tensors.replace.SetAt(m.store.Row(seq) * m.num_lanes() + 3, 0);  // had been appended to
  EXPECT_THROW(m.store.CheckAppend({rows.view(), one.view()}, 1), Error);
  m.Release(seq);
}

// ---- undoing

TEST_F(StoreSafety, NothingIsUndonePastAnOverwrittenOrDroppedSlot) {
  const SeqId seq = CreateWith(20);
  m.Elect(seq, 1, 3);
  m.Append({seq}, {1});
  ExpectRefused("count: sequence", [&] { m.store.Truncate(seq, 1); });
  m.ForgetReplace(seq);
  m.Append({seq}, {2});
  ExpectRefused("count: sequence", [&] { m.store.Truncate(seq, 3); });
  const SeqId child = m.Fork(seq, 1, true)[0];
  ExpectRefused("count: sequence", [&] { m.store.Truncate(child, 3); });
  m.Truncate(seq, 2);
  m.Append({child}, {1});
  m.Adopt(seq, child);
  ExpectRefused("count: sequence", [&] { m.store.Truncate(seq, 4); });
  m.Truncate(seq, 1);
  m.Evict({seq}, {{{0}, {}, {}, {}}});
  ExpectRefused("count: sequence", [&] { m.store.Truncate(seq, 1); });
  m.Truncate(seq, 0);
}

// ---- what throws inside

TEST_F(StoreSafety, CreateHappensOrDoesNot) {
  EXPECT_EQ(ExpectAllOrNothing([] {}, [&] { m.Create(); }), 1);
}

TEST_F(StoreSafety, ForkHappensOrDoesNot) {
  for (const bool copy : {false, true}) {
    SeqId seq = 0;
    EXPECT_GE(ExpectAllOrNothing([&] { seq = CreateWith(40); }, [&] { m.Fork(seq, 1, copy); }), 6);
  }
}

TEST_F(StoreSafety, ExtendHappensOrDoesNot) {
  SeqId seq = 0;
  const auto prepare = [&] {
    seq = CreateWith(32);
    m.Fork(seq, 1, false);
    m.Truncate(seq, 5);
  };
  EXPECT_GE(ExpectAllOrNothing(prepare, [&] { m.Append({seq}, {3}); }), 6);
}

TEST_F(StoreSafety, OverwritingHappensOrDoesNot) {
  SeqId seq = 0;
  const auto prepare = [&] {
    seq = CreateWith(32);
    m.Fork(seq, 1, false);
    ElectAll(seq, 2);
  };
  EXPECT_GE(ExpectAllOrNothing(prepare, [&] { m.Append({seq}, {1}); }), 6);
}

TEST_F(StoreSafety, EvictHappensOrDoesNot) {
  SeqId seq = 0;
  const auto prepare = [&] {
    seq = CreateWith(40);
    m.Fork(seq, 1, false);
  };
  EXPECT_GE(ExpectAllOrNothing(prepare, [&] { m.Evict({seq}, {{{0, 20}, {1}, {}, {3, 4, 5}}}); }),
            8);
}

TEST_F(StoreSafety, WhatOnlyGivesBackNeedsNoMemory) {
  const SeqId a = CreateWith(40), b = m.Fork(a, 1, false)[0], c = m.Fork(a, 1, true)[0];
  m.failures.allocation = 0;
  m.Truncate(a, 13);
  m.Adopt(a, b);
  m.Release(c);
  m.failures = {};
}

}  // namespace
}  // namespace kvcore
