// R-KV scores, one lane per work item: order the slots by position here, the rest in
// kernels/score.cc.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/parallel.h"
#include "cpu/cpu_ops.h"
#include "cpu/rkv_checks.h"
#include "cpu/score_kernels.h"
#include "cpu/scratch.h"
#include "cpu/slot_scores.h"

namespace kvcore {

int64_t ScoreLaneScratchBytes(int64_t len, int64_t head_dim, int64_t group, int64_t num_queries) {
  const auto round = [](int64_t x, int64_t to) { return (x + to - 1) / to * to; };
  const int64_t padded = round(len, kScorePanel);
  const int64_t query_rows = round(num_queries * group, kScorePanel);
  // Keys, queries, logits, seven words an entry, sums per dim (a register each) and one bit an
  // entry; every piece starts at a multiple of 64.
  return 4 * ((padded + query_rows) * head_dim + (num_queries + 7) * padded) + 64 * head_dim +
         round(padded / 8, 64);
}

namespace {

constexpr int64_t kAlign = 64;

// Per thread: sort keys, slot order and query pointers, then the kernel's scratch.
struct ThreadScratch {
  int64_t keys_bytes, order_bytes, queries_bytes, kernel_bytes;

  ThreadScratch(const KvCacheView& view, int64_t max_slots) {
    const auto round = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const int64_t group = view.query_ring.empty() || view.num_kv_heads() == 0
                              ? 0
                              : view.query_ring.shape[2] / view.num_kv_heads();
    keys_bytes = round(8 * max_slots);
    order_bytes = round(4 * max_slots);
    queries_bytes = round(static_cast<int64_t>(sizeof(void*)) * view.window() * group);
    kernel_bytes = round(ScoreLaneScratchBytes(max_slots, view.head_dim, group, view.window()));
  }
  int64_t total() const { return keys_bytes + order_bytes + queries_bytes + kernel_bytes; }
};

// order = live slots by ascending position.
void OrderByPosition(const KvCacheView& view, const BatchLane& lane, uint64_t* keys,
                     int32_t* order) {
  bool sorted = true;
  for (int64_t slot = 0; slot < lane.len; ++slot) {
    keys[slot] = static_cast<uint64_t>(static_cast<uint32_t>(lane.Position(view, slot))) << 32 |
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
  return kAlign + threads * ThreadScratch(view, max_slots).total();
}

void ScoreRkvCpu(const KvCacheView& view, const ScoreRkvParams& p, Stream) {
  view.Check();
  CheckParams(view, p);
  const int64_t longest = CheckSlotScores(view, p.rows, p.score);
  const int64_t lanes = NumBatchLanes(view, p.rows);
  if (lanes == 0) return;
  CheckSeqLens(view, p.rows);
  const ThreadScratch sizes(view, longest);
  const int threads = ThreadsForScratch(p.scratch, kAlign, sizes.total());
  char* const scratch = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p.scratch.data) + 63) &
                                                ~static_cast<uintptr_t>(63));
  const ScoreKernels& kernels = KV_ISA_TABLE(kScoreKernels);
  const int64_t q_heads = view.query_ring.shape[2], window = view.window();
  const int64_t group = q_heads / view.num_kv_heads();
  const int64_t slots = p.score.shape[3], query_bytes = view.head_dim * DTypeBytes(view.dtype());
  const float scale = ScaleOr(p.scale, view.head_dim);
  FirstBadLane bad(lanes);

  ParallelFor(lanes, 1, threads, [&](int64_t begin, int64_t end, int thread_id) {
    char* at = scratch + thread_id * sizes.total();
    auto* keys = reinterpret_cast<uint64_t*>(at);
    auto* order = reinterpret_cast<int32_t*>(at += sizes.keys_bytes);
    auto* queries = reinterpret_cast<const void**>(at += sizes.order_bytes);
    at += sizes.queries_bytes;
    for (int64_t index = begin; index < end; ++index) {
      const BatchLane lane(view, p.rows, index);
      float* score = p.score.ptr<float>() + index * slots;
      std::fill(score + lane.len, score + slots, -std::numeric_limits<float>::infinity());
      if (lane.len <= p.protect) {
        std::fill(score, score + lane.len, std::numeric_limits<float>::infinity());
        continue;
      }
      OrderByPosition(view, lane, keys, order);

      // The ring's first num_queries cells hold the newest queries; their mean ignores the order.
      const int64_t num_queries = std::min<int64_t>(window, view.seq_len.ptr<int32_t>()[lane.row]);
      const int64_t first_head =
          (lane.row * view.num_layers() + lane.layer) * q_heads + lane.head * group;
      for (int64_t t = 0; t < num_queries; ++t)
        for (int64_t g = 0; g < group; ++g)
          queries[t * group + g] = static_cast<const char*>(view.query_ring.data) +
                                   ((first_head + g) * window + t) * query_bytes;

      ScoreLaneArgs args;
      args.key_blocks = view.key_blocks.data;
      args.block_table = lane.table;
      args.order = order;
      args.queries = queries;
      args.score = score;
      args.scratch = at;
      args.dtype = view.dtype();
      args.len = lane.len;
      args.head_dim = view.head_dim;
      args.group = group;
      args.num_queries = num_queries;
      args.protect = p.protect;
      args.kernel = p.kernel;
      args.mix = p.mix;
      args.threshold = p.threshold;
      args.scale = scale;
      args.pool_first = p.pool_first;
      if (!kernels.score_lane(args)) bad.Add(index);
    }
  });
  bad.Check(view, p.rows, "score_rkv", "its keys or recent queries are not finite");
}

}  // namespace kvcore
