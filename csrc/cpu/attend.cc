#include "ops/attend.h"

#include <algorithm>
#include <vector>

#include "base/parallel.h"
#include "cpu/attend_kernels.h"
#include "cpu/check_lanes.h"
#include "cpu/cpu_ops.h"
#include "cpu/rkv_checks.h"

namespace kvcore {
namespace {

constexpr int64_t kAlign = 64;
// A range handed to a thread is worth at least this many multiply-adds (some microseconds).
constexpr int64_t kMinRangeWork = 200'000;
constexpr int64_t kRangesPerThread = 8;

int64_t TileBytes(int64_t head_dim) {
  const int64_t bytes = AttendTileScratchFloats(head_dim) * static_cast<int64_t>(sizeof(float));
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

// What a thread needs to observe a lane: products of rows with slots, and for the fused R-KV pass
// the state's own scratch.
struct ObservedScratch {
  int64_t stride = 0, kept_bytes = 0, bytes = 0;

  explicit ObservedScratch(const KvCacheView& view) {
    int64_t own_bytes = 0, rows = 0;
    if (!view.lane_state.empty()) {
      const int64_t capacity = view.StateLayout().capacity;
      stride = capacity + 16;
      rows = kRkvKeptRows;
      own_bytes = 4 * RkvScratchFloats(capacity);
    }
    if (!view.attention_stats.empty()) {
      stride = std::max(stride, view.max_blocks() * kBlockSlots + 16);
      rows = kAttendTileRows;
    }
    kept_bytes = 4 * stride * rows;
    bytes = (kept_bytes + own_bytes + kAlign - 1) / kAlign * kAlign;
  }
};

bool IsObserved(const KvCacheView& view, const AttendParams& p, int64_t lane, int64_t count) {
  return p.observe_rkv && count == 1 && view.Replaced(lane) >= 0;
}

struct Place {
  int64_t seq, head, tile;
};

// The tiles of the batch in order of sequence, kv head, row.
struct Plan {
  std::vector<int64_t> first_tile;  // of each sequence; one more entry = all tiles
  int64_t kv_heads = 0;
  int64_t work = 0;  // multiply-adds, roughly

  // First tile of a lane, counted by sequence and kv head; the one past the last has none.
  int64_t FirstOfLane(int64_t lane) const {
    const size_t seq = static_cast<size_t>(lane / kv_heads);
    if (seq + 1 == first_tile.size()) return first_tile[seq];
    const int64_t tiles_per_head = (first_tile[seq + 1] - first_tile[seq]) / kv_heads;
    return first_tile[seq] + lane % kv_heads * tiles_per_head;
  }
  Place Locate(int64_t i) const {
    const auto next = std::upper_bound(first_tile.begin(), first_tile.end(), i);
    const int64_t tiles_per_head = (next[0] - next[-1]) / kv_heads, local = i - next[-1];
    return {next - first_tile.begin() - 1, local / tiles_per_head, local % tiles_per_head};
  }
};

Plan MakePlan(const KvCacheView& view, const AttendParams& p, int64_t group) {
  const int64_t seqs = p.batch.rows.shape[0], heads = view.num_kv_heads();
  const int32_t* rows = p.batch.rows.ptr<int32_t>();
  const int32_t* cu = p.batch.cu_tokens.ptr<int32_t>();
  Plan plan;
  plan.kv_heads = heads;
  plan.first_tile.resize(static_cast<size_t>(seqs) + 1);
  for (int64_t s = 0; s < seqs; ++s) {
    const int64_t count = cu[s + 1] - cu[s];
    for (int64_t h = 0; h < heads && count > 0; ++h) {
      CheckLane(view, rows[s], p.layer, h, 0);
      const int64_t len = view.lane_len.ptr<int32_t>()[view.LaneId(rows[s], p.layer, h)];
      plan.work += 2 * count * group * len * view.head_dim;
    }
    const int64_t tiles = (count * group + kAttendTileRows - 1) / kAttendTileRows;
    plan.first_tile[static_cast<size_t>(s) + 1] =
        plan.first_tile[static_cast<size_t>(s)] + tiles * heads;
  }
  return plan;
}

void CheckObserved(const KvCacheView& view, const AttendParams& p, int64_t group) {
  KV_CHECK(!view.lane_state.empty()) << "observe_rkv: the cache keeps no lane_state";
  CheckRkvSettings(view, p.rkv);
  KV_CHECK(group <= kAttendTileRows) << "observe_rkv: expected at most " << kAttendTileRows
                                     << " query heads per kv head, got " << group;
  const int32_t* rows = p.batch.rows.ptr<int32_t>();
  const int32_t* cu = p.batch.cu_tokens.ptr<int32_t>();
  for (int64_t s = 0; s < p.batch.rows.shape[0]; ++s)
    for (int64_t h = 0; h < view.num_kv_heads(); ++h) {
      const int64_t lane = view.LaneId(rows[s], p.layer, h);
      const int64_t len = view.lane_len.ptr<int32_t>()[lane];
      if (!IsObserved(view, p, lane, cu[s + 1] - cu[s])) continue;
      KV_CHECK(len > p.rkv.protect && len <= view.state_slots && view.Replaced(lane) < len)
          << "lane_len: expected more than protect (" << p.rkv.protect << ") and at most "
          << view.state_slots << " slots in row " << rows[s] << ", layer " << p.layer
          << ", kv head " << h << ", got " << len << " with slot " << view.Replaced(lane)
          << " replaced";
      KV_CHECK(view.State(lane) != nullptr)
          << "state_of: expected a state of [0, " << view.num_states() << ") in row " << rows[s]
          << ", layer " << p.layer << ", kv head " << h << ", got none";
    }
}

}  // namespace

int64_t AttendScratchBytes(const KvCacheView& view, int threads) {
  return threads * (TileBytes(view.head_dim) + ObservedScratch(view).bytes) + kAlign;
}

void AttendCpu(const KvCacheView& view, const AttendParams& p, Stream) {
  view.Check();
  CheckLayer(view, p.layer);
  Dims dims;
  MatchTensor({"tokens", "q_heads", "head_dim"})
      .DType(view.dtype())
      .InnerContiguous()
      .Check(p.query, "query", &dims);
  MatchTensor({"tokens", "q_heads", "head_dim"})
      .DType(view.dtype())
      .InnerContiguous()
      .Check(p.out, "out", &dims);
  if (!p.lse.empty())
    MatchTensor({"tokens", "q_heads"}).DType(DType::kF32).Check(p.lse, "lse", &dims);
  const int64_t tokens = p.query.shape[0], q_heads = p.query.shape[1];
  KV_CHECK(p.query.shape[2] == view.head_dim)
      << "query: expected head_dim " << view.head_dim << ", got " << p.query.ShapeString();
  KV_CHECK(view.num_kv_heads() > 0 && q_heads % view.num_kv_heads() == 0)
      << "query: expected a multiple of " << view.num_kv_heads() << " heads, got " << q_heads;
  CheckBatch(view, p.batch, tokens, &dims);
  if (tokens == 0 || q_heads == 0) return;
  const int threads = NumThreads();
  MatchTensor({"_"}).DType(DType::kU8).Contiguous().Check(p.scratch, "scratch", &dims);
  const int64_t scratch_bytes = AttendScratchBytes(view, threads);
  KV_CHECK(p.scratch.shape[0] >= scratch_bytes)
      << "scratch: expected at least " << scratch_bytes << " bytes for " << threads
      << " threads, got " << p.scratch.shape[0];
  const int64_t group = q_heads / view.num_kv_heads();
  if (p.accumulate) {
    const int64_t channels = view.stats_channels();
    KV_CHECK(!view.attention_stats.empty()) << "accumulate: the cache keeps no attention_stats";
    KV_CHECK(channels == 1 || channels >= 3 * group)
        << "attention_stats: expected 1 channel or at least " << 3 * group << ", got " << channels;
  }
  KV_CHECK(!p.accumulate || !p.observe_rkv) << "accumulate: expected false with observe_rkv";
  if (p.observe_rkv) CheckObserved(view, p, group);
  const Plan plan = MakePlan(view, p, group);

  const AttendKernels& kernels = KV_ISA_TABLE(kAttendKernels);
  const auto of_type = [&](const AttendKernelsOfTypes& k) {
    return view.dtype() == DType::kF32 ? k.f32 : view.dtype() == DType::kBF16 ? k.bf16 : k.f16;
  };
  const auto run = of_type(p.accumulate ? kernels.stats : kernels.plain);
  const auto run_observed = of_type(p.rkv.mix < 1 ? kernels.rkv : kernels.ring);
  const ObservedScratch observed(view);
  const RkvStateLayout state = view.StateLayout();
  const int64_t thread_bytes = TileBytes(view.head_dim) + observed.bytes;
  const auto unaligned = reinterpret_cast<uintptr_t>(p.scratch.data);
  char* const scratch = reinterpret_cast<char*>((unaligned + kAlign - 1) / kAlign * kAlign);
  const int64_t element = DTypeBytes(view.dtype());
  const int64_t num_tiles = plan.first_tile.back();
  // Ranges large enough to pay for handing them out, small enough to even out the threads.
  const int64_t grain = threads == 1
                            ? num_tiles
                            : std::max<int64_t>({1, num_tiles * kMinRangeWork / (plan.work + 1),
                                                 num_tiles / (threads * kRangesPerThread)});

  const auto run_tiles = [&](int64_t begin, int64_t end, int thread_id) {
    AttendTile tile;
    tile.key_blocks = view.key_blocks.data;
    tile.value_blocks = view.value_blocks.data;
    tile.head_dim = view.head_dim;
    tile.query_token = p.query.stride[0];
    tile.query_head = p.query.stride[1];
    tile.out_token = p.out.stride[0];
    tile.out_head = p.out.stride[1];
    tile.lse_token = p.lse.stride[0];
    tile.lse_head = p.lse.stride[1];
    tile.group = group;
    tile.scale = p.scale;
    tile.scratch = reinterpret_cast<float*>(scratch + thread_id * thread_bytes);
    RkvLane rkv;
    char* const kept = scratch + thread_id * thread_bytes + TileBytes(view.head_dim);
    tile.kept = reinterpret_cast<float*>(kept);
    tile.kept_stride = observed.stride;
    tile.rkv = &rkv;
    tile.stats = view.attention_stats.ptr<float>();
    tile.stats_channels = view.stats_channels();
    const int32_t* rows = p.batch.rows.ptr<int32_t>();
    const int32_t* cu = p.batch.cu_tokens.ptr<int32_t>();
    const int32_t* lane_len = view.lane_len.ptr<int32_t>();
    const int32_t* tables = view.block_table.ptr<int32_t>();
    for (int64_t i = begin; i < end; ++i) {
      const Place at = plan.Locate(i);
      const int64_t count = cu[at.seq + 1] - cu[at.seq];
      const int64_t lane = view.LaneId(rows[at.seq], p.layer, at.head);
      tile.table = tables + lane * view.max_blocks();
      tile.next_blocks = 0;
      if (i + 1 < end) {
        const Place next = plan.Locate(i + 1);
        const int64_t next_lane = view.LaneId(rows[next.seq], p.layer, next.head);
        tile.next_table = tables + next_lane * view.max_blocks();
        tile.next_blocks = next_lane == lane ? 0 : BlocksFor(lane_len[next_lane]);
      }
      tile.limit = lane_len[lane] - count + 1;
      tile.first_row = at.tile * kAttendTileRows;
      tile.num_rows = std::min<int64_t>(kAttendTileRows, count * group - tile.first_row);
      const int64_t token = cu[at.seq], q_head = at.head * group;
      tile.query =
          p.query.ptr<char>() + (token * tile.query_token + q_head * tile.query_head) * element;
      tile.out = p.out.ptr<char>() + (token * tile.out_token + q_head * tile.out_head) * element;
      tile.lse = p.lse.empty()
                     ? nullptr
                     : p.lse.ptr<float>() + token * tile.lse_token + q_head * tile.lse_head;
      if (!IsObserved(view, p, lane, count)) {
        run(tile);
        continue;
      }
      char* const lane_state = view.State(lane);
      BindState(lane_state, state, &rkv);
      rkv.key_blocks = tile.key_blocks;
      rkv.table = tile.table;
      rkv.head_dim = view.head_dim;
      rkv.len = lane_len[lane];
      rkv.window = view.window();
      rkv.protect = p.rkv.protect;
      rkv.kernel = p.rkv.kernel;
      rkv.mix = p.rkv.mix;
      rkv.threshold = p.rkv.threshold;
      const int32_t seq_len = view.seq_len.ptr<int32_t>()[rows[at.seq]];
      rkv.num_queries = std::min<int64_t>(rkv.window, seq_len);
      rkv.scratch = reinterpret_cast<float*>(kept + observed.kept_bytes);
      tile.replaced_key = lane_state + state.replaced_key;
      tile.position = seq_len - 1;
      tile.elected = view.replace.ptr<int32_t>() + lane;
      run_observed(tile);
    }
  };
  if (!p.accumulate) {
    ParallelFor(num_tiles, grain, run_tiles);
    return;
  }
  // A lane's tokens add to the same slots: one thread takes them, in their order.
  const int64_t lanes = p.batch.rows.shape[0] * view.num_kv_heads();
  ParallelFor(lanes, std::max<int64_t>(1, grain * lanes / num_tiles),
              [&](int64_t begin, int64_t end, int thread_id) {
                run_tiles(plan.FirstOfLane(begin), plan.FirstOfLane(end), thread_id);
              });
}

}  // namespace kvcore
