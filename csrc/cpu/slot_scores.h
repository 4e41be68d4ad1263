// What the operations that write or read one score per slot share.
#pragma once

#include <algorithm>
#include <string>

#include "cpu/check_lanes.h"

namespace kvcore {

// Checks rows, their lanes, and that `score`, f32 [seqs, layers, kv_heads, slots], has a place for
// every slot of them. Returns the longest lane. Throws Error.
inline int64_t CheckSlotScores(const KvCacheView& view, const TensorView& rows,
                               const TensorView& score) {
  Dims dims;
  CheckRows(view, rows, &dims);
  dims.Bind("layers", view.num_layers());
  dims.Bind("kv_heads", view.num_kv_heads());
  MatchTensor({"seqs", "layers", "kv_heads", "slots"})
      .DType(DType::kF32)
      .Contiguous()
      .Check(score, "score", &dims);
  int64_t longest = 0;
  for (int64_t i = 0; i < rows.shape[0]; ++i)
    for (int64_t layer = 0; layer < view.num_layers(); ++layer)
      for (int64_t head = 0; head < view.num_kv_heads(); ++head) {
        const int64_t row = rows.ptr<int32_t>()[i];
        CheckLane(view, row, layer, head, 0);
        longest =
            std::max<int64_t>(longest, view.lane_len.ptr<int32_t>()[view.LaneId(row, layer, head)]);
      }
  KV_CHECK(score.shape[3] >= longest)
      << "score: expected a place for " << longest << " slots, got " << score.ShapeString();
  return longest;
}

// One lane of a [seqs, layers, kv_heads] batch.
struct BatchLane {
  int64_t row, layer, head, id, len;
  const int32_t* table;

  // REQUIRES: CheckSlotScores passed.
  BatchLane(const KvCacheView& view, const TensorView& rows, int64_t index) {
    const int64_t heads = view.num_kv_heads(), layers = view.num_layers();
    row = rows.ptr<int32_t>()[index / (heads * layers)];
    layer = index / heads % layers;
    head = index % heads;
    id = view.LaneId(row, layer, head);
    len = view.lane_len.ptr<int32_t>()[id];
    table = view.block_table.ptr<int32_t>() + id * view.max_blocks();
  }
  int32_t Position(const KvCacheView& view, int64_t slot) const {
    return view.position
        .ptr<int32_t>()[int64_t{table[slot / kBlockSlots]} * kBlockSlots + slot % kBlockSlots];
  }
  std::string Name() const {
    return "row " + std::to_string(row) + ", layer " + std::to_string(layer) + ", kv head " +
           std::to_string(head);
  }
};

inline int64_t NumBatchLanes(const KvCacheView& view, const TensorView& rows) {
  return rows.shape[0] * view.num_layers() * view.num_kv_heads();
}

}  // namespace kvcore
