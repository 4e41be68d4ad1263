// Lanes whose next token overwrites a slot: they do not grow, forks own what they write, and what
// cannot be undone says so.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "base/check.h"
#include "store/kv_store.h"
#include "support/cache_tensors.h"

namespace kvcore {
namespace {

constexpr int64_t kHeads = 2, kDim = 8, kBlocks = 40, kRows = 4, kMaxBlocks = 4;

class KvStoreReplaceTest : public testing::Test {
 protected:
  KvStoreReplaceTest()
      : tensors_({.rows = kRows,
                  .layers = 1,
                  .kv_heads = kHeads,
                  .q_heads = kHeads,
                  .head_dim = kDim,
                  .max_blocks = kMaxBlocks,
                  .blocks = kBlocks,
                  .window = 0,
                  .replaces = true}) {
    store_ = std::make_unique<KvStore>(tensors_.view());
  }
  ~KvStoreReplaceTest() override { store_->CheckIntegrity(); }

  int64_t Len(SeqId seq, int64_t head) const {
    return static_cast<int64_t>(tensors_.lane_len.Get({store_->Row(seq), 0, head}));
  }
  int64_t Replaced(SeqId seq, int64_t head) const {
    return static_cast<int64_t>(tensors_.replace.Get({store_->Row(seq), 0, head}));
  }
  void Replace(SeqId seq, int64_t head, int64_t slot) {
    tensors_.replace.Set({store_->Row(seq), 0, head}, static_cast<double>(slot));
  }
  int32_t Block(SeqId seq, int64_t head, int64_t i) const {
    return static_cast<int32_t>(tensors_.block_table.Get({store_->Row(seq), 0, head, i}));
  }

  CacheTensors tensors_;
  std::unique_ptr<KvStore> store_;
};

TEST_F(KvStoreReplaceTest, OnlyLanesWithoutASlotGrowByASingleToken) {
  const SeqId seq = store_->Create();
  store_->Extend({seq}, {32});
  Replace(seq, 0, 5);
  const int64_t free = store_->FreeBlocks();
  EXPECT_EQ(store_->BlocksToExtend({seq}, {1}), 1);
  store_->Extend({seq}, {1});
  EXPECT_EQ(Len(seq, 0), 32);
  EXPECT_EQ(Len(seq, 1), 33);
  EXPECT_EQ(store_->SeqLen(seq), 33);
  EXPECT_EQ(store_->FreeBlocks(), free - 1);
  EXPECT_EQ(store_->NumReplaced(seq), 1);
}

TEST_F(KvStoreReplaceTest, AFullTableIsNoLimitToLanesThatDoNotGrow) {
  const SeqId seq = store_->Create();
  store_->Extend({seq}, {kMaxBlocks * 16});
  EXPECT_THROW(store_->Extend({seq}, {1}), Error);
  Replace(seq, 0, 0);
  EXPECT_THROW(store_->Extend({seq}, {1}), Error);  // head 1 has no room
  Replace(seq, 1, 63);
  for (int i = 0; i < 5; ++i) store_->Extend({seq}, {1});
  EXPECT_EQ(Len(seq, 0), kMaxBlocks * 16);
  EXPECT_EQ(store_->SeqLen(seq), kMaxBlocks * 16 + 5);
}

TEST_F(KvStoreReplaceTest, SeveralTokensAreAppendedAndForgetTheSlot) {
  const SeqId seq = store_->Create();
  store_->Extend({seq}, {20});
  Replace(seq, 0, 3);
  Replace(seq, 1, 4);
  store_->Extend({seq}, {2});
  for (int64_t h = 0; h < kHeads; ++h) {
    EXPECT_EQ(Len(seq, h), 22);
    EXPECT_EQ(Replaced(seq, h), -1);
  }
  EXPECT_EQ(store_->NumReplaced(seq), 0);
  store_->Truncate(seq, 2);
  EXPECT_EQ(Len(seq, 0), 20);
}

TEST_F(KvStoreReplaceTest, WhatOverwroteASlotCannotBeUndone) {
  const SeqId seq = store_->Create();
  store_->Extend({seq}, {20});
  Replace(seq, 0, 3);
  Replace(seq, 1, 3);
  store_->Extend({seq}, {1});
  EXPECT_THROW(store_->Truncate(seq, 1), Error);
  EXPECT_EQ(store_->SeqLen(seq), 21);
  store_->Truncate(seq, 0);
}

TEST_F(KvStoreReplaceTest, ASharedBlockIsCopiedBeforeASlotOfItIsOverwritten) {
  const SeqId seq = store_->Create();
  store_->Extend({seq}, {32});
  Replace(seq, 0, 5);
  Replace(seq, 1, 20);
  const SeqId child = store_->Fork(seq, 1, /*copy=*/false)[0];
  EXPECT_EQ(Replaced(child, 0), 5);
  EXPECT_EQ(Replaced(child, 1), 20);
  EXPECT_EQ(Block(child, 0, 0), Block(seq, 0, 0));
  EXPECT_EQ(store_->BlocksToExtend({child}, {1}), 2);
  store_->Extend({child}, {1});
  EXPECT_NE(Block(child, 0, 0), Block(seq, 0, 0));
  EXPECT_EQ(Block(child, 0, 1), Block(seq, 0, 1));
  EXPECT_EQ(Block(child, 1, 0), Block(seq, 1, 0));
  EXPECT_NE(Block(child, 1, 1), Block(seq, 1, 1));
}

TEST_F(KvStoreReplaceTest, EvictionAndANewOwnerOfTheRowForgetTheSlot) {
  const SeqId seq = store_->Create();
  store_->Extend({seq}, {20});
  Replace(seq, 0, 3);
  OwnedTensor drop(DType::kI32, {1, 1, kHeads, 1}), count(DType::kI32, {1, 1, kHeads});
  count.Fill(1);
  drop.Fill(2);
  store_->Evict({seq}, drop.view(), count.view());
  EXPECT_EQ(Replaced(seq, 0), -1);
  Replace(seq, 0, 3);
  const int64_t row = store_->Row(seq);
  store_->Release(seq);
  const SeqId next = store_->Create();
  ASSERT_EQ(store_->Row(next), row);
  EXPECT_EQ(Replaced(next, 0), -1);
}

TEST_F(KvStoreReplaceTest, AnElectionNamesLiveSlotsOrIsRefusedAsAWhole) {
  const SeqId a = store_->Create(), b = store_->Create();
  store_->Extend({a, b}, {20, 4});
  OwnedTensor slots(DType::kI32, {2, 1, kHeads});
  const auto elect = [&](std::vector<int32_t> values) -> std::string {
    for (size_t i = 0; i < values.size(); ++i) slots.SetAt(static_cast<int64_t>(i), values[i]);
    try {
      store_->Elect({b, a}, slots.view());
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(elect({3, kNoReplace, 19, 0}), "");
  EXPECT_EQ(Replaced(b, 0), 3);
  EXPECT_EQ(Replaced(b, 1), kNoReplace);
  EXPECT_EQ(Replaced(a, 0), 19);
  EXPECT_EQ(Replaced(a, 1), 0);
  const std::string name = "row " + std::to_string(store_->Row(b)) + ", layer 0, kv head 1, got ";
  EXPECT_NE(elect({1, 4, 1, 1}).find(name + "4"), std::string::npos);
  EXPECT_NE(elect({1, kNotFinite, 1, 1}).find(name + "-2"), std::string::npos);
  EXPECT_EQ(Replaced(b, 0), 3);
  EXPECT_EQ(Replaced(a, 0), 19);
  EXPECT_THROW(store_->Elect({a}, slots.view()), Error);
  EXPECT_THROW(store_->Elect({a, a}, slots.view()), Error);
}

TEST(KvStoreElect, IsForCachesThatReplaceAndWhoseAttentionDoesNotElect) {
  for (const bool replaces : {false, true}) {
    const CacheTensors tensors({.replaces = replaces, .states = replaces ? 3 : 0});
    KvStore store(tensors.view());
    const SeqId seq = store.Create();
    store.Extend({seq}, {5});
    OwnedTensor slots(DType::kI32, {1, 2, 2});
    EXPECT_THROW(store.Elect({seq}, slots.view()), Error);
  }
}

}  // namespace
}  // namespace kvcore
