#include "ops/build_rkv_state.h"

#include <algorithm>
#include <limits>

#include "base/parallel.h"
#include "cpu/check_lanes.h"
#include "cpu/cpu_ops.h"
#include "cpu/rkv_checks.h"
#include "cpu/rkv_lane.h"
#include "cpu/scratch.h"

namespace kvcore {
namespace {

constexpr int64_t kAlign = 64;
constexpr int kRows = 8;  // of products at a time, and of packed queries

struct ThreadScratch {
  int64_t queries_bytes, dots_bytes, lane_bytes;

  explicit ThreadScratch(const KvCacheView& view) {
    const auto round = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const int64_t capacity = view.StateLayout().capacity;
    const int64_t group = view.query_ring.shape[2] / std::max<int64_t>(1, view.num_kv_heads());
    queries_bytes = round(static_cast<int64_t>(sizeof(void*)) * view.window() * group);
    dots_bytes = round(4 * kRows * (capacity + 16 + 272));
    lane_bytes = round(4 * RkvScratchFloats(capacity));
  }
  int64_t total() const { return queries_bytes + dots_bytes + lane_bytes; }
};

}  // namespace

int64_t BuildRkvStateScratchBytes(const KvCacheView& view, int threads) {
  KV_CHECK(!view.lane_state.empty()) << "build_rkv_state: the cache keeps no lane_state";
  return kAlign + threads * ThreadScratch(view).total();
}

void BuildRkvStateCpu(const KvCacheView& view, const BuildRkvStateParams& p, Stream) {
  view.Check();
  KV_CHECK(!view.lane_state.empty()) << "build_rkv_state: the cache keeps no lane_state";
  CheckRkvSettings(view, p.rkv);
  CheckScale(p.scale);
  Dims dims;
  CheckRows(view, p.rows, &dims);
  const int64_t layers = view.num_layers(), heads = view.num_kv_heads();
  dims.Bind("layers", layers);
  dims.Bind("kv_heads", heads);
  MatchTensor({"layers", "kv_heads"}).DType(DType::kI32).Contiguous().Check(p.full, "full", &dims);
  for (int64_t i = 0; i < layers * heads; ++i)
    KV_CHECK(p.full.ptr<int32_t>()[i] > p.rkv.protect)
        << "full: expected more than protect (" << p.rkv.protect << "), got "
        << p.full.ptr<int32_t>()[i];
  const int64_t lanes = p.rows.shape[0] * layers * heads;
  const int32_t* rows = p.rows.ptr<int32_t>();
  for (int64_t i = 0; i < lanes; ++i) {
    const int64_t row = rows[i / (layers * heads)], layer = i / heads % layers, head = i % heads;
    CheckLane(view, row, layer, head, 0);
    const int64_t len = view.lane_len.ptr<int32_t>()[view.LaneId(row, layer, head)];
    KV_CHECK(len <= view.state_slots)
        << "lane_len: expected at most " << view.state_slots << " slots in row " << row
        << ", layer " << layer << ", kv head " << head << ", got " << len;
    KV_CHECK(len < p.full.ptr<int32_t>()[i % (layers * heads)] ||
             view.State(view.LaneId(row, layer, head)) != nullptr)
        << "state_of: expected a state of [0, " << view.num_states() << ") in row " << row
        << ", layer " << layer << ", kv head " << head << ", which holds " << len
        << " slots, got none";
  }
  const ThreadScratch sizes(view);
  const int threads = ThreadsForScratch(p.scratch, kAlign, sizes.total());
  char* const scratch = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p.scratch.data) + 63) &
                                                ~static_cast<uintptr_t>(63));
  const RkvKernels& kernels = KV_ISA_TABLE(kRkvKernels);
  const auto build = view.dtype() == DType::kF32    ? kernels.build_f32
                     : view.dtype() == DType::kBF16 ? kernels.build_bf16
                                                    : kernels.build_f16;
  const RkvStateLayout state = view.StateLayout();
  const int64_t q_heads = view.query_ring.shape[2], window = view.window();
  const int64_t group = q_heads / heads, query_bytes = view.head_dim * DTypeBytes(view.dtype());

  ParallelFor(lanes, 1, threads, [&](int64_t begin, int64_t end, int thread_id) {
    char* at = scratch + thread_id * sizes.total();
    auto* queries = reinterpret_cast<const void**>(at);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = rows[i / (layers * heads)], layer = i / heads % layers, head = i % heads;
      const int64_t lane = view.LaneId(row, layer, head);
      int32_t& replace = view.replace.ptr<int32_t>()[lane];
      RkvBuild b;
      RkvLane& a = b.lane;
      a.len = view.lane_len.ptr<int32_t>()[lane];
      if (a.len < p.full.ptr<int32_t>()[layer * heads + head]) {
        replace = kNotElected;
        continue;
      }
      BindState(view.State(lane), state, &a);
      a.key_blocks = view.key_blocks.data;
      a.table = view.block_table.ptr<int32_t>() + lane * view.max_blocks();
      a.head_dim = view.head_dim;
      a.window = window;
      a.protect = p.rkv.protect;
      a.kernel = p.rkv.kernel;
      a.mix = p.rkv.mix;
      a.threshold = p.rkv.threshold;
      a.num_queries = std::min<int64_t>(window, view.seq_len.ptr<int32_t>()[row]);
      a.scratch = reinterpret_cast<float*>(at + sizes.queries_bytes + sizes.dots_bytes);
      for (int64_t s = 0; s < a.len; ++s)
        a.position[s] =
            view.position
                .ptr<int32_t>()[int64_t{a.table[s / kBlockSlots]} * kBlockSlots + s % kBlockSlots];
      std::fill(a.position + a.len, a.position + a.capacity, std::numeric_limits<int32_t>::max());
      for (int64_t s = 0; s < a.len; ++s) a.order[s] = static_cast<int32_t>(s);
      std::sort(a.order, a.order + a.len,
                [&a](int32_t x, int32_t y) { return a.position[x] < a.position[y]; });
      const int64_t first_head = (row * layers + layer) * q_heads + head * group;
      for (int64_t t = 0; t < a.num_queries; ++t)
        for (int64_t g = 0; g < group; ++g)
          queries[t * group + g] =
              view.query_ring.ptr<char>() + ((first_head + g) * window + t) * query_bytes;
      b.queries = queries;
      b.group = group;
      b.scale = p.scale;
      b.dots = reinterpret_cast<float*>(at + sizes.queries_bytes);
      replace = build(b);
    }
  });
}

}  // namespace kvcore
