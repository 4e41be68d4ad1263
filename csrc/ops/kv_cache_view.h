// The storage of all lanes of one engine as the operations see it.
//
// A lane is (row, layer, kv head). Its live slots are [0, lane_len); slot s lies in block
// block_table[lane][s / 16] at s % 16. Table entries past the live blocks and slots past lane_len
// hold garbage that no operation reads.
#pragma once

#include "base/tensor_match.h"
#include "base/tensor_view.h"
#include "ops/kv_layout.h"
#include "ops/rkv_state.h"

namespace kvcore {

struct KvCacheView {
  TensorView key_blocks;    // T   [blocks, 16 * head_dim], layout of kv_layout.h
  TensorView value_blocks;  // T   [blocks, 16 * head_dim]
  TensorView position;      // i32 [blocks, 16], position of each live slot's token
  TensorView block_table;   // i32 [rows, layers, kv_heads, max_blocks]
  TensorView lane_len;      // i32 [rows, layers, kv_heads]
  TensorView seq_len;       // i32 [rows], tokens ever appended = position of the next token
  TensorView query_ring;    // T   [rows, layers, q_heads, window, head_dim] or empty; the query at
                            //     position p lies at p % window, after RoPE
  TensorView replace;  // i32 [rows, layers, kv_heads] or empty: slot that the lane's next token
                       //     overwrites when it comes alone; < 0 = it is appended
  // What attention each live slot has got, see AttendParams.accumulate.
  TensorView attention_stats;  // f32 [blocks, channels, 16] or empty
  TensorView stats_start;      // f32 [channels], what an appended slot begins with
  // What the fused R-KV pass keeps of lanes with replace >= 0, layout of rkv_state.h. With state_of
  // the states are a pool that lanes have a state of while they need one, else each has its own.
  TensorView lane_state;    // u8  [states, bytes] or [rows, layers, kv_heads, bytes] or empty
  TensorView state_of;      // i32 [rows, layers, kv_heads] or empty: the lane's state, -1 = none
  TensorView not_finite;    // i32 [rows] or empty: 1 + the smallest position at which append_kv was
                            //     given, or attend has found, something not finite; 0 = none
  int64_t state_slots = 0;  // longest lane that lane_state can describe
  int64_t head_dim = 0;

  int64_t num_rows() const { return block_table.shape[0]; }
  int64_t num_layers() const { return block_table.shape[1]; }
  int64_t num_kv_heads() const { return block_table.shape[2]; }
  int64_t max_blocks() const { return block_table.shape[3]; }
  int64_t num_blocks() const { return key_blocks.shape[0]; }
  int64_t stats_channels() const { return attention_stats.empty() ? 0 : attention_stats.shape[1]; }
  int64_t window() const { return query_ring.empty() ? 0 : query_ring.shape[3]; }
  DType dtype() const { return key_blocks.dtype; }
  RkvStateLayout StateLayout() const { return {state_slots, window(), head_dim}; }
  int32_t Replaced(int64_t lane) const {
    return replace.empty() ? -1 : replace.ptr<int32_t>()[lane];
  }
  int64_t num_states() const { return state_of.empty() ? 0 : lane_state.shape[0]; }
  // Null if the lane has no state.
  char* State(int64_t lane) const {
    if (lane_state.empty()) return nullptr;
    const int64_t state = state_of.empty() ? lane : state_of.ptr<int32_t>()[lane];
    const bool is_there = state_of.empty() || (state >= 0 && state < num_states());
    return is_there ? lane_state.ptr<char>() + state * StateLayout().bytes : nullptr;
  }
  int64_t LaneId(int64_t row, int64_t layer, int64_t head) const {
    return (row * num_layers() + layer) * num_kv_heads() + head;
  }

  // Throws Error when the tensors do not fit together.
  void Check() const {
    Dims dims;
    KV_CHECK(head_dim >= kHeadDimMultiple && head_dim <= kMaxHeadDim &&
             head_dim % kHeadDimMultiple == 0)
        << "head_dim: expected a multiple of 8 in [8, 256], got " << head_dim;
    MatchTensor({"blocks", "block_elements"})
        .Floating()
        .Contiguous()
        .Check(key_blocks, "key_blocks", &dims);
    KV_CHECK(dims["block_elements"] == BlockElements(head_dim))
        << "key_blocks: expected " << BlockElements(head_dim) << " elements a block, got "
        << dims["block_elements"];
    MatchTensor({"blocks", "block_elements"})
        .DType(key_blocks.dtype)
        .Contiguous()
        .Check(value_blocks, "value_blocks", &dims);
    MatchTensor({"blocks", "16"})
        .DType(DType::kI32)
        .Contiguous()
        .Check(position, "position", &dims);
    MatchTensor({"rows", "layers", "kv_heads", "max_blocks"})
        .DType(DType::kI32)
        .Contiguous()
        .Check(block_table, "block_table", &dims);
    MatchTensor({"rows", "layers", "kv_heads"})
        .DType(DType::kI32)
        .Contiguous()
        .Check(lane_len, "lane_len", &dims);
    MatchTensor({"rows"}).DType(DType::kI32).Contiguous().Check(seq_len, "seq_len", &dims);
    if (!query_ring.empty()) {
      MatchTensor({"rows", "layers", "q_heads", "window", "head_dim"})
          .DType(key_blocks.dtype)
          .Contiguous()
          .Check(query_ring, "query_ring", &dims);
      KV_CHECK(dims["q_heads"] % dims["kv_heads"] == 0)
          << "query_ring: " << dims["q_heads"] << " query heads are no multiple of "
          << dims["kv_heads"] << " kv heads";
      KV_CHECK(dims["head_dim"] == head_dim) << "query_ring: head_dim " << dims["head_dim"];
    }
    if (!not_finite.empty())
      MatchTensor({"rows"}).DType(DType::kI32).Contiguous().Check(not_finite, "not_finite", &dims);
    if (!replace.empty())
      MatchTensor({"rows", "layers", "kv_heads"})
          .DType(DType::kI32)
          .Contiguous()
          .Check(replace, "replace", &dims);
    if (!attention_stats.empty()) {
      MatchTensor({"blocks", "channels", "16"})
          .DType(DType::kF32)
          .Contiguous()
          .Check(attention_stats, "attention_stats", &dims);
      MatchTensor({"channels"})
          .DType(DType::kF32)
          .Contiguous()
          .Check(stats_start, "stats_start", &dims);
    }
    if (!state_of.empty()) {
      MatchTensor({"rows", "layers", "kv_heads"})
          .DType(DType::kI32)
          .Contiguous()
          .Check(state_of, "state_of", &dims);
      KV_CHECK(!lane_state.empty()) << "state_of: needs lane_state";
    }
    if (!lane_state.empty()) {
      if (state_of.empty())
        MatchTensor({"rows", "layers", "kv_heads", "state_bytes"})
            .DType(DType::kU8)
            .Contiguous()
            .Check(lane_state, "lane_state", &dims);
      else
        MatchTensor({"states", "state_bytes"})
            .DType(DType::kU8)
            .Contiguous()
            .Check(lane_state, "lane_state", &dims);
      KV_CHECK(!replace.empty() && window() >= 1) << "lane_state: needs replace and a query ring";
      const int64_t bytes = StateLayout().bytes;
      KV_CHECK(dims["state_bytes"] == bytes)
          << "lane_state: expected " << bytes << " bytes for " << state_slots << " slots, got "
          << dims["state_bytes"];
    }
  }
};

}  // namespace kvcore
