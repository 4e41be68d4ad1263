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
#include "cpu/rkv_lane.h"
#include "store/kv_store.h"
#include "support/bad_numbers.h"
#include "support/lane_fixture.h"
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

// One sequence (and its forks) of a small store.
class RkvStream {
 public:
  RkvStream(const RkvStreamShape& shape, const std::string& regime, uint64_t seed)
      : shape_(shape), source_(regime, shape.head_dim, seed), rng_(seed + 1) {
    const int64_t max_blocks = (shape.slots + 64) / 16 + 1,
                  blocks = shape.rows * shape.kv_heads * max_blocks;
    const int64_t q_heads = shape.kv_heads * shape.group;
    key_blocks_ = OwnedTensor(shape.dtype, {blocks, 16 * shape.head_dim});
    value_blocks_ = OwnedTensor(shape.dtype, {blocks, 16 * shape.head_dim});
    key_blocks_.Fill(std::nan(""));
    value_blocks_.Fill(std::nan(""));
    position_ = OwnedTensor(DType::kI32, {blocks, 16});
    block_table_ = OwnedTensor(DType::kI32, {shape.rows, 1, shape.kv_heads, max_blocks});
    lane_len_ = OwnedTensor(DType::kI32, {shape.rows, 1, shape.kv_heads});
    seq_len_ = OwnedTensor(DType::kI32, {shape.rows});
    query_ring_ = OwnedTensor(shape.dtype, {shape.rows, 1, q_heads, shape.window, shape.head_dim});
    replace_ = OwnedTensor(DType::kI32, {shape.rows, 1, shape.kv_heads});
    not_finite_ = OwnedTensor(DType::kI32, {shape.rows});
    const RkvStateLayout layout(shape.slots, shape.window, shape.head_dim);
    lane_state_ = OwnedTensor(DType::kU8, {shape.rows, 1, shape.kv_heads, layout.bytes + 64});
    KvCacheView view;
    view.key_blocks = key_blocks_.view();
    view.value_blocks = value_blocks_.view();
    view.position = position_.view();
    view.block_table = block_table_.view();
    view.lane_len = lane_len_.view();
    view.seq_len = seq_len_.view();
    view.query_ring = query_ring_.view();
    view.replace = replace_.view();
    // Storage begins at a multiple of 64.
    state_ =
        MakeView(reinterpret_cast<char*>(
                     (reinterpret_cast<uintptr_t>(lane_state_.view().data) + 63) & ~uintptr_t{63}),
                 DType::kU8, {shape.rows, 1, shape.kv_heads, layout.bytes});
    view.lane_state = state_;
    view.not_finite = not_finite_.view();
    view.state_slots = shape.slots;
    view.head_dim = shape.head_dim;
    store_ = std::make_unique<KvStore>(view);
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
  int64_t NotFinite() const { return static_cast<int64_t>(not_finite_.Get({store_->Row(seq_)})); }
  int32_t Elected(int64_t head) const { return view().Replaced(Lane(head)); }
  int64_t Len() const { return store_->MaxLaneLen(seq_); }
  const OwnedTensor& last_out() const { return last_out_; }
  void CheckIntegrity() const { store_->CheckIntegrity(); }

  // Where the state of a full lane differs from direct recomputation in double; empty if nowhere.
  // Column means may differ by 1e-5, the elected slot's score from the lowest by `tie`. With mix =
  // 1 there are no pointers and means.
  std::string Differs(int64_t head, double tie) const {
    const KvCacheView v = view();
    const int64_t lane = Lane(head), len = v.lane_len.ptr<int32_t>()[lane];
    if (len != shape_.slots) return "lane of " + std::to_string(len) + " slots";
    const int32_t* table = v.block_table.ptr<int32_t>() + lane * v.max_blocks();
    std::vector<int64_t> order(static_cast<size_t>(len)), place(static_cast<size_t>(len));
    const auto position = [&](int64_t s) {
      return v.position.ptr<int32_t>()[table[s / 16] * 16 + s % 16];
    };
    for (int64_t s = 0; s < len; ++s) order[static_cast<size_t>(s)] = s;
    std::sort(order.begin(), order.end(),
              [&](int64_t a, int64_t b) { return position(a) < position(b); });
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
            key_blocks_.At(table[s / 16] * 16 * shape_.head_dim + CpuKeyOffset(s % 16, d)));
    }
    const int64_t total = store_->SeqLen(seq_);
    for (int64_t p = std::max<int64_t>(0, total - shape_.window); p < total; ++p) {
      in.queries.emplace_back();
      for (int64_t g = 0; g < shape_.group; ++g) {
        in.queries.back().emplace_back();
        for (int64_t d = 0; d < shape_.head_dim; ++d)
          in.queries.back().back().push_back(query_ring_.Get(
              {store_->Row(seq_), 0, head * shape_.group + g, p % shape_.window, d}));
      }
    }
    const RkvOracleResult want = RkvOracle(in);
    const RkvStateLayout layout = v.StateLayout();
    RkvLane state;
    BindState(v.lane_state.ptr<char>() + lane * layout.bytes, layout, &state);
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
  KvCacheView view() const { return store_->view(); }
  int64_t Lane(int64_t head) const { return view().LaneId(store_->Row(seq_), 0, head); }
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
  OwnedTensor key_blocks_, value_blocks_, position_, block_table_, lane_len_, seq_len_, query_ring_;
  OwnedTensor replace_, not_finite_, lane_state_, last_out_;
  TensorView state_;
  std::unique_ptr<KvStore> store_;
  SeqId seq_ = 0;
  RkvPoison poison_;
};

}  // namespace kvcore
