#include "store/block_pool.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "base/check.h"

namespace kvcore {
namespace {

TEST(BlockPool, EveryBlockIsHandedOutOnce) {
  BlockPool pool(5);
  EXPECT_EQ(pool.num_blocks(), 5);
  std::set<int32_t> blocks;
  for (int i = 0; i < 5; ++i) blocks.insert(pool.Allocate());
  EXPECT_EQ(blocks, (std::set<int32_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(pool.num_free(), 0);
  EXPECT_THROW(pool.Allocate(), InternalError);
  pool.CheckIntegrity({1, 1, 1, 1, 1});
}

TEST(BlockPool, TheLastOwnerFreesTheBlock) {
  BlockPool pool(2);
  const int32_t block = pool.Allocate();
  pool.Share(block);
  pool.Share(block);
  EXPECT_EQ(pool.ref_count(block), 3);
  pool.Release(block);
  pool.Release(block);
  EXPECT_EQ(pool.num_free(), 1);
  pool.Release(block);
  EXPECT_EQ(pool.num_free(), 2);
  EXPECT_EQ(pool.ref_count(block), 0);
  pool.CheckIntegrity({0, 0});
}

TEST(BlockPool, TheBlockFreedLastIsTakenFirst) {
  BlockPool pool(4);
  const int32_t first = pool.Allocate();
  pool.Allocate();
  pool.Release(first);
  EXPECT_EQ(pool.Allocate(), first);
}

TEST(BlockPool, FreeBlocksCannotBeSharedOrReleased) {
  BlockPool pool(2);
  const int32_t block = pool.Allocate();
  pool.Release(block);
  for (const int32_t id : {block, 1, 2, -1}) {
    EXPECT_THROW(pool.Share(id), InternalError) << id;
    EXPECT_THROW(pool.Release(id), InternalError) << id;
  }
  EXPECT_EQ(pool.num_free(), 2);
  pool.CheckIntegrity({0, 0});
}

TEST(BlockPool, IntegrityNamesTheFirstBlockThatDisagrees) {
  BlockPool pool(3);
  pool.Share(pool.Allocate());
  pool.Allocate();
  pool.CheckIntegrity({2, 1, 0});
  EXPECT_THROW(pool.CheckIntegrity({2, 1}), InternalError);
  EXPECT_THROW(pool.CheckIntegrity({2, 0, 0}), InternalError);
  try {
    pool.CheckIntegrity({2, 2, 1});
    ADD_FAILURE() << "nothing thrown";
  } catch (const InternalError& e) {
    EXPECT_NE(std::string(e.what()).find("block 1: counted 1 owners, found 2"), std::string::npos)
        << e.what();
  }
}

TEST(BlockPool, SizeIsChecked) {
  EXPECT_EQ(BlockPool(0).num_free(), 0);
  EXPECT_THROW(BlockPool(-1), Error);
  EXPECT_THROW(BlockPool(int64_t{1} << 31), Error);
}

}  // namespace
}  // namespace kvcore
