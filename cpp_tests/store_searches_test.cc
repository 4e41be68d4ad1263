// Many searches over one small pool.
#include <gtest/gtest.h>

#include <vector>

#include "base/parallel.h"
#include "support/store_model.h"
#include "support/store_random.h"

namespace kvcore {
namespace {

// The life of a search: fork 8 candidates when they fit, decode, abort some, adopt one or undo,
// release. An evicting search copies at the fork and evicts the winner.
TEST(StoreSearches, TwoThousandLeaveNothingBehind) {
  SetNumThreads(1);
  Random random(20240817);
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
