// R-KV scores, one lane per work item: order the slots by position here, the rest in
// kernels/score_rkv.cc.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/parallel.h"
#include "cpu/cpu_ops.h"
#include "cpu/ring_queries.h"
#include "cpu/rkv_common.h"
#include "cpu/score_rkv_kernels.h"
#include "cpu/scratch.h"
#include "cpu/slot_scores.h"

namespace kvcore {

namespace {

int64_t Group(const KvCacheView& view) {
  return view.num_q_heads() / std::max<int64_t>(1, view.num_kv_heads());
}

// What a thread needs for lanes of at most `max_slots` slots.
struct Pieces {
  uint64_t* keys;        // sort keys
  int32_t* order;        // slots by ascending position
  const void** queries;  // [window * group]
  ScoreLaneScratch kernel;

  Pieces(Carver* carver, const KvCacheView& view, int64_t max_slots)
      : keys(carver->Take<uint64_t>(max_slots)),
        order(carver->Take<int32_t>(max_slots)),
        queries(carver->Take<const void*>(view.window() * Group(view))),
        kernel(carver, max_slots, view.head_dim, view.window() * Group(view), view.window()) {}
  static int64_t Bytes(const KvCacheView& view, int64_t max_slots) {
    Carver carver(nullptr);
    const Pieces pieces(&carver, view, max_slots);
    return carver.bytes();
  }
};

// order = live slots by ascending position.
void OrderByPosition(const Lane& lane, uint64_t* keys, int32_t* order) {
  bool sorted = true;
  for (int64_t slot = 0; slot < lane.len; ++slot) {
    keys[slot] = static_cast<uint64_t>(static_cast<uint32_t>(lane.Position(slot))) << 32 |
                 static_cast<uint64_t>(slot);
    sorted &= slot == 0 || keys[slot - 1] < keys[slot];
  }
  if (!sorted) std::sort(keys, keys + lane.len);
  for (int64_t i = 0; i < lane.len; ++i) order[i] = static_cast<int32_t>(keys[i] & 0xffffffffu);
}

void CheckParams(const KvCacheView& view, const ScoreRkvParams& p) {
  KV_CHECK(p.protect >= 0) << "protect: expected >= 0, got " << p.protect;
  KV_CHECK(p.kernel >= 1 && p.kernel % 2 == 1)
      << "kernel: expected an odd number >= 1, got " << p.kernel;
  KV_CHECK(p.mix >= 0 && p.mix <= 1) << "mix: expected a number in [0, 1], got " << p.mix;
  KV_CHECK(std::isfinite(p.threshold))
      << "threshold: expected a finite number, got " << p.threshold;
  if (p.scale) CheckScale(*p.scale);
  KV_CHECK(view.window() >= 1) << "query_ring: expected a window of >= 1 queries, got none";
}

}  // namespace

int64_t ScoreRkvScratchBytes(const KvCacheView& view, int64_t max_slots, int threads) {
  return Scratch::Bytes(0, Pieces::Bytes(view, max_slots), threads);
}

void ScoreRkvCpu(const KvCacheView& view, const ScoreRkvParams& p, Stream) {
  view.Check();
  CheckParams(view, p);
  const int64_t longest = CheckSlotScores(view, p.rows, p.score);
  const LanesOfRows lanes(view, p.rows);
  if (lanes.size() == 0) return;
  CheckSeqLens(view, p.rows);
  const Scratch scratch(p.scratch, 0, Pieces::Bytes(view, longest));
  const ScoreKernels& kernels = KV_ISA_TABLE(kScoreKernels);
  const int64_t group = Group(view), slots = p.score.shape[3];
  const float scale = ScaleOr(p.scale, view.head_dim);
  FirstBadLane bad(lanes);

  ParallelFor(lanes.size(), 1, scratch.threads(), [&](int64_t begin, int64_t end, int thread_id) {
    Carver carver(scratch.Of(thread_id));
    const Pieces mine(&carver, view, longest);
    for (int64_t index = begin; index < end; ++index) {
      const Lane lane = lanes[index];
      float* score = p.score.ptr<float>() + index * slots;
      std::fill(score + lane.len, score + slots, -std::numeric_limits<float>::infinity());
      if (lane.len <= p.protect) {
        std::fill(score, score + lane.len, std::numeric_limits<float>::infinity());
        continue;
      }
      OrderByPosition(lane, mine.keys, mine.order);
      const bool finite = kernels.score_lane({.key_blocks = view.key_blocks.data,
                                              .block_table = lane.table,
                                              .order = mine.order,
                                              .queries = mine.queries,
                                              .score = score,
                                              .scratch = mine.kernel,
                                              .dtype = view.dtype(),
                                              .len = lane.len,
                                              .head_dim = view.head_dim,
                                              .group = group,
                                              .num_queries = RingQueries(lane, mine.queries),
                                              .protect = p.protect,
                                              .kernel = p.kernel,
                                              .mix = p.mix,
                                              .threshold = p.threshold,
                                              .scale = scale,
                                              .pool_first = p.pool_first});
      if (!finite) bad.Add(index);
    }
  });
  bad.Check("score_rkv", "its keys or recent queries are not finite");
}

}  // namespace kvcore
