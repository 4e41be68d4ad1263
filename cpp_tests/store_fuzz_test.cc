// Random use of a store, compared with the model: legal changes, ones that are refused, and ones in
// which an operation or an allocation throws. Whatever came before, nobody sees another's write,
// and what did not happen has changed nothing. KVCORE_FUZZ_OPS overrides the number of operations
// of all runs together.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <set>

#include "base/parallel.h"
#include "support/store_model.h"
#include "support/store_random.h"

namespace kvcore {
namespace {

int64_t NumOps() {
  const char* text = std::getenv("KVCORE_FUZZ_OPS");
  return text != nullptr ? std::atoll(text) : 1'000'000;
}

struct Kind {
  const char* name;
  bool replaces;
  bool has_planes;
  int64_t states;
};

constexpr Kind kKinds[] = {{"Plain", false, false, 0},
                           {"Replacing", true, false, 0},
                           {"WithPlanes", true, true, 0},
                           {"WithStates", true, false, 9}};
constexpr int64_t kNumKinds = std::size(kKinds);

class StoreFuzz : public ::testing::TestWithParam<Kind> {
 protected:
  static std::vector<PlaneShape> Planes() {
    return {{"wide", DType::kF32, 3}, {"half", DType::kBF16, 1}, {"byte", DType::kU8, 2}};
  }
  static CacheShape Shape() {
    return {.rows = 10,
            .head_dim = 8,
            .max_blocks = 5,
            .blocks = 56,
            .window = 4,
            .replaces = GetParam().replaces,
            .states = GetParam().states,
            .planes = GetParam().has_planes ? Planes() : std::vector<PlaneShape>()};
  }
  StoreFuzz() : m(Shape()), random(20240817) { SetNumThreads(1); }

  std::vector<SeqId> Live() const {
    std::vector<SeqId> seqs;
    for (const auto& [seq, unused] : m.sequences()) seqs.push_back(seq);
    return seqs;
  }

  // Runs `change`, which must take exactly `blocks` from the pool, or throw OutOfBlocks and leave
  // every byte alone when it has fewer. When something else in it throws, it has changed nothing.
  template <typename Change>
  bool Take(int64_t blocks, bool enough_rows, Change change) {
    const int64_t free = m.store.FreeBlocks(), free_rows = m.store.FreeRows();
    const bool fits = blocks <= free && enough_rows;
    if (!fits) m.tensors.SnapshotInto(&before);
    bool done = false;
    try {
      change();
      done = true;
      EXPECT_TRUE(fits);
    } catch (const OutOfBlocks&) {
      EXPECT_FALSE(fits);
      ++num_refused;
    } catch (const InjectedThrow&) {
      ++num_thrown;
    }
    EXPECT_TRUE(fits || m.tensors.Equals(before));
    EXPECT_EQ(m.store.FreeBlocks(), free - (done ? blocks : 0));
    EXPECT_TRUE(done || m.store.FreeRows() == free_rows);
    return done;
  }

  // `change` is refused and leaves every byte alone.
  template <typename Change>
  void ExpectRefused(Change change) {
    m.tensors.SnapshotInto(&before);
    try {
      change();
      ADD_FAILURE() << "nothing thrown";
    } catch (const Error&) {
      ++num_invalid;
    } catch (const InjectedThrow&) {
      ++num_thrown;
    }
    EXPECT_TRUE(m.tensors.Equals(before));
  }

  // Elects slots for some lanes: mostly some that are there, sometimes past the end or absurd.
  void Elect(SeqId seq) {
    const auto& lanes = m.sequences().at(seq).lanes;
    const int percent = random.Chance(50) ? 100 : 40;
    for (size_t lane = 0; lane < lanes.size(); ++lane) {
      const auto len = static_cast<int32_t>(lanes[lane].size());
      if (!random.Chance(percent)) continue;
      const auto& states = m.sequences().at(seq).states;
      if (!states.empty() && states[lane] == 0) continue;  // append_kv refuses it
      const int32_t absurd[] = {len, len + 1, 1 << 20, 0x7fffffff, -7};
      const bool sane = len > 0 && random.Chance(97);
      m.Elect(seq, static_cast<int64_t>(lane),
              static_cast<int32_t>(sane ? random.Below(len) : absurd[random.Below(5)]));
    }
  }

  void TakeStates(const std::vector<SeqId>& seqs) {
    constexpr int64_t kFull = 9;
    int64_t needed = 0;
    for (const SeqId seq : seqs) {
      const auto& s = m.sequences().at(seq);
      for (size_t lane = 0; lane < s.lanes.size(); ++lane) {
        needed += static_cast<int64_t>(s.lanes[lane].size()) >= kFull && s.states[lane] == 0;
      }
    }
    Take(0, needed <= m.store.FreeStates(), [&] { m.TakeStates(seqs, kFull); });
  }

  // The next single token of the sequence would overwrite a slot that is not there.
  bool HasStaleSlot(SeqId seq) const {
    const auto& s = m.sequences().at(seq);
    for (size_t lane = 0; lane < s.replace.size(); ++lane) {
      if (s.replace[lane] >= static_cast<int64_t>(s.lanes[lane].size())) return true;
    }
    return false;
  }

  bool Append(const std::vector<SeqId>& seqs, const std::vector<int64_t>& counts) {
    for (size_t i = 0; i < seqs.size(); ++i) {
      if (counts[i] != 1 || !HasStaleSlot(seqs[i])) continue;
      ExpectRefused([&] { m.store.BlocksToExtend(seqs, counts); });
      ExpectRefused([&] { m.Append(seqs, counts); });
      if (random.Chance(70)) m.ForgetReplace(seqs[i]);
      return false;
    }
    return Take(m.store.BlocksToExtend(seqs, counts), true, [&] { m.Append(seqs, counts); });
  }

  std::vector<SeqId> Fork(SeqId parent, int64_t count, bool copy) {
    std::vector<SeqId> children;
    const auto& s = m.sequences().at(parent);
    int64_t states = 0;
    for (size_t lane = 0; lane < s.states.size(); ++lane) {
      states += s.states[lane] != 0 && s.replace[lane] >= 0;
    }
    const bool enough = count <= m.store.FreeRows() && states * count <= m.store.FreeStates();
    Take(m.store.BlocksToFork(parent, count, copy), enough,
         [&] { children = m.Fork(parent, count, copy); });
    return children;
  }

  void Evict(const std::vector<SeqId>& seqs) {
    DropLists lists;
    for (const SeqId seq : seqs) {
      auto& lanes = lists.emplace_back();
      const int64_t style = random.Below(4);
      const bool nothing = random.Chance(10);  // of this sequence
      for (const auto& lane : m.sequences().at(seq).lanes) {
        auto& list = lanes.emplace_back();
        const auto len = static_cast<int32_t>(lane.size());
        // One slot (steady eviction), a random share, the tail only, or a few from the front half.
        if (len == 0 || nothing) continue;
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
    if (!fits) m.tensors.SnapshotInto(&before);
    const int64_t free = m.store.FreeBlocks();
    try {
      m.Evict(seqs, lists);
      EXPECT_TRUE(fits);
    } catch (const OutOfBlocks&) {
      EXPECT_FALSE(fits);
      EXPECT_TRUE(m.tensors.Equals(before));
      ++num_refused;
    } catch (const InjectedThrow&) {
      EXPECT_EQ(m.store.FreeBlocks(), free);
      ++num_thrown;
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
    EXPECT_EQ(m.store.FreeStates(), m.shape().states);
    m.store.CheckIntegrity();
  }

  // What fails in the next change: mostly nothing.
  Failures SomeFailures() {
    Failures failures;
    if (random.Chance(95)) return failures;
    if (random.Chance(50)) failures.op = random.Below(2);
    if (random.Chance(60)) failures.allocation = random.Below(12);
    return failures;
  }

  // One random change; returns the sequences that it touched and that still live.
  std::vector<SeqId> Change() {
    const std::vector<SeqId> live = Live();
    const int64_t what = random.Below(100);
    if (live.empty() || what < 5) {
      Take(0, m.store.FreeRows() > 0, [&] { m.Create(); });
      return {};
    }
    const std::vector<SeqId> some = random.Pick(live, 1 + random.Below(3));
    const SeqId seq = some[0];
    if (what < 45) {
      std::vector<int64_t> counts;
      for (const SeqId s : some) {
        if (m.shape().replaces && random.Chance(60)) Elect(s);
        const int64_t room = m.shape().max_blocks * kBlockSlots - m.store.MaxLaneLen(s);
        const int64_t wanted = random.Chance(30) ? 1 : random.Below(random.Chance(20) ? 40 : 6);
        counts.push_back(std::min(room, wanted));
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
      const int64_t undoable = m.sequences().at(seq).undoable;
      m.Truncate(seq, random.Below(undoable + 1));
      ExpectRefused([&] { m.Truncate(seq, m.sequences().at(seq).undoable + 1); });
      return {seq};
    }
    if (what < 95) {
      if (GetParam().has_planes) m.WritePlanes(seq);
      if (m.shape().states > 0) TakeStates(some);
      if (m.shape().replaces && random.Chance(50)) m.ForgetReplace(seq);
      return {seq};
    }
    if (what < 99) {
      m.Release(seq);
      return {};
    }
    const SeqId dead = seq + 1'000'000'000;
    ExpectRefused([&] { m.store.Extend({seq, dead}, {1, 1}); });
    ExpectRefused([&] { m.store.Extend({seq, seq}, {1, 1}); });
    ExpectRefused([&] { m.store.Extend({seq}, {-1}); });
    ExpectRefused([&] { m.store.Extend({seq}, {m.shape().max_blocks * kBlockSlots + 1}); });
    ExpectRefused([&] { m.store.Fork(seq, -1, false); });
    ExpectRefused([&] { m.store.Adopt(seq, dead); });
    ExpectRefused([&] { m.store.Adopt(seq, seq); });
    ExpectRefused([&] { m.store.Release(dead); });
    ExpectRefused([&] { m.store.ForgetReplace(dead); });
    ExpectRefused([&] { m.Evict({seq}, {{{-1}, {}, {}, {}}}); });
    ExpectRefused([&] { m.Evict({seq}, {{{}, {}, {}, {1, 0}}}); });
    return {seq};
  }

  ModelledStore m;
  Random random;
  std::vector<uint8_t> before;  // a change
  int64_t num_refused = 0, num_invalid = 0, num_thrown = 0;
};

TEST_P(StoreFuzz, RandomOperationsAgreeWithTheModel) {
  const int64_t num_ops = NumOps() / kNumKinds;
  for (int64_t op = 0; op < num_ops; ++op) {
    m.failures = SomeFailures();
    const bool fails = m.failures.op >= 0 || m.failures.allocation >= 0;
    const int64_t thrown = num_thrown;
    for (const SeqId seq : Change()) ASSERT_EQ(m.Difference(seq), "") << "operation " << op;
    m.failures = {};
    ASSERT_TRUE(fails || num_thrown == thrown) << "operation " << op;
    ASSERT_NO_THROW(m.store.CheckIntegrity()) << "operation " << op;
    if (op % 16 == 0 || num_thrown > thrown) {  // also those that nobody touched
      ASSERT_EQ(m.Difference(), "") << "operation " << op;
    }
    if (op % 5000 == 4999) ReleaseAll();
    ASSERT_FALSE(HasFailure()) << "operation " << op;
  }
  EXPECT_GT(num_refused, num_ops / 60);  // the pool does run out
  EXPECT_GT(num_invalid, num_ops / 20);
  EXPECT_GT(num_thrown, num_ops / 200);
  ReleaseAll();
}

// With attention statistics forks never share, without they do.
INSTANTIATE_TEST_SUITE_P(Kinds, StoreFuzz, ::testing::ValuesIn(kKinds),
                         [](const auto& kind) { return kind.param.name; });

}  // namespace
}  // namespace kvcore
