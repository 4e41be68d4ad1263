// Forking, adopting, and copying shared blocks before they are written.
#include <algorithm>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "store/kv_store.h"

namespace kvcore {

TensorView KvStore::IdsView(std::vector<int32_t>& ids) {
  return MakeView(ids.data(), DType::kI32, {static_cast<int64_t>(ids.size())});
}

// ---- branching

int64_t KvStore::BlocksToFork(SeqId parent, int64_t count, bool copy) const {
  copy |= !view_.attention_stats.empty();
  const int64_t row = Row(parent);
  KV_CHECK(count >= 0) << "count: expected >= 0, got " << count;
  int64_t blocks = 0;
  for (int64_t lane = 0; lane < num_lanes_; ++lane) {
    const int64_t len = LaneLen(row, lane);
    blocks += copy ? BlocksFor(len) : len % kBlockSlots != 0;
  }
  KV_CHECK(blocks == 0 || count <= std::numeric_limits<int64_t>::max() / blocks)
      << "count: got " << count;
  return blocks * count;
}

std::vector<SeqId> KvStore::Fork(SeqId parent, int64_t count, bool copy, Stream stream) {
  copy |= !view_.attention_stats.empty();
  const int64_t needed = BlocksToFork(parent, count, copy), from = Row(parent);
  if (count > FreeRows()) {
    throw OutOfBlocks("Fork: needs " + std::to_string(count) + " rows, " +
                      std::to_string(FreeRows()) + " are free");
  }
  NeedBlocks("Fork", needed);

  std::vector<SeqId> children(count);
  std::vector<int64_t> rows(count);
  std::vector<int32_t> src(needed), dst(needed);
  for (int64_t c = 0; c < count; ++c) {
    children[c] = Create();
    rows[c] = Row(children[c]);
  }
  int64_t num_copies = 0;
  for (int64_t lane = 0; lane < num_lanes_; ++lane) {
    const int32_t len = LaneLen(from, lane);
    const int32_t* table = Table(from, lane);
    const int64_t num_shared = copy ? 0 : len / kBlockSlots;
    for (int64_t b = 0; b < BlocksFor(len); ++b) {
      for (const int64_t row : rows) {
        if (b < num_shared) {
          pool_.Share(table[b]);
          Table(row, lane)[b] = table[b];
        } else {  // children side by side: the source is read once and written from cache
          const int32_t fresh = pool_.Allocate();
          Table(row, lane)[b] = fresh;
          src[num_copies] = table[b];
          dst[num_copies++] = fresh;
        }
      }
    }
    for (const int64_t row : rows) LaneLen(row, lane) = len;
  }
  CopyBlocks(src, dst, stream);
  for (const int64_t row : rows) {
    CopyRow(view_.query_ring, from, row);
    CopyRow(view_.replace, from, row);
    CopyRow(view_.not_finite, from, row);
    if (Replaces(from)) CopyRow(view_.lane_state, from, row);
    last_replaced_[row] = last_replaced_[from];
    RowSeqLen(row) = RowSeqLen(from);
  }
  return children;
}

void KvStore::Adopt(SeqId parent, SeqId child) {
  KV_CHECK(parent != child) << "child: expected another sequence than parent, got " << child;
  const int64_t parent_row = Row(parent), child_row = Row(child);
  FreeRow(parent_row);
  row_of_[parent] = child_row;
  row_of_.erase(child);
}

// ---- copy on write

void KvStore::NeedBlocks(const char* method, int64_t needed) const {
  if (needed <= FreeBlocks()) return;
  throw OutOfBlocks(std::string(method) + ": needs " + std::to_string(needed) + " blocks, " +
                    std::to_string(FreeBlocks()) + " of " + std::to_string(pool_.num_blocks()) +
                    " are free");
}

int64_t KvStore::BlocksToUnshare(const std::vector<int32_t*>& entries) const {
  std::vector<int32_t> blocks;
  for (const int32_t* entry : entries) blocks.push_back(*entry);
  std::sort(blocks.begin(), blocks.end());
  int64_t needed = 0;
  for (size_t begin = 0, end = 0; begin < blocks.size(); begin = end) {
    while (end < blocks.size() && blocks[end] == blocks[begin]) ++end;
    // When all owners write, the last one keeps the block.
    needed += std::min<int64_t>(end - begin, pool_.ref_count(blocks[begin]) - 1);
  }
  return needed;
}

void KvStore::Unshare(const std::vector<int32_t*>& entries, Stream stream) {
  std::vector<int32_t> src, dst;
  for (int32_t* entry : entries) {
    if (pool_.ref_count(*entry) == 1) continue;
    const int32_t fresh = pool_.Allocate();
    src.push_back(*entry);
    dst.push_back(fresh);
    pool_.Release(*entry);
    *entry = fresh;
  }
  CopyBlocks(src, dst, stream);
}

void KvStore::CopyBlocks(std::vector<int32_t>& src, std::vector<int32_t>& dst,
                         Stream stream) const {
  if (!src.empty()) ops_->copy_blocks(view_, {IdsView(src), IdsView(dst)}, stream);
}

void KvStore::CopyRow(const TensorView& tensor, int64_t from_row, int64_t to_row) const {
  if (tensor.empty()) return;
  const int64_t row_bytes = tensor.stride[0] * DTypeBytes(tensor.dtype);
  std::memcpy(tensor.ptr<char>() + to_row * row_bytes, tensor.ptr<char>() + from_row * row_bytes,
              row_bytes);
}

bool KvStore::Replaces(int64_t row) const {
  if (view_.replace.empty()) return false;
  const int32_t* slots = view_.replace.ptr<int32_t>() + row * num_lanes_;
  return std::any_of(slots, slots + num_lanes_, [](int32_t slot) { return slot >= 0; });
}

void KvStore::ForgetNotFinite(int64_t row, int64_t len) const {
  if (view_.not_finite.empty()) return;
  int32_t& first = view_.not_finite.ptr<int32_t>()[row];
  if (first > len) first = 0;  // 1 + its position
}

void KvStore::ForgetReplace(int64_t row) const {
  if (view_.replace.empty()) return;
  std::fill_n(view_.replace.ptr<int32_t>() + row * num_lanes_, num_lanes_, -1);
}

}  // namespace kvcore
