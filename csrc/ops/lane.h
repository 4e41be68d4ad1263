// One lane of a cache, (row, layer, kv head): the one way to name, bound and walk it. For tensors
// that this processor reads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "ops/batch.h"
#include "ops/kv_cache_view.h"

namespace kvcore {

struct Lane {
  const KvCacheView& view;
  int64_t id;      // (row * layers + layer) * kv_heads + head
  int32_t* table;  // block ids [max_blocks]
  int32_t& len;

  Lane(const KvCacheView& of, int64_t lane)
      : view(of),
        id(lane),
        table(of.block_table.ptr<int32_t>() + lane * of.max_blocks()),
        len(of.lane_len.ptr<int32_t>()[lane]) {}
  Lane(const KvCacheView& of, int64_t row, int64_t layer, int64_t head)
      : Lane(of, (row * of.num_layers() + layer) * of.num_kv_heads() + head) {}

  int64_t row() const { return id / (view.num_layers() * view.num_kv_heads()); }
  int64_t layer() const { return id / view.num_kv_heads() % view.num_layers(); }
  int64_t head() const { return id % view.num_kv_heads(); }
  int32_t seq_len() const { return view.seq_len.ptr<int32_t>()[row()]; }
  int64_t Block(int64_t slot) const { return table[slot / kBlockSlots]; }
  int32_t& Position(int64_t slot) const {
    return view.position.ptr<int32_t>()[Block(slot) * kBlockSlots + slot % kBlockSlots];
  }
  // What the lane's next token overwrites when it comes alone; < 0 = nothing (ops/replace.h).
  int32_t Replaced() const {
    const TensorView& replace = view.row_state(kReplace);
    return replace.empty() ? kNoReplace : replace.ptr<int32_t>()[id];
  }
  // REQUIRES: the view has `replace`.
  void SetReplaced(int32_t slot) const { view.row_state(kReplace).ptr<int32_t>()[id] = slot; }
  // Null if the lane has no state.
  char* State() const {
    if (view.state_of.empty()) return nullptr;
    const int64_t state = view.state_of.ptr<int32_t>()[id];
    const bool is_there = state >= 0 && state < view.num_states();
    return is_there ? view.lane_state.ptr<char>() + state * view.StateLayout().bytes : nullptr;
  }
  // f(block, first, count) for every block in use: it holds slots [first, first + count).
  template <typename F>
  void ForEachBlock(F&& f) const {
    for (int64_t first = 0; first < len; first += kBlockSlots)
      f(Block(first), first, std::min<int64_t>(kBlockSlots, len - first));
  }
  // positions[slot] for every live slot.
  void Positions(int32_t* positions) const {
    ForEachBlock([&](int64_t block, int64_t first, int64_t count) {
      std::copy_n(view.position.ptr<int32_t>() + block * kBlockSlots, count, positions + first);
    });
  }

  std::string Name() const;
  // The lane holds at least `min_len` slots and its table entries in use name blocks of the pool.
  // Throws Error.
  void Check(int64_t min_len = 0) const;
  // Where a state is missing. Throws Error.
  void CheckState() const;
};

// The lanes of rows, in the order of [seqs, layers, kv_heads] tensors. REQUIRES: rows in range.
class LanesOfRows {
 public:
  LanesOfRows(const KvCacheView& view, const TensorView& rows)
      : view_(view),
        rows_(rows.ptr<int32_t>()),
        per_row_(view.num_layers() * view.num_kv_heads()),
        size_(rows.shape[0] * per_row_) {}
  int64_t size() const { return size_; }
  Lane operator[](int64_t i) const {
    return {view_, rows_[i / per_row_] * per_row_ + i % per_row_};
  }

 private:
  const KvCacheView& view_;
  const int32_t* rows_;
  int64_t per_row_, size_;
};

// The lanes of one layer that a batch brings tokens to, in the order of [seqs, kv_heads].
// REQUIRES: a batch and a layer in range.
class LanesOfBatch {
 public:
  LanesOfBatch(const KvCacheView& view, const RaggedBatch& batch, int64_t layer)
      : view_(view),
        rows_(batch.rows.ptr<int32_t>()),
        cu_(batch.cu_tokens.ptr<int32_t>()),
        layer_(layer),
        num_seqs_(batch.rows.shape[0]) {}
  int64_t num_seqs() const { return num_seqs_; }
  int64_t size() const { return num_seqs_ * view_.num_kv_heads(); }
  int64_t Row(int64_t seq) const { return rows_[seq]; }
  // Tokens that a sequence brings, and the first of them in the batch.
  int64_t Count(int64_t seq) const { return cu_[seq + 1] - cu_[seq]; }
  int64_t First(int64_t seq) const { return cu_[seq]; }
  Lane At(int64_t seq, int64_t head) const { return {view_, rows_[seq], layer_, head}; }

 private:
  const KvCacheView& view_;
  const int32_t *rows_, *cu_;
  int64_t layer_, num_seqs_;
};

}  // namespace kvcore
