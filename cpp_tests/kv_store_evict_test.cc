// KvStore::Evict, CheckIntegrity and large storage.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <functional>
#include <random>
#include <set>

#include "support/store_model.h"

namespace kvcore {
namespace {

using Token = ModelledStore::Token;

void ExpectSound(const ModelledStore& m) {
  EXPECT_EQ(m.Difference(), "");
  EXPECT_NO_THROW(m.store.CheckIntegrity());
}

SeqId CreateWith(ModelledStore& m, int64_t num_tokens) {
  const SeqId seq = m.Create();
  m.Append({seq}, {num_tokens});
  return seq;
}

// Position and all numbers of one slot, read from the tensors.
std::vector<float> SlotOf(const ModelledStore& m, SeqId seq, int64_t lane, int64_t slot) {
  const int64_t lane_id = m.store.Row(seq) * m.num_lanes() + lane, dims = m.shape().head_dim;
  const auto block = static_cast<int64_t>(
      m.tensors.block_table.At(lane_id * m.shape().max_blocks + slot / kBlockSlots));
  const int64_t at = slot % kBlockSlots, start = block * BlockElements(dims);
  std::vector<float> numbers = {
      static_cast<float>(m.tensors.position.At(block * kBlockSlots + at))};
  for (int64_t d = 0; d < dims; ++d) {
    numbers.push_back(static_cast<float>(m.tensors.key_blocks.At(start + CpuKeyOffset(at, d))));
    numbers.push_back(
        static_cast<float>(m.tensors.value_blocks.At(start + RowMajorOffset(at, d, dims))));
  }
  return numbers;
}

std::vector<std::vector<float>> LaneOf(const ModelledStore& m, SeqId seq, int64_t lane) {
  std::vector<std::vector<float>> slots;
  const auto len =
      static_cast<int64_t>(m.tensors.lane_len.At(m.store.Row(seq) * m.num_lanes() + lane));
  for (int64_t slot = 0; slot < len; ++slot) slots.push_back(SlotOf(m, seq, lane, slot));
  return slots;
}

// The law of Evict on what one lane held before and holds after: the survivors are there and
// nothing else, each in the place it had or in that of a dropped slot.
void ExpectHolesFilled(const std::vector<std::vector<float>>& before,
                       const std::vector<std::vector<float>>& after,
                       const std::vector<int32_t>& drop) {
  const std::set<int64_t> dropped(drop.begin(), drop.end());
  ASSERT_EQ(after.size(), before.size() - dropped.size());
  std::multiset<std::vector<float>> kept;
  for (size_t slot = 0; slot < before.size(); ++slot) {
    if (!dropped.contains(slot)) kept.insert(before[slot]);
  }
  EXPECT_TRUE(kept == std::multiset<std::vector<float>>(after.begin(), after.end()));
  for (size_t slot = 0; slot < after.size(); ++slot) {
    if (!dropped.contains(slot)) {
      EXPECT_TRUE(after[slot] == before[slot]) << "slot " << slot << " moved";
    }
  }
}

class KvStoreEvict : public ::testing::TestWithParam<int64_t> {};

TEST_P(KvStoreEvict, HolesAreFilledAndNothingElseMoves) {
  const int64_t len = GetParam();
  std::mt19937 bits(static_cast<unsigned>(len));
  for (int round = 0; round < 12; ++round) {
    ModelledStore m({});
    const SeqId other = CreateWith(m, 19), seq = CreateWith(m, len);
    DropLists lists(1, std::vector<std::vector<int32_t>>(m.num_lanes()));
    int64_t total = 0, blocks_after = 0;
    std::vector<std::vector<std::vector<float>>> before;
    for (int64_t lane = 0; lane < m.num_lanes(); ++lane) {
      before.push_back(LaneOf(m, seq, lane));
      for (int32_t slot = 0; slot < len; ++slot) {
        // Lane 3 drops everything once; lane 0 keeps everything once.
        const unsigned share = round == 0 && lane == 3   ? 10
                               : round == 1 && lane == 0 ? 0
                                                         : bits() % 8;
        if (bits() % 10 < share) lists[0][lane].push_back(slot);
      }
      total += static_cast<int64_t>(lists[0][lane].size());
      blocks_after += BlocksFor(len - static_cast<int64_t>(lists[0][lane].size()));
    }
    const int64_t owned = m.store.FreeBlocks() + m.store.NumBlocks(seq);
    EXPECT_EQ(m.Evict({seq}, lists), total);
    EXPECT_EQ(m.store.SeqLen(seq), len);
    EXPECT_EQ(m.store.NumBlocks(seq), blocks_after);
    EXPECT_EQ(m.store.FreeBlocks(), owned - blocks_after);
    for (int64_t lane = 0; lane < m.num_lanes(); ++lane) {
      ExpectHolesFilled(before[lane], LaneOf(m, seq, lane), lists[0][lane]);
    }
    ExpectSound(m);
    m.Append({other, seq}, {3, 3});
    ExpectSound(m);
  }
}

INSTANTIATE_TEST_SUITE_P(Lengths, KvStoreEvict,
                         ::testing::Values(0, 1, 2, 15, 16, 17, 32, 33, 48, 90));

TEST(KvStoreEvict, ListsGoWithThePlaceInSeqs) {
  ModelledStore m({});
  const SeqId a = CreateWith(m, 20), b = CreateWith(m, 4);
  m.Evict({b, a}, {{{3}, {}, {0, 1}, {}}, {{}, {19}, {7}, {17, 18}}});
  EXPECT_EQ(m.store.TotalSlots(a), 76);
  EXPECT_EQ(m.store.TotalSlots(b), 13);
  ExpectSound(m);
}

TEST(KvStoreEvict, OneOutOneInKeepsTheSameBlocksForever) {
  ModelledStore m({.max_blocks = 2, .blocks = 8});
  const SeqId seq = CreateWith(m, 31);
  std::mt19937 bits(5);
  for (int i = 0; i < 200; ++i) {
    m.Append({seq}, {1});
    DropLists lists(1);
    for (int lane = 0; lane < 4; ++lane) lists[0].push_back({static_cast<int32_t>(bits() % 32)});
    EXPECT_EQ(m.Evict({seq}, lists), 4);
    ASSERT_EQ(m.Difference(), "");
  }
  EXPECT_EQ(m.store.SeqLen(seq), 231);
  ExpectSound(m);
}

// ---- with shared blocks

TEST(KvStoreEvict, OnlyBlocksThatAMoveWritesAreCopied) {
  ModelledStore m({});
  const SeqId parent = CreateWith(m, 48);
  const SeqId child = m.Fork(parent, 1, false)[0];
  int64_t free = m.store.FreeBlocks();
  m.Evict({child}, {{{46, 47}, {}, {}, {}}});  // nothing moves
  EXPECT_EQ(m.store.FreeBlocks(), free);
  m.Evict({child}, {{{}, {0, 3}, {}, {}}});  // both holes lie in one block
  EXPECT_EQ(m.store.FreeBlocks(), free - 1);
  m.Evict({child}, {{{}, {}, {1, 20}, {}}});
  EXPECT_EQ(m.store.FreeBlocks(), free - 3);
  ExpectSound(m);
  m.Append({child, parent}, {1, 1});
  ExpectSound(m);
}

TEST(KvStoreEvict, OwnersOfOneBlockMayEvictTogether) {
  ModelledStore m({.blocks = 4 * 2 + 2 * 4});  // the last of three owners keeps the block
  const SeqId parent = CreateWith(m, 32);
  const auto children = m.Fork(parent, 2, false);
  m.Evict({children[1], parent, children[0]},
          {{{0}, {1}, {2}, {3}}, {{0, 5}, {1, 6}, {2, 31}, {3}}, {{15}, {14}, {13}, {0}}});
  EXPECT_EQ(m.store.FreeBlocks(), 0);
  ExpectSound(m);
}

TEST(KvStoreEvict, ABlockWithSeveralHolesIsCopiedOnce) {
  ModelledStore m({.blocks = 4 * 2 + 1});
  const SeqId parent = CreateWith(m, 32);
  const auto children = m.Fork(parent, 2, false);
  m.Evict({children[0]}, {{{}, {0, 3, 9}, {}, {}}});
  EXPECT_EQ(m.store.FreeBlocks(), 0);
  ExpectSound(m);
}

TEST(KvStoreEvict, CopiesThatDoNotFitChangeNothing) {
  ModelledStore m({.blocks = 4 * 2 + 3});
  const SeqId parent = CreateWith(m, 32);
  const SeqId child = m.Fork(parent, 1, false)[0];
  const std::vector<uint8_t> before = m.tensors.Snapshot();
  try {
    m.Evict({child}, {{{0}, {1}, {2}, {3}}});
    ADD_FAILURE() << "nothing thrown";
  } catch (const OutOfBlocks& e) {
    EXPECT_STREQ(e.what(), "Evict: needs 4 blocks, 3 of 11 are free");
  }
  EXPECT_TRUE(m.tensors.Snapshot() == before);
  ExpectSound(m);
  m.Evict({child}, {{{0}, {1}, {2}, {}}});
  ExpectSound(m);
}

// ---- bad input

TEST(KvStoreEvict, BadListsAreRefusedBeforeAnythingChanges) {
  ModelledStore m({});
  const SeqId a = CreateWith(m, 20), b = CreateWith(m, 4);
  m.Fork(a, 1, false);
  const std::vector<uint8_t> before = m.tensors.Snapshot();
  const auto refused = [&](const std::string& text, const std::vector<SeqId>& seqs,
                           const OwnedTensor& drop, const OwnedTensor& count) {
    try {
      m.store.Evict(seqs, drop.view(), count.view());
      ADD_FAILURE() << "nothing thrown, expected: " << text;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
    EXPECT_TRUE(m.tensors.Snapshot() == before) << text;
    m.store.CheckIntegrity();
  };
  // Two sequences, all lanes drop slot 0; then one list is spoiled.
  const auto spoiled = [&](const std::string& text, int32_t count, std::vector<int32_t> list) {
    OwnedTensor drop(DType::kI32, {2, 2, 2, 3}), counts(DType::kI32, {2, 2, 2});
    counts.Fill(1);
    counts.Set({1, 1, 0}, count);
    for (size_t k = 0; k < list.size(); ++k) {
      drop.Set({1, 1, 0, static_cast<int64_t>(k)}, list[k]);
    }
    refused(text, {a, b}, drop, counts);
  };
  spoiled("drop_count: lane 2 of sequence 1: expected 0 to 3", -1, {});
  spoiled("(length 4, max_drop 3), got 4", 4, {0, 1, 2});
  spoiled("expected ascending slots below 4, got 4 at index 1 after 0", 2, {0, 4});
  spoiled("got -1 at index 0", 1, {-1});
  spoiled("got 2 at index 1 after 2", 2, {2, 2});
  spoiled("got 1 at index 2 after 3", 3, {2, 3, 1});

  const OwnedTensor drop(DType::kI32, {1, 2, 2, 3}), counts(DType::kI32, {1, 2, 2});
  refused("drop: expected", {a, b}, drop, counts);
  refused("drop_count: expected", {a}, drop, OwnedTensor(DType::kI32, {1, 2, 3}));
  refused("dtype", {a}, OwnedTensor(DType::kI64, {1, 2, 2, 3}), counts);
  const OwnedTensor two(DType::kI32, {2, 2, 2, 3}), two_counts(DType::kI32, {2, 2, 2});
  refused("seqs: expected each sequence once", {a, a}, two, two_counts);
  EXPECT_EQ(m.store.Evict({a, b}, two.view(), two_counts.view()), 0);
  EXPECT_EQ(m.Evict({}, {}), 0);
}

TEST(KvStoreEvict, ALaneShorterThanMaxDropIsTheLimit) {
  ModelledStore m({});
  const SeqId seq = CreateWith(m, 2);
  OwnedTensor drop(DType::kI32, {1, 2, 2, 8}), counts(DType::kI32, {1, 2, 2});
  counts.Set({0, 0, 0}, 3);
  EXPECT_THROW(m.store.Evict({seq}, drop.view(), counts.view()), Error);
}

// ---- integrity

TEST(KvStoreIntegrity, ForeignWritesAreFound) {
  ModelledStore m({.rows = 3});
  const SeqId seq = CreateWith(m, 20);
  const int64_t row = m.store.Row(seq), free_row = 2;
  const auto found = [&](OwnedTensor& tensor, std::initializer_list<int64_t> index, double value) {
    const double old = tensor.Get(index);
    tensor.Set(index, value);
    EXPECT_THROW(m.store.CheckIntegrity(), InternalError);
    tensor.Set(index, old);
    EXPECT_NO_THROW(m.store.CheckIntegrity());
  };
  found(m.tensors.block_table, {row, 1, 1, 1}, m.tensors.block_table.Get({row, 0, 0, 0}));
  found(m.tensors.block_table, {row, 0, 0, 0}, kUnusedTableEntry);
  found(m.tensors.block_table, {row, 0, 0, 0}, -1);
  found(m.tensors.lane_len, {row, 0, 1}, 16);
  found(m.tensors.lane_len, {row, 0, 1}, -1);
  found(m.tensors.lane_len, {row, 0, 1}, 21);
  found(m.tensors.lane_len, {free_row, 0, 1}, 1);
  found(m.tensors.seq_len, {free_row}, 1);
}

TEST(KvStoreIntegrity, AViewThatDoesNotFitTogetherIsRefused) {
  const CacheTensors tensors({});
  KvCacheView view = tensors.view();
  view.head_dim = 16;
  EXPECT_THROW(KvStore store(view), Error);
}

// ---- 64-bit offsets

// Address space without memory behind it until a page is touched.
class Sparse {
 public:
  explicit Sparse(int64_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~Sparse() {
    if (ok()) munmap(data_, bytes_);
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  TensorView View(DType dtype, std::initializer_list<int64_t> shape) const {
    return MakeView(data_, dtype, shape);
  }

 private:
  int64_t bytes_;
  void* data_;
};

TEST(KvStoreLarge, ElementOffsetsMayPassTwoToThe31) {
  constexpr int64_t kHeadDim = 256, kFirst = (int64_t{1} << 31) / BlockElements(kHeadDim);
  constexpr int64_t kBlocks = kFirst + 8;
  const Sparse keys(kBlocks * BlockElements(kHeadDim) * 2),
      values(kBlocks * BlockElements(kHeadDim) * 2), positions(kBlocks * kBlockSlots * 4);
  if (!keys.ok() || !values.ok() || !positions.ok()) GTEST_SKIP() << "no address space";
  OwnedTensor table(DType::kI32, {3, 1, 1, kFirst}), lane_len(DType::kI32, {3, 1, 1}),
      seq_len(DType::kI32, {3});
  KvCacheView view;
  view.key_blocks = keys.View(DType::kBF16, {kBlocks, BlockElements(kHeadDim)});
  view.value_blocks = values.View(DType::kBF16, {kBlocks, BlockElements(kHeadDim)});
  view.position = positions.View(DType::kI32, {kBlocks, kBlockSlots});
  view.block_table = table.view();
  view.lane_len = lane_len.view();
  view.seq_len = seq_len.view();
  view.head_dim = kHeadDim;
  KvStore store(view);
  const SeqId filler = store.Create(), seq = store.Create();
  store.Extend({filler}, {kFirst * kBlockSlots});  // all blocks below 2^31 elements

  constexpr int64_t kTokens = 18;
  store.Extend({seq}, {kTokens});
  OwnedTensor rows(DType::kI32, {1}), cu(DType::kI32, {2}), at(DType::kI64, {kTokens});
  FillBatch(store, {seq}, {kTokens}, rows.view(), cu.view(), at.view());
  OwnedTensor key(DType::kBF16, {kTokens, 1, kHeadDim}), value = key;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t d = 0; d < kHeadDim; ++d) {
      key.Set({t, 0, d}, static_cast<double>(t + 1));
      value.Set({t, 0, d}, static_cast<double>(100 + t));
    }
  }
  AppendKvParams p;
  p.key = key.view();
  p.value = value.view();
  p.batch = {rows.view(), cu.view()};
  GetOps(Device::kCpu).append_kv(view, p, 0);
  const SeqId child = store.Fork(seq, 1, true)[0];
  OwnedTensor drop(DType::kI32, {1, 1, 1, 1}), count(DType::kI32, {1, 1, 1});
  drop.SetAt(0, 2);
  count.SetAt(0, 1);
  store.Evict({child}, drop.view(), count.view());

  const auto expect = [&](SeqId id, int64_t slot, float token) {
    const auto block = static_cast<int64_t>(table.Get({store.Row(id), 0, 0, slot / kBlockSlots}));
    ASSERT_GE(block * BlockElements(kHeadDim), int64_t{1} << 31);
    const auto* k = view.key_blocks.ptr<BFloat16>() + block * BlockElements(kHeadDim);
    const auto* v = view.value_blocks.ptr<BFloat16>() + block * BlockElements(kHeadDim);
    const int64_t s = slot % kBlockSlots;
    EXPECT_EQ(view.position.ptr<int32_t>()[block * kBlockSlots + s], static_cast<int32_t>(token));
    EXPECT_EQ(ToFloat(k[CpuKeyOffset(s, kHeadDim - 1)]), token + 1);
    EXPECT_EQ(ToFloat(v[RowMajorOffset(s, kHeadDim - 1, kHeadDim)]), token + 100);
  };
  for (const int64_t slot : {0, 2, 15, 16, 17}) expect(seq, slot, static_cast<float>(slot));
  for (const int64_t slot : {0, 15, 16}) expect(child, slot, static_cast<float>(slot));
  expect(child, 2, 17);
  store.CheckIntegrity();
}

TEST(KvStoreLarge, TableOffsetsMayPassTwoToThe31) {
  constexpr int64_t kRows = 80, kLayers = 4, kHeads = 8, kMaxBlocks = int64_t{1} << 20;
  const Sparse table(kRows * kLayers * kHeads * kMaxBlocks * 4);
  if (!table.ok()) GTEST_SKIP() << "no address space";
  CacheTensors tensors({.rows = kRows,
                        .layers = kLayers,
                        .kv_heads = kHeads,
                        .q_heads = kHeads,
                        .max_blocks = 1,
                        .blocks = 80,
                        .window = 0});
  KvCacheView view = tensors.view();
  view.block_table = table.View(DType::kI32, {kRows, kLayers, kHeads, kMaxBlocks});
  KvStore store(view);
  SeqId last = 0;
  while (store.FreeRows() > 0) last = store.Create();
  const int64_t lane_id = store.Row(last) * kLayers * kHeads + kLayers * kHeads - 1;
  ASSERT_GE(lane_id * kMaxBlocks, int64_t{1} << 31);
  store.Extend({last}, {17});
  const int32_t* entries = view.block_table.ptr<int32_t>() + lane_id * kMaxBlocks;
  EXPECT_EQ(entries[0] / 2, 31);
  EXPECT_EQ(entries[1], entries[0] + 1);
  store.CheckIntegrity();
}

}  // namespace
}  // namespace kvcore
