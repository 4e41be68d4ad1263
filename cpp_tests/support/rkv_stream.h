// A sequence whose full lanes are kept by the fused R-KV pass, with keys as in five kinds of
// attention heads, and its comparison with direct recomputation in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>

#include "base/parallel.h"
#include "cpu/cpu_ops.h"
#include "cpu/rkv_common.h"
#include "store/kv_store.h"
#include "support/bad_numbers.h"
#include "support/cache_tensors.h"
#include "support/rkv_oracle.h"

namespace kvcore {

struct RkvStreamShape {
  DType dtype = DType::kF32;
  int64_t kv_heads = 1, group = 2, head_dim = 32, slots = 96, window = 8, rows = 3;
  RkvSettings rkv{.protect = 40};
};

// Keys as in five kinds of attention heads.
class RkvKeySource {
 public:
  RkvKeySource(std::string regime, int64_t dim, uint64_t seed)
      : regime_(std::move(regime)), dim_(dim), rng_(seed) {
    const int64_t centres = regime_ == "loop" ? 11 : regime_ == "rope" ? 40 : 24;
    for (int64_t i = 0; i < centres; ++i)
      centre_.push_back(Normal(regime_ == "loop" ? 2.0 : regime_ == "rope" ? 1.0 : 1.5));
    mean_ = Normal(1.0);
  }
  std::vector<double> Next(int64_t position) {
    std::vector<double> key = Normal(regime_ == "iid"       ? 1.0
                                     : regime_ == "cluster" ? 0.9
                                     : regime_ == "mean"    ? 0.8
                                     : regime_ == "rope"    ? 0.6
                                                            : 0.15);
    const size_t which = regime_ == "loop" ? static_cast<size_t>(position) % centre_.size()
                                           : rng_() % centre_.size();
    for (size_t d = 0; d < key.size(); ++d) {
      if (regime_ == "mean") key[d] += 1.5 * mean_[d];
      if (regime_ == "cluster" || regime_ == "rope" || regime_ == "loop")
        key[d] += centre_[which][d];
      if (regime_ == "rope")
        key[d] += mean_[d] * (d % (key.size() / 2) > key.size() / 4 ? 2.0 : 0.3);
    }
    if (regime_ != "rope") return key;
    const size_t half = key.size() / 2;
    std::vector<double> turned(key.size());
    for (size_t d = 0; d < half; ++d) {
      const double angle = static_cast<double>(position) *
                           std::pow(1e4, -static_cast<double>(d) / static_cast<double>(half));
      turned[d] = key[d] * std::cos(angle) - key[d + half] * std::sin(angle);
      turned[d + half] = key[d] * std::sin(angle) + key[d + half] * std::cos(angle);
    }
    return turned;
  }
  std::vector<double> Normal(double scale) {
    std::normal_distribution<double> normal(0.0, scale);
    std::vector<double> x(static_cast<size_t>(dim_));
    for (double& v : x) v = normal(rng_);
    return x;
  }

 private:
  std::string regime_;
  int64_t dim_;
  std::mt19937_64 rng_;
  std::vector<std::vector<double>> centre_;
  std::vector<double> mean_;
};

// Bits that the first token of the next Feed has instead of a number of its own.
struct RkvPoison {
  enum What { kNothing, kKey, kValue, kQuery } what = kNothing;
  int64_t head = 0;
  uint32_t bits = 0;
};

inline CacheShape TensorShape(const RkvStreamShape& s) {
  const int64_t max_blocks = (s.slots + 64) / kBlockSlots + 1;
  return {.dtype = s.dtype,
          .rows = s.rows,
          .layers = 1,
          .kv_heads = s.kv_heads,
          .q_heads = s.kv_heads * s.group,
          .head_dim = s.head_dim,
          .max_blocks = max_blocks,
          .blocks = s.rows * s.kv_heads * max_blocks,
          .window = s.window,
          .replaces = true,
          .notes_not_finite = true,
          .states = s.rows * s.kv_heads,
          .state_slots = s.slots};
}

// One sequence (and its forks) of a small store.
class RkvStream {
 public:
  RkvStream(const RkvStreamShape& shape, const std::string& regime, uint64_t seed)
      : shape_(shape),
        source_(regime, shape.head_dim, seed),
        rng_(seed + 1),
        tensors_(TensorShape(shape)) {
    store_ = std::make_unique<KvStore>(tensors_.view());
    seq_ = store_->Create();
  }

  // Takes in `count` tokens; a full lane afterwards has an elected slot.
  void Feed(int64_t count) {
    store_->Extend({seq_}, {count});
    const int64_t first = store_->SeqLen(seq_) - count, q_heads = shape_.kv_heads * shape_.group;
    OwnedTensor key(shape_.dtype, {count, shape_.kv_heads, shape_.head_dim});
    OwnedTensor value(shape_.dtype, {count, shape_.kv_heads, shape_.head_dim});
    OwnedTensor query(shape_.dtype, {count, q_heads, shape_.head_dim});
    OwnedTensor out(shape_.dtype, {count, q_heads, shape_.head_dim});
    value.FillNormal(rng_);
    query.FillNormal(rng_);
    for (int64_t t = 0; t < count; ++t)
      for (int64_t h = 0; h < shape_.kv_heads; ++h) {
        const std::vector<double> k = source_.Next(first + t);
        for (int64_t d = 0; d < shape_.head_dim; ++d) key.Set({t, h, d}, k[static_cast<size_t>(d)]);
      }
    if (poison_.what != RkvPoison::kNothing)
      SetBits(poison_.what == RkvPoison::kKey     ? key
              : poison_.what == RkvPoison::kValue ? value
                                                  : query,
              poison_.head * shape_.head_dim + 3, poison_.bits);
    poison_ = {};
    const OwnedTensor rows = Rows(), cu = OwnedTensor::I32({0, static_cast<int32_t>(count)});
    AppendKvParams append;
    append.key = key.view();
    append.value = value.view();
    append.query = query.view();
    append.batch = {rows.view(), cu.view()};
    AppendKvCpu(view(), append, 0);
    AttendParams attend;
    attend.query = query.view();
    attend.out = out.view();
    attend.batch = {rows.view(), cu.view()};
    attend.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape_.head_dim)));
    attend.observe_rkv = true;
    attend.rkv = shape_.rkv;
    std::vector<uint8_t> scratch(static_cast<size_t>(AttendScratchBytes(view(), NumThreads())),
                                 0xcd);
    attend.scratch = MakeView(scratch.data(), DType::kU8, {static_cast<int64_t>(scratch.size())});
    AttendCpu(view(), attend, 0);
    last_out_ = out;
    if (store_->MaxLaneLen(seq_) > shape_.slots) DropOldest();
    for (int64_t h = 0; h < shape_.kv_heads; ++h)
      if (store_->MaxLaneLen(seq_) == shape_.slots && Elected(h) == -1) return Build();
  }

  void Fork() {
    const SeqId child = store_->Fork(seq_, 1, true)[0];
    store_->Adopt(seq_, child);  // goes on in another row
  }

  void Poison(const RkvPoison& poison) { poison_ = poison; }
  int64_t NotFinite() const {
    return static_cast<int64_t>(tensors_.not_finite.Get({store_->Row(seq_)}));
  }
  int32_t Elected(int64_t head) const { return LaneOf(head).Replaced(); }
  int64_t Len() const { return store_->MaxLaneLen(seq_); }
  const OwnedTensor& last_out() const { return last_out_; }
  void CheckIntegrity() const { store_->CheckIntegrity(); }

  // Where the state of a full lane differs from direct recomputation in double; empty if nowhere.
  // Column means may differ by 1e-5, the elected slot's score from the lowest by `tie`. With mix =
  // 1 there are no pointers and means.
  std::string Differs(int64_t head, double tie) const {
    const Lane lane = LaneOf(head);
    const int64_t len = lane.len;
    if (len != shape_.slots) return "lane of " + std::to_string(len) + " slots";
    std::vector<int64_t> order(static_cast<size_t>(len)), place(static_cast<size_t>(len));
    for (int64_t s = 0; s < len; ++s) order[static_cast<size_t>(s)] = s;
    std::sort(order.begin(), order.end(),
              [&](int64_t a, int64_t b) { return lane.Position(a) < lane.Position(b); });
    RkvOracleInput in;
    in.protect = shape_.rkv.protect;
    in.kernel = shape_.rkv.kernel;
    in.mix = shape_.rkv.mix;
    in.threshold = shape_.rkv.threshold;
    for (size_t k = 0; k < order.size(); ++k) {
      place[static_cast<size_t>(order[k])] = static_cast<int64_t>(k);
      in.keys.emplace_back();
      const int64_t s = order[k];
      for (int64_t d = 0; d < shape_.head_dim; ++d)
        in.keys.back().push_back(
            tensors_.key_blocks.Get({lane.Block(s), CpuKeyOffset(s % kBlockSlots, d)}));
    }
    const int64_t total = store_->SeqLen(seq_);
    for (int64_t p = std::max<int64_t>(0, total - shape_.window); p < total; ++p) {
      in.queries.emplace_back();
      for (int64_t g = 0; g < shape_.group; ++g) {
        in.queries.back().emplace_back();
        for (int64_t d = 0; d < shape_.head_dim; ++d)
          in.queries.back().back().push_back(tensors_.query_ring.Get(
              {store_->Row(seq_), 0, head * shape_.group + g, p % shape_.window, d}));
      }
    }
    const RkvOracleResult want = RkvOracle(in);
    RkvLane state;
    BindState(lane.State(), lane.view.StateLayout(), &state);
    for (size_t k = 0; k < order.size(); ++k) {
      const int64_t s = order[k];
      const std::string at = " of rank " + std::to_string(k);
      if (state.order[k] != s) return "order" + at;
      if (shape_.rkv.mix == 1) continue;
      const int32_t to = state.pointer[s] < 0 ? ~state.pointer[s] : state.pointer[s];
      if (place[static_cast<size_t>(to)] != want.pointer[k]) return "pointer" + at;
      const double mean = state.column[s] / static_cast<double>(len);
      if (!(std::fabs(mean - want.column_mean[k]) <= 1e-5)) return "column mean" + at;
    }
    const int32_t elected = Elected(head);
    if (elected < 0) return "nothing elected: " + std::to_string(elected);
    const double got = want.score[static_cast<size_t>(place[static_cast<size_t>(elected)])];
    const double best = *std::min_element(want.score.begin(), want.score.end());
    return got - best <= tie ? "" : "score " + std::to_string(got - best) + " above the lowest";
  }

 private:
  const KvCacheView& view() const { return store_->view(); }
  Lane LaneOf(int64_t head) const { return {view(), store_->Row(seq_), 0, head}; }
  OwnedTensor Rows() const { return OwnedTensor::I32({static_cast<int32_t>(store_->Row(seq_))}); }

  // What a chunk has brought too much goes, oldest slots first but for the very first.
  void DropOldest() {
    const int64_t excess = store_->MaxLaneLen(seq_) - shape_.slots;
    OwnedTensor drop(DType::kI32, {1, 1, shape_.kv_heads, excess}),
        count(DType::kI32, {1, 1, shape_.kv_heads});
    for (int64_t h = 0; h < shape_.kv_heads; ++h) {
      count.Set({0, 0, h}, static_cast<double>(excess));
      for (int64_t i = 0; i < excess; ++i) drop.Set({0, 0, h, i}, static_cast<double>(1 + i));
    }
    store_->Evict({seq_}, drop.view(), count.view());
  }

  void Build() {
    OwnedTensor full(DType::kI32, {1, shape_.kv_heads});
    full.Fill(0);
    for (int64_t h = 0; h < shape_.kv_heads; ++h)
      full.Set({0, h}, static_cast<double>(shape_.slots));
    store_->TakeStates({seq_}, full.view());
    std::vector<uint8_t> scratch(
        static_cast<size_t>(BuildRkvStateScratchBytes(view(), NumThreads())));
    BuildRkvStateParams p;
    const OwnedTensor rows = Rows();
    p.rows = rows.view();
    p.full = full.view();
    p.scratch = MakeView(scratch.data(), DType::kU8, {static_cast<int64_t>(scratch.size())});
    p.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape_.head_dim)));
    p.rkv = shape_.rkv;
    BuildRkvStateCpu(view(), p, 0);
  }

  RkvStreamShape shape_;
  RkvKeySource source_;
  std::mt19937_64 rng_;
  CacheTensors tensors_;
  OwnedTensor last_out_;
  std::unique_ptr<KvStore> store_;
  SeqId seq_ = 0;
  RkvPoison poison_;
};

}  // namespace kvcore
