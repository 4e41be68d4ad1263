// Forking, adopting, and copying shared blocks before they are written.
#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

#include "base/check.h"
#include "store/kv_store.h"

namespace kvcore {

// ---- branching

int64_t KvStore::BlocksToFork(SeqId parent, int64_t count, bool copy) const {
  copy = CopiesForks(copy);
  const int64_t row = Row(parent);
  KV_CHECK(count >= 0) << "count: expected >= 0, got " << count;
  int64_t blocks = 0;
  for (int64_t lane = 0; lane < num_lanes_; ++lane) {
    const int64_t len = LaneAt(row, lane).len;
    blocks += copy ? BlocksFor(len) : len % kBlockSlots != 0;
  }
  KV_CHECK(blocks == 0 || count <= std::numeric_limits<int64_t>::max() / blocks)
      << "count: got " << count;
  return blocks * count;
}

std::vector<SeqId> KvStore::Fork(SeqId parent, int64_t count, bool copy, Stream stream) {
  copy = CopiesForks(copy);
  const int64_t needed = BlocksToFork(parent, count, copy), from = Row(parent);
  if (count > FreeRows()) {
    throw OutOfBlocks("Fork: needs " + std::to_string(count) + " rows, " +
                      std::to_string(FreeRows()) + " are free");
  }
  NeedBlocks("Fork", needed);
  if (!view_.state_of.empty() && count > 0 && NumElectedStates(from) > FreeStates() / count) {
    throw OutOfBlocks("Fork: needs " + std::to_string(NumElectedStates(from)) +
                      " lane states for each copy, " + std::to_string(FreeStates()) + " are free");
  }

  std::vector<SeqId> children(count);
  std::unordered_map<SeqId, int64_t> added;
  for (int64_t c = 0; c < count; ++c) {
    children[c] = next_seq_ + c;
    added.emplace(children[c], free_rows_[free_rows_.size() - 1 - c]);
  }
  // Children side by side: a source is read once and written from cache.
  ReservedBlocks fresh(&pool_, needed);
  std::vector<int32_t> src;
  src.reserve(needed);
  for (int64_t lane = 0; lane < num_lanes_; ++lane) {
    const Lane parent_lane = LaneAt(from, lane);
    for (int64_t b = copy ? 0 : parent_lane.len / kBlockSlots; b < BlocksFor(parent_lane.len);
         ++b) {
      src.insert(src.end(), count, parent_lane.table[b]);
    }
  }
  CopyBlocks(src, fresh.ids(), stream);

  row_of_.merge(added);  // no allocation: the map has room for all rows
  next_seq_ += count;
  const int32_t* next_fresh = fresh.ids().data();
  for (int64_t c = 0; c < count; ++c) {
    const int64_t row = free_rows_.back();
    free_rows_.pop_back();
    RowSeqLen(row) = RowSeqLen(from);
    undoable_[row] = undoable_[from];
    last_replaced_[row] = last_replaced_[from];
    if (!decided_.empty()) {
      std::copy_n(decided_.begin() + from * num_lanes_, num_lanes_,
                  decided_.begin() + row * num_lanes_);
    }
    for (const SideTensor& state : view_.row_states) CopyRow(state.tensor, from, row);
    if (!view_.state_of.empty()) CopyStates(from, row);
  }
  for (int64_t lane = 0; lane < num_lanes_; ++lane) {
    const int32_t len = LaneAt(from, lane).len;
    const int32_t* table = LaneAt(from, lane).table;
    const int64_t num_shared = copy ? 0 : len / kBlockSlots;
    for (const SeqId child : children) {
      const Lane copied = LaneAt(row_of_.find(child)->second, lane);
      copied.len = len;
      for (int64_t b = 0; b < num_shared; ++b) {
        pool_.Share(table[b]);
        copied.table[b] = table[b];
      }
    }
    for (int64_t b = num_shared; b < BlocksFor(len); ++b) {
      for (const SeqId child : children) {
        LaneAt(row_of_.find(child)->second, lane).table[b] = *next_fresh++;
      }
    }
  }
  fresh.Disown();
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

void KvStore::KeepShared(std::vector<int32_t*>* entries) const {
  std::sort(entries->begin(), entries->end(), [](const int32_t* a, const int32_t* b) {
    return *a != *b ? *a < *b : std::less<>()(a, b);
  });
  auto kept = entries->begin();
  for (auto begin = entries->begin(), end = begin; begin != entries->end(); begin = end) {
    while (end != entries->end() && **end == **begin) ++end;
    const int64_t copies = std::min<int64_t>(end - begin, pool_.ref_count(**begin) - 1);
    kept = std::move(begin, begin + copies, kept);
  }
  entries->erase(kept, entries->end());
}

void KvStore::CopyShared(const std::vector<int32_t*>& entries, const ReservedBlocks& fresh,
                         Stream stream) const {
  std::vector<int32_t> src;
  src.reserve(entries.size());
  for (const int32_t* entry : entries) src.push_back(*entry);
  CopyBlocks(src, fresh.ids(), stream);
}

void KvStore::CopyBlocks(const std::vector<int32_t>& src, const std::vector<int32_t>& dst,
                         Stream stream) const {
  if (src.empty()) return;
  const auto ids = [](const std::vector<int32_t>& list) {
    return MakeView(const_cast<int32_t*>(list.data()), DType::kI32,
                    {static_cast<int64_t>(list.size())});  // only read
  };
  ops_->copy_blocks(view_, {ids(src), ids(dst)}, stream);
}

void KvStore::CopyRow(const TensorView& tensor, int64_t from_row, int64_t to_row) const {
  if (tensor.empty()) return;
  const int64_t row_bytes = tensor.stride[0] * DTypeBytes(tensor.dtype);
  std::memcpy(tensor.ptr<char>() + to_row * row_bytes, tensor.ptr<char>() + from_row * row_bytes,
              row_bytes);
}

void KvStore::BeginRow(int64_t row) {
  for (const SideTensor& state : view_.row_states) {
    if (state.empty() || state.start.empty()) continue;
    const int64_t bytes = DTypeBytes(state.tensor.dtype), count = state.tensor.stride[0];
    char* const to = state.tensor.ptr<char>() + row * count * bytes;
    for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * bytes, state.start.data, bytes);
  }
  ForgetRow(row);
  const TensorView& not_finite = view_.row_state(kNotFiniteAt);
  if (!not_finite.empty()) not_finite.ptr<int32_t>()[row] = 0;
}

void KvStore::ForgetNotFinite(int64_t row, int64_t len) const {
  if (view_.row_state(kNotFiniteAt).empty()) return;
  int32_t& first = view_.row_state(kNotFiniteAt).ptr<int32_t>()[row];
  if (first > len) first = 0;  // 1 + its position
}

}  // namespace kvcore
