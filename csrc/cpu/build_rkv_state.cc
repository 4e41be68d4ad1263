#include "ops/build_rkv_state.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/parallel.h"
#include "cpu/check_lanes.h"
#include "cpu/cpu_ops.h"
#include "cpu/ring_queries.h"
#include "cpu/rkv_common.h"
#include "cpu/scratch.h"

namespace kvcore {
namespace {

constexpr int kRows = 8;  // of products at a time, and of packed queries

// What a thread needs.
struct Pieces {
  const void** queries;  // [window * group]
  float *dots, *lane;

  Pieces(Carver* carver, const KvCacheView& view) {
    const int64_t capacity = view.StateLayout().capacity;
    const int64_t group = view.num_q_heads() / std::max<int64_t>(1, view.num_kv_heads());
    queries = carver->Take<const void*>(view.window() * group);
    dots = carver->Take<float>(kRows * (capacity + 16 + 272));
    lane = carver->Take<float>(RkvScratchFloats(capacity));
  }
  static int64_t Bytes(const KvCacheView& view) {
    Carver carver(nullptr);
    const Pieces pieces(&carver, view);
    return carver.bytes();
  }
};

}  // namespace

int64_t BuildRkvStateScratchBytes(const KvCacheView& view, int threads) {
  KV_CHECK(!view.lane_state.empty()) << "build_rkv_state: the cache keeps no lane_state";
  return Scratch::Bytes(0, Pieces::Bytes(view), threads);
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
  const LanesOfRows lanes(view, p.rows);
  const auto full = [&](int64_t i) { return p.full.ptr<int32_t>()[i % (layers * heads)]; };
  for (int64_t i = 0; i < lanes.size(); ++i) {
    const Lane lane = lanes[i];
    lane.Check();
    KV_CHECK(lane.len <= view.state_slots) << "lane_len: expected at most " << view.state_slots
                                           << " slots in " << lane.Name() << ", got " << lane.len;
    if (lane.len >= full(i)) lane.CheckState();
  }
  const Scratch scratch(p.scratch, 0, Pieces::Bytes(view));
  const RkvKernels& kernels = KV_ISA_TABLE(kRkvKernels);
  const auto build = view.dtype() == DType::kF32    ? kernels.build_f32
                     : view.dtype() == DType::kBF16 ? kernels.build_bf16
                                                    : kernels.build_f16;
  ParallelFor(lanes.size(), 1, scratch.threads(), [&](int64_t begin, int64_t end, int thread_id) {
    Carver carver(scratch.Of(thread_id));
    const Pieces mine(&carver, view);
    for (int64_t i = begin; i < end; ++i) {
      const Lane lane = lanes[i];
      if (lane.len < full(i)) {
        lane.SetReplaced(kNoReplace);
        continue;
      }
      RkvLane a = RkvLaneOf(lane, p.rkv);
      a.scratch = mine.lane;
      lane.Positions(a.position);
      std::fill(a.position + a.len, a.position + a.capacity, std::numeric_limits<int32_t>::max());
      std::iota(a.order, a.order + a.len, 0);
      std::sort(a.order, a.order + a.len,
                [&a](int32_t x, int32_t y) { return a.position[x] < a.position[y]; });
      RingQueries(lane, mine.queries);
      lane.SetReplaced(build({.lane = a,
                              .queries = mine.queries,
                              .group = view.num_q_heads() / heads,
                              .scale = p.scale,
                              .dots = mine.dots}));
    }
  });
}

}  // namespace kvcore
