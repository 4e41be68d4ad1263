#include "ops/evict_slots.h"

#include <algorithm>
#include <cstring>

#include "base/parallel.h"
#include "cpu/check_lanes.h"
#include "cpu/cpu_ops.h"

namespace kvcore {
namespace {

constexpr int64_t kMinRangeMoves = 64;

// Where one lane's blocks lie, and how to move a slot between two of them.
struct Lane {
  const KvCacheView& view;
  const int32_t* table;

  template <typename Pair>
  void Move(int64_t from, int64_t to) const {
    const int64_t d = view.head_dim, element = static_cast<int64_t>(sizeof(Pair)) / 2;
    const int64_t src = table[from / kBlockSlots], dst = table[to / kBlockSlots];
    const int64_t src_slot = from % kBlockSlots, dst_slot = to % kBlockSlots;
    const Pair* k = view.key_blocks.ptr<Pair>() + src * BlockElements(d) / 2 + src_slot;
    Pair* k_to = view.key_blocks.ptr<Pair>() + dst * BlockElements(d) / 2 + dst_slot;
    for (int64_t i = 0; i < d / 2; ++i) k_to[i * kBlockSlots] = k[i * kBlockSlots];
    char* v = view.value_blocks.ptr<char>();
    std::memcpy(v + (dst * BlockElements(d) + RowMajorOffset(dst_slot, 0, d)) * element,
                v + (src * BlockElements(d) + RowMajorOffset(src_slot, 0, d)) * element,
                static_cast<size_t>(d * element));
    int32_t* position = view.position.ptr<int32_t>();
    position[dst * kBlockSlots + dst_slot] = position[src * kBlockSlots + src_slot];
    float* const stats = view.attention_stats.ptr<float>();
    const int64_t channels = view.stats_channels();
    for (int64_t c = 0; c < channels; ++c)
      stats[(dst * channels + c) * kBlockSlots + dst_slot] =
          stats[(src * channels + c) * kBlockSlots + src_slot];
  }
};

// Holes below the new length, ascending, are filled by the survivors above it, ascending.
template <typename Pair>
void Compact(const Lane& lane, const int32_t* drop, int64_t count, int64_t len) {
  const int64_t new_len = len - count;
  const int32_t* dead = std::lower_bound(drop, drop + count, static_cast<int32_t>(new_len));
  int64_t from = new_len;
  for (const int32_t* hole = drop; hole < drop + count && *hole < new_len; ++hole) {
    while (dead < drop + count && *dead == from) ++dead, ++from;
    lane.Move<Pair>(from++, *hole);
  }
}

void CheckParams(const KvCacheView& view, const EvictSlotsParams& p) {
  view.Check();
  Dims dims;
  CheckRows(view, p.rows, &dims);
  MatchTensor({"seqs", "layers", "kv_heads", "max_drop"})
      .DType(DType::kI32)
      .Contiguous()
      .Check(p.drop, "drop", &dims);
  MatchTensor({"seqs", "layers", "kv_heads"})
      .DType(DType::kI32)
      .Contiguous()
      .Check(p.drop_count, "drop_count", &dims);
  KV_CHECK(dims["layers"] == view.num_layers() && dims["kv_heads"] == view.num_kv_heads())
      << "drop: expected [seqs, " << view.num_layers() << ", " << view.num_kv_heads()
      << ", max_drop], got " << p.drop.ShapeString();
  const int64_t lanes = view.num_layers() * view.num_kv_heads(), max_drop = p.drop.shape[3];
  for (int64_t i = 0; i < p.rows.shape[0] * lanes; ++i) {
    const int64_t row = p.rows.ptr<int32_t>()[i / lanes], layer = i % lanes / view.num_kv_heads(),
                  head = i % view.num_kv_heads();
    const int64_t count = p.drop_count.ptr<int32_t>()[i];
    KV_CHECK(count >= 0 && count <= max_drop)
        << "drop_count: expected 0 to " << max_drop << " for row " << row << ", layer " << layer
        << ", head " << head << ", got " << count;
    if (count == 0) continue;
    CheckLane(view, row, layer, head, count);
    const int64_t len = view.lane_len.ptr<int32_t>()[view.LaneId(row, layer, head)];
    const int32_t* drop = p.drop.ptr<int32_t>() + i * max_drop;
    for (int64_t j = 0; j < count; ++j)
      KV_CHECK(drop[j] > (j > 0 ? drop[j - 1] : -1) && drop[j] < len)
          << "drop: expected ascending slots below " << len << " for row " << row << ", layer "
          << layer << ", head " << head << ", got " << drop[j] << " at " << j;
  }
}

}  // namespace

void EvictSlotsCpu(const KvCacheView& view, const EvictSlotsParams& p, Stream) {
  CheckParams(view, p);
  const int64_t lanes = view.num_layers() * view.num_kv_heads(), max_drop = p.drop.shape[3];
  if (p.rows.shape[0] == 0 || max_drop == 0) return;
  const auto compact = DTypeBytes(view.dtype()) == 2 ? Compact<uint32_t> : Compact<uint64_t>;
  const int64_t grain = std::max<int64_t>(1, kMinRangeMoves / max_drop);
  ParallelFor(p.rows.shape[0] * lanes, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t lane = p.rows.ptr<int32_t>()[i / lanes] * lanes + i % lanes;
      compact({view, view.block_table.ptr<int32_t>() + lane * view.max_blocks()},
              p.drop.ptr<int32_t>() + i * max_drop, p.drop_count.ptr<int32_t>()[i],
              view.lane_len.ptr<int32_t>()[lane]);
    }
  });
}

}  // namespace kvcore
