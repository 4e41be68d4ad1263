// Reference-counted ids of the blocks of one engine. Knows nothing of what a block holds.
#pragma once

#include <cstdint>
#include <vector>

namespace kvcore {

class BlockPool {
 public:
  // REQUIRES: 0 <= num_blocks < 2^31.
  explicit BlockPool(int64_t num_blocks);

  int64_t num_blocks() const { return static_cast<int64_t>(ref_count_.size()); }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int32_t ref_count(int32_t block) const { return ref_count_[block]; }

  // Takes one free block with reference count 1. REQUIRES: num_free() > 0 (callers check whole
  // requests first, so that a request that does not fit changes nothing).
  int32_t Allocate();
  // One more owner. REQUIRES: block is allocated.
  void Share(int32_t block);
  // One owner less; the last one frees the block. REQUIRES: block is allocated.
  void Release(int32_t block);

  // Compares with the references that the owner counted, one entry per block: equal counts, and
  // every block either free once or referenced. Throws InternalError naming the first block that
  // disagrees.
  void CheckIntegrity(const std::vector<int32_t>& references) const;

 private:
  std::vector<int32_t> ref_count_;
  std::vector<int32_t> free_;  // stack: the block freed last is the warmest
};

// One reference to each of some blocks, given back at the end of its life: what a change takes from
// a pool before anything that may throw, so that a change that does not happen leaves the pool as
// it was, to the order of its free blocks.
class ReservedBlocks {
 public:
  // Takes `count` free blocks. REQUIRES: 0 <= count <= pool->num_free(); the pool outlives this.
  ReservedBlocks(BlockPool* pool, int64_t count);
  ~ReservedBlocks();
  ReservedBlocks(const ReservedBlocks&) = delete;
  ReservedBlocks& operator=(const ReservedBlocks&) = delete;

  const std::vector<int32_t>& ids() const { return ids_; }
  // Exchanges references with table entries: each gets the block at its index, which was reserved,
  // and what it named is given back instead, unless it is swapped again.
  // REQUIRES: entries.size() == ids().size(). Never throws.
  void Swap(const std::vector<int32_t*>& entries);
  // The references have other owners from now on.
  void Disown() { ids_.clear(); }

 private:
  BlockPool* pool_;
  std::vector<int32_t> ids_;
};

}  // namespace kvcore
