// Random use of a store, compared with the model. KVCORE_FUZZ_OPS overrides the number of
// operations of the first test.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <set>

#include "base/parallel.h"
#include "support/store_model.h"

namespace kvcore {
namespace {

int64_t NumOps() {
  const char* text = std::getenv("KVCORE_FUZZ_OPS");
  return text != nullptr ? std::atoll(text) : 1'000'000;
}

class Random {
 public:
  explicit Random(uint64_t seed) : bits_(seed) {}
  int64_t Below(int64_t n) { return static_cast<int64_t>(bits_() % static_cast<uint64_t>(n)); }
  bool Chance(int percent) { return Below(100) < percent; }
  // Up to `n` different ids of `from`.
  std::vector<SeqId> Pick(std::vector<SeqId> from, int64_t n) {
    std::shuffle(from.begin(), from.end(), bits_);
    from.resize(std::min<size_t>(from.size(), n));
    return from;
  }

 private:
  std::mt19937_64 bits_;
};

class StoreFuzz : public ::testing::Test {
 protected:
  static StoreShape Shape() {
    return {.rows = 10, .head_dim = 8, .max_blocks = 5, .blocks = 56, .window = 4};
  }
  StoreFuzz() : m(Shape()), random(20240817) { SetNumThreads(1); }

  std::vector<SeqId> Live() const {
    std::vector<SeqId> seqs;
    for (const auto& [seq, unused] : m.sequences()) seqs.push_back(seq);
    return seqs;
  }

  // Runs `change`, which must take exactly `blocks` from the pool, or throw OutOfBlocks and leave
  // every byte alone when it has fewer.
  template <typename Change>
  bool Take(int64_t blocks, bool enough_rows, Change change) {
    const int64_t free = m.store.FreeBlocks(), free_rows = m.store.FreeRows();
    if (blocks <= free && enough_rows) {
      change();
      EXPECT_EQ(m.store.FreeBlocks(), free - blocks);
      return true;
    }
    const std::vector<uint8_t> before = m.tensors.Snapshot();
    EXPECT_THROW(change(), OutOfBlocks);
    EXPECT_TRUE(m.tensors.Snapshot() == before);
    EXPECT_EQ(m.store.FreeBlocks(), free);
    EXPECT_EQ(m.store.FreeRows(), free_rows);
    ++num_refused;
    return false;
  }

  bool Append(const std::vector<SeqId>& seqs, const std::vector<int64_t>& counts) {
    return Take(m.store.BlocksToExtend(seqs, counts), true, [&] { m.Append(seqs, counts); });
  }

  std::vector<SeqId> Fork(SeqId parent, int64_t count, bool copy) {
    std::vector<SeqId> children;
    Take(m.store.BlocksToFork(parent, count, copy), count <= m.store.FreeRows(),
         [&] { children = m.Fork(parent, count, copy); });
    return children;
  }

  void Evict(const std::vector<SeqId>& seqs) {
    DropLists lists;
    for (const SeqId seq : seqs) {
      auto& lanes = lists.emplace_back();
      const int64_t style = random.Below(4);
      for (const auto& lane : m.sequences().at(seq).lanes) {
        auto& list = lanes.emplace_back();
        const auto len = static_cast<int32_t>(lane.size());
        // One slot (steady eviction), a random share, the tail only, or a few from the front half.
        if (len == 0) continue;
        const int32_t tail = style == 2 ? len - 1 - static_cast<int32_t>(random.Below(len)) : 0;
        const int percent = static_cast<int>(random.Below(60));
        for (int32_t slot = tail; slot < len && style != 0; ++slot) {
          if (style == 2 || (random.Chance(percent) && (style == 1 || slot < len / 2))) {
            list.push_back(slot);
          }
        }
        if (style == 0) list.push_back(static_cast<int32_t>(random.Below(len)));
      }
    }
    const bool fits = CopiesToEvict(seqs, lists) <= m.store.FreeBlocks();
    const std::vector<uint8_t> before = fits ? std::vector<uint8_t>() : m.tensors.Snapshot();
    if (fits) {
      m.Evict(seqs, lists);
    } else {
      ++num_refused;
      EXPECT_THROW(m.Evict(seqs, lists), OutOfBlocks);
      EXPECT_TRUE(m.tensors.Snapshot() == before);
    }
  }

  // Blocks with a hole below the new length are written. Every writer needs a copy while there are
  // other owners, so when all owners write, one copy less.
  int64_t CopiesToEvict(const std::vector<SeqId>& seqs, const DropLists& lists) const {
    const auto block_of = [&](SeqId seq, int64_t lane, int64_t slot) {
      return m.tensors.block_table.view()
          .ptr<int32_t>()[(m.store.Row(seq) * m.num_lanes() + lane) * m.shape().max_blocks +
                          slot / kBlockSlots];
    };
    std::vector<int64_t> owners(m.shape().blocks), writers(m.shape().blocks);
    for (const auto& [seq, s] : m.sequences()) {
      for (int64_t lane = 0; lane < m.num_lanes(); ++lane) {
        const auto len = static_cast<int64_t>(s.lanes[lane].size());
        for (int64_t slot = 0; slot < len; slot += kBlockSlots) ++owners[block_of(seq, lane, slot)];
      }
    }
    for (size_t i = 0; i < seqs.size(); ++i) {
      for (int64_t lane = 0; lane < m.num_lanes(); ++lane) {
        const auto& list = lists[i][lane];
        const size_t kept = m.sequences().at(seqs[i]).lanes[lane].size() - list.size();
        std::set<int32_t> written;
        for (const int32_t slot : list) {
          if (slot < static_cast<int64_t>(kept)) written.insert(block_of(seqs[i], lane, slot));
        }
        for (const int32_t block : written) ++writers[block];
      }
    }
    int64_t copies = 0;
    for (int64_t b = 0; b < m.shape().blocks; ++b) {
      copies += writers[b] > 0 ? std::min(writers[b], owners[b] - 1) : 0;
    }
    return copies;
  }

  void ReleaseAll() {
    for (const SeqId seq : Live()) m.Release(seq);
    EXPECT_EQ(m.store.FreeBlocks(), m.shape().blocks);
    EXPECT_EQ(m.store.FreeRows(), m.shape().rows);
    m.store.CheckIntegrity();
  }

  // One random change; returns the sequences that it touched and that still live.
  std::vector<SeqId> Change() {
    const std::vector<SeqId> live = Live();
    const int64_t what = random.Below(100);
    if (live.empty() || what < 5) {
      if (m.store.FreeRows() > 0) return {m.Create()};
      EXPECT_THROW(m.store.Create(), OutOfBlocks);
      return {};
    }
    const std::vector<SeqId> some = random.Pick(live, 1 + random.Below(3));
    const SeqId seq = some[0];
    if (what < 45) {
      std::vector<int64_t> counts;
      for (const SeqId s : some) {
        const int64_t room = m.shape().max_blocks * kBlockSlots - m.store.MaxLaneLen(s);
        counts.push_back(std::min(room, random.Below(random.Chance(20) ? 40 : 6)));
      }
      Append(some, counts);
      return some;
    }
    if (what < 60) {
      std::vector<SeqId> touched = Fork(seq, random.Below(4), random.Chance(40));
      touched.push_back(seq);
      return touched;
    }
    if (what < 67) {
      if (some.size() == 1) return {};
      m.Adopt(seq, some[1]);
      return {seq};
    }
    if (what < 82) {
      Evict(some);
      return some;
    }
    if (what < 92) {
      m.Truncate(seq, random.Below(m.sequences().at(seq).undoable + 1));
      return {seq};
    }
    if (what < 99) {
      m.Release(seq);
      return {};
    }
    const SeqId dead = seq + 1'000'000'000;
    EXPECT_THROW(m.store.Extend({seq, dead}, {1, 1}), Error);
    EXPECT_THROW(m.store.Extend({seq, seq}, {1, 1}), Error);
    EXPECT_THROW(m.store.Adopt(seq, dead), Error);
    EXPECT_THROW(m.store.Truncate(seq, m.store.SeqLen(seq) + 1), Error);
    return {seq};
  }

  ModelledStore m;
  Random random;
  int64_t num_refused = 0;
};

TEST_F(StoreFuzz, RandomOperationsAgreeWithTheModel) {
  const int64_t num_ops = NumOps();
  for (int64_t op = 0; op < num_ops; ++op) {
    for (const SeqId seq : Change()) ASSERT_EQ(m.Difference(seq), "") << "operation " << op;
    ASSERT_NO_THROW(m.store.CheckIntegrity()) << "operation " << op;
    if (op % 16 == 0) {  // also those that nobody touched
      ASSERT_EQ(m.Difference(), "") << "operation " << op;
    }
    if (op % 5000 == 4999) ReleaseAll();
    ASSERT_FALSE(HasFailure()) << "operation " << op;
  }
  EXPECT_GT(num_refused, num_ops / 50);  // the pool does run out
  ReleaseAll();
}

// The life of a search: fork 8 candidates when they fit, decode, abort some, adopt one or undo,
// release. An evicting search copies at the fork and evicts the winner.
TEST_F(StoreFuzz, TwoThousandSearchesLeaveNothingBehind) {
  struct Search {
    SeqId root;
    bool evicts;
    int steps_left;
    std::vector<SeqId> candidates;
  };
  ModelledStore pool({.rows = 40, .head_dim = 8, .max_blocks = 5, .blocks = 150, .window = 4});
  std::vector<Search> running;
  int64_t num_started = 0, num_backed_off = 0, num_adopted = 0;
  const auto append = [&](SeqId seq, int64_t count) {
    const int64_t room = pool.shape().max_blocks * kBlockSlots - pool.store.MaxLaneLen(seq);
    try {
      pool.Append({seq}, {std::min(room, count)});
    } catch (const OutOfBlocks&) {
      ++num_backed_off;
      return false;
    }
    return true;
  };
  const auto abort_all = [&](Search& search) {
    for (const SeqId seq : search.candidates) pool.Release(seq);
    search.candidates.clear();
  };
  for (int64_t tick = 0; num_started < 2000 || !running.empty(); ++tick) {
    ASSERT_LT(tick, 1'000'000) << "the searches do not end";
    if (num_started < 2000 && pool.store.FreeRows() > 0 && running.size() < 5) {
      running.push_back(
          {pool.Create(), random.Chance(50), 1 + static_cast<int>(random.Below(4)), {}});
      ++num_started;
      append(running.back().root, 1 + random.Below(30));
    }
    const auto at = random.Below(static_cast<int64_t>(running.size()));
    Search& search = running[at];
    if (search.candidates.empty()) {
      try {
        search.candidates = pool.Fork(search.root, 8, search.evicts);
      } catch (const OutOfBlocks&) {  // back off: give up when it would wait forever
        ++num_backed_off;
        if (random.Chance(20)) search.steps_left = 0;
      }
    } else {
      for (size_t i = 0; i < search.candidates.size();) {
        if (random.Chance(15) || !append(search.candidates[i], random.Below(12))) {
          pool.Release(search.candidates[i]);
          search.candidates.erase(search.candidates.begin() + static_cast<int64_t>(i));
        } else {
          ++i;
        }
      }
      if (random.Chance(40) && !search.candidates.empty()) {
        const size_t best = random.Below(static_cast<int64_t>(search.candidates.size()));
        if (random.Chance(20)) {  // keep only a prefix of the step
          const SeqId seq = search.candidates[best];
          const int64_t added = pool.store.SeqLen(seq) - pool.store.SeqLen(search.root);
          pool.Truncate(seq, random.Below(added + 1));
        }
        pool.Adopt(search.root, search.candidates[best]);
        search.candidates.erase(search.candidates.begin() + static_cast<int64_t>(best));
        ++num_adopted;
        abort_all(search);
        --search.steps_left;
        if (search.evicts) {
          DropLists lists(1);
          for (const auto& lane : pool.sequences().at(search.root).lanes) {
            auto& list = lists[0].emplace_back();
            for (size_t slot = 0; slot < lane.size(); ++slot) {
              if (list.size() + 24 < lane.size() && random.Chance(70)) {
                list.push_back(static_cast<int32_t>(slot));
              }
            }
          }
          pool.Evict({search.root}, lists);
        }
      }
    }
    if (search.steps_left <= 0 || random.Chance(1)) {  // ends, or is aborted by its user
      abort_all(search);
      pool.Release(search.root);
      running.erase(running.begin() + at);
    } else {
      ASSERT_EQ(pool.Difference(search.root), "");
    }
    ASSERT_NO_THROW(pool.store.CheckIntegrity());
    if (tick % 16 == 0) {
      ASSERT_EQ(pool.Difference(), "");
    }
  }
  EXPECT_GT(num_backed_off, 1000);
  EXPECT_GT(num_adopted, 1000);
  EXPECT_EQ(pool.store.FreeBlocks(), pool.shape().blocks);
  EXPECT_EQ(pool.store.FreeRows(), pool.shape().rows);
}

}  // namespace
}  // namespace kvcore
