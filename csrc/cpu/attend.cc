#include "ops/attend.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/parallel.h"
#include "cpu/attend_kernels.h"
#include "cpu/check_lanes.h"
#include "cpu/cpu_ops.h"
#include "cpu/rkv_common.h"
#include "cpu/scratch.h"

namespace kvcore {
namespace {

// A range handed to a thread is worth at least this many multiply-adds (some microseconds).
constexpr int64_t kMinRangeWork = 200'000;
constexpr int64_t kRangesPerThread = 8;
// With more tiles than this for each thread there is nothing to gain from sharing one.
constexpr int64_t kTilesPerThread = 2;
// Parts of shared tiles that scratch has room for: of the longest lane, and these for each thread.
constexpr int64_t kPartsPerThread = 4;

int64_t SplitsFor(int64_t slots) { return (slots + kAttendSplit - 1) / kAttendSplit; }

// What a thread needs: a tile's scratch, and to observe a lane the products of rows with its slots,
// and for the fused R-KV pass the state's own scratch.
struct Pieces {
  float *tile, *kept, *rkv;
  int64_t stride = 0;  // between rows of `kept`

  Pieces(Carver* carver, const KvCacheView& view) {
    int64_t rows = 0, rkv_floats = 0;
    if (!view.lane_state.empty()) {
      const int64_t capacity = view.StateLayout().capacity;
      stride = capacity + 16;
      rows = kRkvKeptRows;
      rkv_floats = RkvScratchFloats(capacity);
    }
    if (view.planes.Find(kAttentionStats) != nullptr) {
      stride = std::max(stride, view.max_blocks() * kBlockSlots + 16);
      rows = kAttendTileRows;
    }
    tile = carver->Take<float>(AttendTileScratchFloats(view.head_dim));
    kept = carver->Take<float>(stride * rows);
    rkv = carver->Take<float>(rkv_floats);
  }
};

// Sizes of the scratch: parts of shared tiles, as many as the longest lane has and some for each
// thread, then a thread's pieces.
struct Layout {
  int64_t part_bytes, longest_parts, shared, pieces_bytes, per_thread;

  explicit Layout(const KvCacheView& view) {
    Carver carver(nullptr);
    const Pieces pieces(&carver, view);
    part_bytes = AlignUp(4 * AttendPartialFloats(view.head_dim));
    longest_parts = SplitsFor(view.max_blocks() * kBlockSlots);
    shared = longest_parts * part_bytes;
    pieces_bytes = carver.bytes();
    per_thread = pieces_bytes + kPartsPerThread * part_bytes;
  }
  int64_t NumParts(int threads) const { return longest_parts + kPartsPerThread * threads; }
};

bool IsObserved(const AttendParams& p, const Lane& lane, int64_t count) {
  return p.observe_rkv && count == 1 && lane.Replaced() >= 0;
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
  int64_t num_tiles() const { return first_tile.back(); }
  Place Locate(int64_t i) const {
    const auto next = std::upper_bound(first_tile.begin(), first_tile.end(), i);
    const int64_t tiles_per_head = (next[0] - next[-1]) / kv_heads, local = i - next[-1];
    return {next - first_tile.begin() - 1, local / tiles_per_head, local % tiles_per_head};
  }
};

Plan MakePlan(const KvCacheView& view, const AttendParams& p, int64_t group) {
  const int64_t heads = view.num_kv_heads();
  const LanesOfBatch lanes(view, p.batch, p.layer);
  Plan plan;
  plan.kv_heads = heads;
  plan.first_tile.resize(static_cast<size_t>(lanes.num_seqs()) + 1);
  for (int64_t s = 0; s < lanes.num_seqs(); ++s) {
    const int64_t count = lanes.Count(s);
    for (int64_t h = 0; h < heads && count > 0; ++h) {
      const Lane lane = lanes.At(s, h);
      lane.Check();
      plan.work += 2 * count * group * lane.len * view.head_dim;
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
  CheckScale(p.scale);
  KV_CHECK(group <= kAttendTileRows) << "observe_rkv: expected at most " << kAttendTileRows
                                     << " query heads per kv head, got " << group;
  const LanesOfBatch lanes(view, p.batch, p.layer);
  for (int64_t s = 0; s < lanes.num_seqs(); ++s)
    for (int64_t h = 0; h < view.num_kv_heads(); ++h) {
      const Lane lane = lanes.At(s, h);
      if (!IsObserved(p, lane, lanes.Count(s))) continue;
      KV_CHECK(lane.len > p.rkv.protect && lane.len <= view.state_slots &&
               lane.Replaced() < lane.len)
          << "lane_len: expected more than protect (" << p.rkv.protect << ") and at most "
          << view.state_slots << " slots in " << lane.Name() << ", got " << lane.len
          << " with slot " << lane.Replaced() << " replaced";
      lane.CheckState();
    }
}

// Runs the tiles of one call.
class Runner {
 public:
  Runner(const KvCacheView& view, const AttendParams& p, const Plan& plan, int64_t group,
         const Layout& layout)
      : view_(view),
        p_(p),
        plan_(plan),
        lanes_(view, p.batch, p.layer),
        group_(group),
        layout_(layout),
        scratch_(p.scratch, layout.shared, layout.per_thread),
        threads_(scratch_.threads()) {
    const AttendKernels& kernels = KV_ISA_TABLE(kAttendKernels);
    const auto of_type = [&](const AttendKernelsOfTypes& k) {
      return view.dtype() == DType::kF32 ? k.f32 : view.dtype() == DType::kBF16 ? k.bf16 : k.f16;
    };
    run_ = of_type(p.accumulate ? kernels.stats : kernels.plain);
    run_observed_ = of_type(p.rkv.mix < 1 ? kernels.rkv : kernels.ring);
    if (p.accumulate) stats_ = view.plane<float>(kAttentionStats);
  }

  void Run() {
    const int64_t num_tiles = plan_.num_tiles();
    // Ranges large enough to pay for handing them out, small enough to even out the threads.
    const int64_t grain = threads_ == 1
                              ? num_tiles
                              : std::max<int64_t>({1, num_tiles * kMinRangeWork / (plan_.work + 1),
                                                   num_tiles / (threads_ * kRangesPerThread)});
    const auto run_tiles = [this](int64_t begin, int64_t end, int thread_id) {
      const Pieces mine = PiecesOf(thread_id);
      for (int64_t i = begin; i < end; ++i) RunTile(i, i + 1 < end, mine);
    };
    if (p_.accumulate) {
      // A lane's tokens add to the same slots: one thread takes them, in their order.
      const int64_t lanes = lanes_.size();
      ParallelFor(lanes, std::max<int64_t>(1, grain * lanes / num_tiles), threads_,
                  [&](int64_t begin, int64_t end, int thread_id) {
                    run_tiles(plan_.FirstOfLane(begin), plan_.FirstOfLane(end), thread_id);
                  });
    } else if (threads_ > 1 && num_tiles < kTilesPerThread * threads_) {
      RunShared();
    } else {
      ParallelFor(num_tiles, grain, threads_, run_tiles);
    }
  }

 private:
  struct Task {
    int64_t tile, split, num_splits;
    char* parts;  // null: the whole tile
  };

  // Few tiles: those of long lanes with few rows are cut into their splits, so that all threads
  // have work.
  void RunShared() {
    std::vector<Task> tasks, merges;
    const auto run = [this](std::vector<Task>* list) {
      ParallelFor(static_cast<int64_t>(list->size()), 1, threads_,
                  [&](int64_t begin, int64_t end, int thread_id) {
                    const Pieces mine = PiecesOf(thread_id);
                    for (int64_t i = begin; i < end; ++i)
                      RunTask((*list)[static_cast<size_t>(i)], mine);
                  });
      list->clear();
    };
    int64_t parts = 0;
    for (int64_t i = 0; i < plan_.num_tiles(); ++i) {
      const int64_t splits = SplitsToShare(i);
      if (splits < 2) {
        tasks.push_back({i, 0, 1, nullptr});
        continue;
      }
      if (parts + splits > layout_.NumParts(threads_)) {
        run(&tasks);
        run(&merges);
        parts = 0;
      }
      char* const at = scratch_.shared() + parts * layout_.part_bytes;
      for (int64_t split = 0; split < splits; ++split) tasks.push_back({i, split, splits, at});
      merges.push_back({i, splits, splits, at});
      parts += splits;
    }
    run(&tasks);
    run(&merges);
  }

  // Splits of a tile that several threads may do; 1 where one has to do all.
  int64_t SplitsToShare(int64_t i) const {
    const Place at = plan_.Locate(i);
    const AttendTile tile = MakeTile(at);
    if (tile.num_rows > kAttendSharedRows || IsObserved(p_, LaneAt(at), Count(at))) return 1;
    return SplitsFor(tile.limit + (tile.first_row + tile.num_rows - 1) / group_);
  }

  int64_t Count(const Place& at) const { return lanes_.Count(at.seq); }
  Lane LaneAt(const Place& at) const { return lanes_.At(at.seq, at.head); }
  Pieces PiecesOf(int thread_id) const {
    Carver carver(scratch_.shared() + layout_.NumParts(threads_) * layout_.part_bytes +
                  thread_id * layout_.pieces_bytes);
    return {&carver, view_};
  }

  // The tile without a thread's scratch.
  AttendTile MakeTile(const Place& at) const {
    const int64_t element = DTypeBytes(view_.dtype()), count = Count(at);
    const Lane lane = LaneAt(at);
    AttendTile tile = {};
    tile.key_blocks = view_.key_blocks.data;
    tile.value_blocks = view_.value_blocks.data;
    tile.head_dim = view_.head_dim;
    tile.query_token = p_.query.stride[0];
    tile.query_head = p_.query.stride[1];
    tile.out_token = p_.out.stride[0];
    tile.out_head = p_.out.stride[1];
    tile.lse_token = p_.lse.stride[0];
    tile.lse_head = p_.lse.stride[1];
    tile.group = group_;
    tile.scale = p_.scale;
    tile.stats = stats_.data;
    tile.stats_channels = stats_.channels;
    tile.table = lane.table;
    tile.limit = lane.len - count + 1;
    tile.first_row = at.tile * kAttendTileRows;
    tile.num_rows = std::min<int64_t>(kAttendTileRows, count * group_ - tile.first_row);
    const int64_t token = lanes_.First(at.seq), q_head = at.head * group_;
    tile.query =
        p_.query.ptr<char>() + (token * tile.query_token + q_head * tile.query_head) * element;
    tile.out = p_.out.ptr<char>() + (token * tile.out_token + q_head * tile.out_head) * element;
    tile.lse = p_.lse.empty()
                   ? nullptr
                   : p_.lse.ptr<float>() + token * tile.lse_token + q_head * tile.lse_head;
    return tile;
  }

  void RunTask(const Task& task, const Pieces& mine) const {
    if (task.parts == nullptr) return RunTile(task.tile, false, mine);
    const Place at = plan_.Locate(task.tile);
    AttendTile tile = MakeTile(at);
    tile.partials = reinterpret_cast<float*>(task.parts);
    tile.split = task.split;
    tile.num_splits = task.num_splits;
    tile.scratch = mine.tile;
    Call(run_, at, &tile);
  }

  // `goes_on`: the thread takes the next tile after this one.
  void RunTile(int64_t i, bool goes_on, const Pieces& mine) const {
    const Place at = plan_.Locate(i);
    const Lane lane = LaneAt(at);
    AttendTile tile = MakeTile(at);
    if (goes_on) {
      const Lane next = LaneAt(plan_.Locate(i + 1));
      tile.next_table = next.table;
      tile.next_blocks = next.id == lane.id ? 0 : BlocksFor(next.len);
    }
    tile.scratch = mine.tile;
    tile.kept = mine.kept;
    tile.kept_stride = mine.stride;
    if (!IsObserved(p_, lane, Count(at))) return Call(run_, at, &tile);
    RkvLane rkv = RkvLaneOf(lane, p_.rkv);
    rkv.scratch = mine.rkv;
    tile.rkv = &rkv;
    tile.replaced_key = lane.State() + view_.StateLayout().replaced_key;
    tile.position = lane.seq_len() - 1;
    int32_t elected = lane.Replaced();
    tile.elected = &elected;
    Call(run_observed_, at, &tile);
    lane.SetReplaced(elected);
  }

  // Runs a kernel and notes the position of the first token whose result is not finite.
  void Call(void (*kernel)(const AttendTile&), const Place& at, AttendTile* tile) const {
    int64_t bad_row = -1;
    tile->bad_row = &bad_row;
    kernel(*tile);
    if (bad_row < 0) return;
    const int64_t position = LaneAt(at).seq_len() - Count(at) + bad_row / group_;
    NoteNotFinite(view_, lanes_.Row(at.seq), std::max<int64_t>(0, position));
  }

  const KvCacheView& view_;
  const AttendParams& p_;
  const Plan& plan_;
  const LanesOfBatch lanes_;
  const int64_t group_;
  const Layout& layout_;
  const Scratch scratch_;
  const int threads_;
  Plane<float> stats_;
  void (*run_)(const AttendTile&);
  void (*run_observed_)(const AttendTile&);
};

}  // namespace

int64_t AttendScratchBytes(const KvCacheView& view, int threads) {
  const Layout layout(view);
  return Scratch::Bytes(layout.shared, layout.per_thread, threads);
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
      .Disjoint()
      .Check(p.out, "out", &dims);
  if (!p.lse.empty())
    MatchTensor({"tokens", "q_heads"}).DType(DType::kF32).Disjoint().Check(p.lse, "lse", &dims);
  const int64_t tokens = p.query.shape[0], q_heads = p.query.shape[1];
  KV_CHECK(p.query.shape[2] == view.head_dim)
      << "query: expected head_dim " << view.head_dim << ", got " << p.query.ShapeString();
  KV_CHECK(view.num_kv_heads() > 0 && q_heads % view.num_kv_heads() == 0)
      << "query: expected a multiple of " << view.num_kv_heads() << " heads, got " << q_heads;
  KV_CHECK(std::isfinite(p.scale)) << "scale: expected a finite number, got " << p.scale;
  CheckBatch(view, p.batch, tokens, &dims);
  if (tokens == 0 || q_heads == 0) return;
  const Layout layout(view);
  const int64_t group = q_heads / view.num_kv_heads();
  if (p.accumulate) {
    const Plane<float> stats = view.plane<float>(kAttentionStats);
    KV_CHECK(stats.data != nullptr) << "accumulate: the cache keeps no " << kAttentionStats;
    KV_CHECK(stats.channels == 1 || stats.channels >= 3 * group)
        << kAttentionStats << ": expected 1 channel or at least " << 3 * group << ", got "
        << stats.channels;
  }
  KV_CHECK(!p.accumulate || !p.observe_rkv) << "accumulate: expected false with observe_rkv";
  if (p.observe_rkv) CheckObserved(view, p, group);
  const Plan plan = MakePlan(view, p, group);
  Runner(view, p, plan, group, layout).Run();
}

}  // namespace kvcore
