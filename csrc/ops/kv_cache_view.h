// The storage of all lanes of one engine as the operations see it: keys, values and positions, what
// says where they lie, and lists of what is kept besides, of every slot (planes) and of every row.
//
// A lane is (row, layer, kv head); ops/lane.h walks one. Its live slots are [0, lane_len); slot s
// lies in block block_table[lane][s / 16] at s % 16. Table entries past the live blocks and slots
// past lane_len hold garbage that no operation reads.
#pragma once

#include <algorithm>
#include <string>

#include "base/tensor_match.h"
#include "base/tensor_view.h"
#include "ops/kv_layout.h"
#include "ops/replace.h"
#include "ops/rkv_state.h"
#include "ops/side_tensors.h"

namespace kvcore {

// Planes and row states that operations know.
//   attention_stats  f32 plane: what attention each slot has got, see AttendParams.accumulate
inline constexpr char kAttentionStats[] = "attention_stats";
//   query_ring       T [rows, layers, q_heads, window, head_dim]: the query at position p lies at
//                    p % window, after RoPE
//   replace          i32 [rows, layers, kv_heads]: slot that the lane's next token overwrites when
//                    it comes alone; < 0 = it is appended (ops/replace.h)
//   not_finite       i32 [rows]: 1 + the smallest position at which append_kv was given, or attend
//                    has found, something not finite; 0 = none
enum RowState : int { kQueryRing, kReplace, kNotFiniteAt };

// The numbers of a plane.
template <typename T>
struct Plane {
  T* data = nullptr;  // null: the cache keeps no such plane
  int64_t channels = 0;

  T& At(int64_t block, int64_t channel, int64_t slot) const {
    return data[(block * channels + channel) * kBlockSlots + slot];
  }
};

struct KvCacheView {
  TensorView key_blocks;    // T   [blocks, 16 * head_dim], layout of kv_layout.h
  TensorView value_blocks;  // T   [blocks, 16 * head_dim]
  TensorView position;      // i32 [blocks, 16], position of each live slot's token
  TensorView block_table;   // i32 [rows, layers, kv_heads, max_blocks]
  TensorView lane_len;      // i32 [rows, layers, kv_heads]
  TensorView seq_len;       // i32 [rows], tokens ever appended = position of the next token
  // Per slot, of any type: [blocks, channels, 16], start [channels]. append_kv begins a slot with
  // `start`, evictions move the numbers with the slot, copies of blocks carry them.
  SideTensors planes;
  // Per row, of any type: [rows, ...], start one number. Forks copy a row, a fresh row begins with
  // `start`.
  SideTensors row_states{"query_ring", "replace", "not_finite"};
  // What the fused R-KV pass keeps of lanes with replace >= 0, layout of rkv_state.h: a pool of
  // states that lanes have one of while they need it. Both or none.
  TensorView lane_state;    // u8  [states, bytes]
  TensorView state_of;      // i32 [rows, layers, kv_heads]: the lane's state, -1 = none
  int64_t state_slots = 0;  // longest lane that lane_state can describe
  int64_t head_dim = 0;

  int64_t num_rows() const { return block_table.shape[0]; }
  int64_t num_layers() const { return block_table.shape[1]; }
  int64_t num_kv_heads() const { return block_table.shape[2]; }
  int64_t max_blocks() const { return block_table.shape[3]; }
  int64_t num_blocks() const { return key_blocks.shape[0]; }
  int64_t num_states() const { return state_of.empty() ? 0 : lane_state.shape[0]; }
  DType dtype() const { return key_blocks.dtype; }
  RkvStateLayout StateLayout() const { return {state_slots, window(), head_dim}; }

  const TensorView& row_state(RowState which) const { return row_states[which].tensor; }
  const TensorView& query_ring() const { return row_state(kQueryRing); }
  int64_t window() const { return query_ring().empty() ? 0 : query_ring().shape[3]; }
  int64_t num_q_heads() const { return query_ring().empty() ? 0 : query_ring().shape[2]; }
  // Queries that the ring holds of a row; they fill its first places.
  int64_t NumQueries(int64_t row) const {
    return std::min<int64_t>(window(), seq_len.ptr<int32_t>()[row]);
  }
  // Where the ring keeps the queries of a head: [window][head_dim].
  char* Ring(int64_t row, int64_t layer, int64_t q_head) const {
    return query_ring().ptr<char>() + ((row * num_layers() + layer) * num_q_heads() + q_head) *
                                          window() * head_dim * DTypeBytes(dtype());
  }
  // Throws Error naming the plane when its numbers are no T.
  template <typename T>
  Plane<T> plane(const char* name) const {
    const SideTensor* found = planes.Find(name);
    if (found == nullptr) return {};
    KV_CHECK(found->tensor.dtype == kDTypeOf<T>)
        << name << ": expected dtype " << DTypeName(kDTypeOf<T>) << ", got "
        << DTypeName(found->tensor.dtype);
    return {found->tensor.ptr<T>(), found->tensor.shape[1]};
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
    if (!query_ring().empty()) {
      MatchTensor({"rows", "layers", "q_heads", "window", "head_dim"})
          .DType(dtype())
          .Contiguous()
          .Check(query_ring(), "query_ring", &dims);
      KV_CHECK(dims["q_heads"] % dims["kv_heads"] == 0)
          << "query_ring: " << dims["q_heads"] << " query heads are no multiple of "
          << dims["kv_heads"] << " kv heads";
      KV_CHECK(dims["head_dim"] == head_dim) << "query_ring: head_dim " << dims["head_dim"];
    }
    if (!row_state(kNotFiniteAt).empty())
      MatchTensor({"rows"}).DType(DType::kI32).Check(row_state(kNotFiniteAt), "not_finite", &dims);
    const MatchTensor of_lanes =
        MatchTensor({"rows", "layers", "kv_heads"}).DType(DType::kI32).Contiguous();
    if (!row_state(kReplace).empty()) of_lanes.Check(row_state(kReplace), "replace", &dims);
    for (const SideTensor& state : row_states) CheckRowState(state);
    for (const SideTensor& plane : planes) CheckPlane(plane);
    KV_CHECK(state_of.empty() == lane_state.empty()) << "lane_state: expected with state_of";
    if (lane_state.empty()) return;
    of_lanes.Check(state_of, "state_of", &dims);
    MatchTensor({"states", "state_bytes"})
        .DType(DType::kU8)
        .Contiguous()
        .Check(lane_state, "lane_state", &dims);
    KV_CHECK(!row_state(kReplace).empty() && window() >= 1)
        << "lane_state: needs replace and a query ring";
    const int64_t bytes = StateLayout().bytes;
    KV_CHECK(dims["state_bytes"] == bytes) << "lane_state: expected " << bytes << " bytes for "
                                           << state_slots << " slots, got " << dims["state_bytes"];
  }

 private:
  void CheckRowState(const SideTensor& state) const {
    if (state.empty()) return;
    const TensorView& t = state.tensor;
    KV_CHECK(t.ndim >= 1 && t.shape[0] == num_rows() && t.contiguous())
        << state.name << ": expected contiguous [" << num_rows() << " rows, ...], got "
        << t.ShapeString();
    KV_CHECK(state.start.empty() || (state.start.numel() == 1 && state.start.dtype == t.dtype))
        << state.name << ": expected one number of dtype " << DTypeName(t.dtype)
        << " to start with, got " << DTypeName(state.start.dtype) << ' '
        << state.start.ShapeString();
  }
  void CheckPlane(const SideTensor& plane) const {
    if (plane.empty()) return;
    Dims dims;
    dims.Bind("blocks", num_blocks());
    MatchTensor({"blocks", "channels", "16"}).Contiguous().Check(plane.tensor, plane.name, &dims);
    const std::string start = std::string(plane.name) + " start";
    MatchTensor({"channels"})
        .DType(plane.tensor.dtype)
        .Contiguous()
        .Check(plane.start, start.c_str(), &dims);
  }
};

}  // namespace kvcore
