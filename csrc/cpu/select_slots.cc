// Picks the slots that each lane drops: lowest score first, then oldest position.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/parallel.h"
#include "cpu/cpu_ops.h"
#include "cpu/slot_scores.h"

namespace kvcore {
namespace {

// Ascending scores as ascending integers; -0 and +0 are equal. REQUIRES: not NaN.
uint32_t Ordered(float score) {
  score += 0.0f;  // -0 + 0 = +0
  uint32_t bits;
  std::memcpy(&bits, &score, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Entry {
  uint64_t key;  // score, then position
  int32_t slot;
  bool operator<(const Entry& other) const { return key < other.key; }
};

}  // namespace

void SelectSlotsCpu(const KvCacheView& view, const SelectSlotsParams& p, Stream) {
  view.Check();
  CheckSlotScores(view, p.rows, p.score);
  const LanesOfRows lanes(view, p.rows);
  const int64_t slots = p.score.shape[3];
  Dims dims;
  dims.Bind("seqs", p.rows.shape[0]);
  dims.Bind("layers", view.num_layers());
  dims.Bind("kv_heads", view.num_kv_heads());
  MatchTensor({"seqs", "layers", "kv_heads"})
      .DType(DType::kI32)
      .Contiguous()
      .Check(p.keep, "keep", &dims);
  MatchTensor({"seqs", "layers", "kv_heads", "max_drop"})
      .DType(DType::kI32)
      .Contiguous()
      .Check(p.drop, "drop", &dims);
  MatchTensor({"seqs", "layers", "kv_heads"})
      .DType(DType::kI32)
      .Contiguous()
      .Check(p.drop_count, "drop_count", &dims);
  const int64_t max_drop = dims["max_drop"];

  for (int64_t index = 0; index < lanes.size(); ++index) {
    const Lane lane = lanes[index];
    const int64_t keep = p.keep.ptr<int32_t>()[index];
    KV_CHECK(keep >= 0) << "keep: expected >= 0, got " << keep << " in " << lane.Name();
    KV_CHECK(lane.len - keep <= max_drop) << "drop: expected room for " << lane.len - keep
                                          << " slots, got " << max_drop << " in " << lane.Name();
    const float* score = p.score.ptr<float>() + index * slots;
    bool nan = false;
    for (int64_t slot = 0; slot < lane.len; ++slot) nan |= std::isnan(score[slot]);
    KV_CHECK(!nan) << "score: expected numbers, got NaN in " << lane.Name();
  }

  ParallelFor(lanes.size(), 8, [&](int64_t begin, int64_t end, int) {
    thread_local std::vector<Entry> entries;  // grows to the longest lane, then stays
    for (int64_t index = begin; index < end; ++index) {
      const Lane lane = lanes[index];
      const int64_t count = std::max<int64_t>(0, lane.len - p.keep.ptr<int32_t>()[index]);
      p.drop_count.ptr<int32_t>()[index] = static_cast<int32_t>(count);
      if (count == 0) continue;
      const float* score = p.score.ptr<float>() + index * slots;
      entries.resize(static_cast<size_t>(lane.len));
      for (int64_t slot = 0; slot < lane.len; ++slot)
        entries[static_cast<size_t>(slot)] = {static_cast<uint64_t>(Ordered(score[slot])) << 32 |
                                                  static_cast<uint32_t>(lane.Position(slot)),
                                              static_cast<int32_t>(slot)};
      std::nth_element(entries.begin(), entries.begin() + (count - 1), entries.end());
      int32_t* drop = p.drop.ptr<int32_t>() + index * max_drop;
      for (int64_t i = 0; i < count; ++i) drop[i] = entries[static_cast<size_t>(i)].slot;
      std::sort(drop, drop + count);
    }
  });
}

}  // namespace kvcore
