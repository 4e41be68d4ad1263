#include "store/block_pool.h"

#include <limits>
#include <utility>

#include "base/check.h"

namespace kvcore {

BlockPool::BlockPool(int64_t num_blocks) {
  KV_CHECK(num_blocks >= 0 && num_blocks <= std::numeric_limits<int32_t>::max())
      << "num_blocks: expected 0 <= num_blocks < 2^31, got " << num_blocks;
  ref_count_.assign(num_blocks, 0);
  free_.resize(num_blocks);
  // Lowest ids on top: a pool that is never full keeps to the front of its tensors.
  for (int64_t i = 0; i < num_blocks; ++i) free_[i] = static_cast<int32_t>(num_blocks - 1 - i);
}

int32_t BlockPool::Allocate() {
  KV_ICHECK(!free_.empty()) << "no free block of " << num_blocks();
  const int32_t block = free_.back();
  free_.pop_back();
  ref_count_[block] = 1;
  return block;
}

void BlockPool::Share(int32_t block) {
  KV_ICHECK(block >= 0 && block < num_blocks() && ref_count_[block] > 0) << "block " << block;
  ++ref_count_[block];
}

void BlockPool::Release(int32_t block) {
  KV_ICHECK(block >= 0 && block < num_blocks() && ref_count_[block] > 0) << "block " << block;
  if (--ref_count_[block] == 0) free_.push_back(block);
}

void BlockPool::CheckIntegrity(const std::vector<int32_t>& references) const {
  KV_ICHECK(references.size() == ref_count_.size())
      << "expected " << num_blocks() << " references, got " << references.size();
  std::vector<uint8_t> is_free(ref_count_.size(), 0);
  for (const int32_t block : free_) {
    KV_ICHECK(block >= 0 && block < num_blocks()) << "free block " << block;
    KV_ICHECK(!is_free[block]) << "block " << block << " is free twice";
    is_free[block] = 1;
  }
  for (int64_t block = 0; block < num_blocks(); ++block) {
    KV_ICHECK(ref_count_[block] == references[block])
        << "block " << block << ": counted " << ref_count_[block] << " owners, found "
        << references[block];
    KV_ICHECK(is_free[block] == (ref_count_[block] == 0))
        << "block " << block << " has " << ref_count_[block] << " owners and is "
        << (is_free[block] ? "free" : "not free");
  }
}

ReservedBlocks::ReservedBlocks(BlockPool* pool, int64_t count) : pool_(pool) {
  KV_ICHECK(count >= 0 && count <= pool->num_free()) << count << " blocks";
  ids_.resize(count);
  for (int32_t& id : ids_) id = pool_->Allocate();
}

ReservedBlocks::~ReservedBlocks() {
  for (auto id = ids_.rbegin(); id != ids_.rend(); ++id) pool_->Release(*id);
}

void ReservedBlocks::Swap(const std::vector<int32_t*>& entries) {
  for (size_t i = 0; i < ids_.size(); ++i) std::swap(ids_[i], *entries[i]);
}

}  // namespace kvcore
