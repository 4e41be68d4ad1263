#include "ops/evict_slots.h"

#include <algorithm>
#include <cstring>

#include "base/parallel.h"
#include "cpu/check_lanes.h"
#include "cpu/cpu_ops.h"
#include "cpu/slot_bits.h"

namespace kvcore {
namespace {

constexpr int64_t kMinRangeMoves = 64;

// A slot of a lane: where it lies in its block.
struct Place {
  int64_t block, slot;
};

// `channels` numbers, kBlockSlots apart, of a block that holds nothing else.
template <typename T>
void MoveNumbers(const TensorView& t, int64_t channels, Place from, Place to) {
  T* const data = t.ptr<T>();
  const T* src = data + from.block * channels * kBlockSlots + from.slot;
  T* dst = data + to.block * channels * kBlockSlots + to.slot;
  for (int64_t c = 0; c < channels; ++c) dst[c * kBlockSlots] = src[c * kBlockSlots];
}

// A key moves as head_dim / 2 pairs of numbers, one channel each.
template <typename Pair>
void Move(const Lane& lane, int64_t from_slot, int64_t to_slot) {
  const KvCacheView& view = lane.view;
  const int64_t row_bytes = view.head_dim * static_cast<int64_t>(sizeof(Pair)) / 2;
  const Place from{lane.Block(from_slot), from_slot % kBlockSlots},
      to{lane.Block(to_slot), to_slot % kBlockSlots};
  MoveNumbers<Pair>(view.key_blocks, view.head_dim / 2, from, to);
  char* const values = view.value_blocks.ptr<char>();
  std::memcpy(values + (to.block * kBlockSlots + to.slot) * row_bytes,
              values + (from.block * kBlockSlots + from.slot) * row_bytes,
              static_cast<size_t>(row_bytes));
  lane.Position(to_slot) = lane.Position(from_slot);
  for (const SideTensor& plane : view.planes)
    if (!plane.empty())
      WithBits(plane.tensor.dtype, [&]<typename T>() {
        MoveNumbers<T>(plane.tensor, plane.tensor.shape[1], from, to);
      });
}

// Holes below the new length, ascending, are filled by the survivors above it, ascending.
template <typename Pair>
void Compact(const Lane& lane, const int32_t* drop, int64_t count) {
  const int64_t new_len = lane.len - count;
  const int32_t* dead = std::lower_bound(drop, drop + count, static_cast<int32_t>(new_len));
  int64_t from = new_len;
  for (const int32_t* hole = drop; hole < drop + count && *hole < new_len; ++hole) {
    while (dead < drop + count && *dead == from) ++dead, ++from;
    Move<Pair>(lane, from++, *hole);
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
  const LanesOfRows lanes(view, p.rows);
  const int64_t max_drop = p.drop.shape[3];
  for (int64_t i = 0; i < lanes.size(); ++i) {
    const Lane lane = lanes[i];
    const int64_t count = p.drop_count.ptr<int32_t>()[i];
    KV_CHECK(count >= 0 && count <= max_drop)
        << "drop_count: expected 0 to " << max_drop << " in " << lane.Name() << ", got " << count;
    if (count == 0) continue;
    lane.Check(count);
    const int32_t* drop = p.drop.ptr<int32_t>() + i * max_drop;
    for (int64_t j = 0; j < count; ++j)
      KV_CHECK(drop[j] > (j > 0 ? drop[j - 1] : -1) && drop[j] < lane.len)
          << "drop: expected ascending slots below " << lane.len << " in " << lane.Name()
          << ", got " << drop[j] << " at " << j;
  }
}

}  // namespace

void EvictSlotsCpu(const KvCacheView& view, const EvictSlotsParams& p, Stream) {
  CheckParams(view, p);
  const LanesOfRows lanes(view, p.rows);
  const int64_t max_drop = p.drop.shape[3];
  if (lanes.size() == 0 || max_drop == 0) return;
  const auto compact = DTypeBytes(view.dtype()) == 2 ? Compact<uint32_t> : Compact<uint64_t>;
  const int64_t grain = std::max<int64_t>(1, kMinRangeMoves / max_drop);
  ParallelFor(lanes.size(), grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i)
      compact(lanes[i], p.drop.ptr<int32_t>() + i * max_drop, p.drop_count.ptr<int32_t>()[i]);
  });
}

}  // namespace kvcore
