// What R-KV's state and election add to decode attention: one token of one layer, 2 kv heads,
// head_dim 128, bf16, one thread; keys around a common mean, so that nine of ten pairs are similar,
// as in real models (docs/results/real_keys.md). Warm: one layer again and again. Cold: layers in
// turn, more than the caches hold; a layer's token is appended just before, as in decoding. alpha
// is the ratio of the medians, observed over plain, less one.
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>

#include "base/parallel.h"
#include "bench_cache.h"
#include "cpu/cpu_ops.h"
#include "cpu/isa.h"
#include "store/kv_store.h"
#include "support/rkv_stream.h"

namespace kvcore {
namespace {

constexpr int64_t kKvHeads = 2, kHeadDim = 128, kWindow = 8;
constexpr int64_t kColdBytes = 400ll << 20;

// Full lanes of one sequence whose next token overwrites the elected slots.
class Lanes {
 public:
  Lanes(int64_t slots, int64_t group, int64_t layers)
      : slots_(slots),
        group_(group),
        layers_(layers),
        tensors_({.dtype = DType::kBF16,
                  .rows = 1,
                  .layers = layers,
                  .kv_heads = kKvHeads,
                  .q_heads = kKvHeads * group,
                  .head_dim = kHeadDim,
                  .max_blocks = BlocksFor(slots),
                  .blocks = layers * kKvHeads * BlocksFor(slots),
                  .window = kWindow,
                  .replaces = true,
                  .states = layers * kKvHeads,
                  .state_slots = slots}) {
    store_ = std::make_unique<KvStore>(tensors_.view());
    seq_ = store_->Create();
    rkv_.protect = slots == 192 ? 96 : 128;
    for (int64_t i = 0; i < layers * kHeadDim; ++i) mean_.push_back(1.2f * Next());
    Extend(slots);
    for (int64_t layer = 0; layer < layers; ++layer) Append(layer);
    Build();
  }
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  // Room for `count` more tokens in all layers.
  void Extend(int64_t count) {
    store_->Extend({seq_}, {count});
    cu_ = OwnedTensor::I32({0, static_cast<int32_t>(count)});
    count_ = count;
  }
  void Append(int64_t layer) {
    OwnedTensor key(DType::kBF16, {count_, kKvHeads, kHeadDim}), value = key;
    query_ = OwnedTensor(DType::kBF16, {count_, kKvHeads * group_, kHeadDim});
    out_ = query_;
    const float* mean = mean_.data() + layer * kHeadDim;
    for (const OwnedTensor* t : {&query_, &value, &key}) Fill(*t, t == &key ? mean : nullptr);
    AppendKvParams p;
    p.key = key.view();
    p.value = value.view();
    p.query = query_.view();
    p.batch = {rows_.view(), cu_.view()};
    p.layer = layer;
    AppendKvCpu(store_->view(), p, 0);
  }

  // From the layer's newest token.
  void Attend(int64_t layer, bool observe) {
    AttendParams p;
    p.query = query_.view();
    p.out = out_.view();
    p.batch = {rows_.view(), cu_.view()};
    p.layer = layer;
    p.scale = Scale();
    p.observe_rkv = observe;
    p.rkv = rkv_;
    const int64_t bytes = AttendScratchBytes(store_->view(), 1);
    scratch_.resize(static_cast<size_t>(bytes));
    p.scratch = MakeView(scratch_.data(), DType::kU8, {bytes});
    AttendCpu(store_->view(), p, 0);
  }
  const OwnedTensor& out() const { return out_; }
  int64_t layers() const { return layers_; }
  bool HasElected(int64_t layer) const { return Lane(store_->view(), 0, layer, 0).Replaced() >= 0; }
  // Without an election: some slot of the past.
  void ReplaceAny(int64_t layer, int64_t token) {
    for (int64_t h = 0; h < kKvHeads; ++h)
      tensors_.replace.Set({0, layer, h}, static_cast<double>(token * 7 % (slots_ / 4)));
  }

 private:
  static float Scale() { return 1.0f / std::sqrt(static_cast<float>(kHeadDim)); }
  // Nearly normal: a sum of uniform numbers. Fast, since the cold cache is large.
  float Next() {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    int sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<int>(random_ >> (24 + 10 * i) & 1023);
    return static_cast<float>(sum - 2046) / 591.2f;
  }
  void Fill(const OwnedTensor& t, const float* mean) {
    uint16_t* to = t.view().ptr<uint16_t>();
    for (int64_t i = 0; i < t.numel(); ++i) {
      const float x = Next() + (mean == nullptr ? 0.0f : mean[i % kHeadDim]);
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      to[i] = static_cast<uint16_t>(bits >> 16);
    }
  }
  void Build() {
    OwnedTensor full(DType::kI32, {layers_, kKvHeads});
    full.Fill(static_cast<double>(slots_));
    std::vector<uint8_t> scratch(static_cast<size_t>(BuildRkvStateScratchBytes(store_->view(), 1)));
    store_->TakeStates({seq_}, full.view());
    BuildRkvStateParams p;
    p.rows = rows_.view();
    p.full = full.view();
    p.scratch = MakeView(scratch.data(), DType::kU8, {static_cast<int64_t>(scratch.size())});
    p.scale = Scale();
    p.rkv = rkv_;
    BuildRkvStateCpu(store_->view(), p, 0);
  }

  int64_t slots_, group_, layers_, count_ = 0;
  uint64_t random_ = 1;
  CacheTensors tensors_;
  OwnedTensor rows_ = OwnedTensor::I32({0}), cu_, query_, out_;
  std::vector<float> mean_;
  std::vector<uint8_t> scratch_;
  RkvSettings rkv_;
  std::unique_ptr<KvStore> store_;
  SeqId seq_ = 0;
};

// Elections against the double oracle.
bool MatchesOracle(int64_t group) {
  RkvStreamShape shape;
  shape.dtype = DType::kBF16;
  shape.kv_heads = kKvHeads;
  shape.group = group;
  shape.head_dim = kHeadDim;
  RkvStream stream(shape, "mean", 1);
  stream.Feed(90);
  for (int64_t t = 0; t < 40; ++t) {
    stream.Feed(1);
    for (int64_t h = 0; h < kKvHeads && t % 9 == 8; ++h)
      if (!stream.Differs(h, 1e-6).empty()) return false;
  }
  return true;
}

void Bench(benchmark::State& state, int64_t slots, int64_t group, bool cold, Isa isa) {
  SetNumThreads(1);
  SetIsa(isa);
  if (!MatchesOracle(group)) {
    state.SkipWithError("elections differ from the oracle");
    return;
  }
  const int64_t layer_bytes = 2 * kKvHeads * slots * kHeadDim * 2;
  const int64_t layers = cold ? kColdBytes / layer_bytes : 1;
  Lanes plain_lanes(slots, group, layers), lanes(slots, group, layers);
  CallTimer plain(state), observed(state);
  int64_t token = 0;
  for (auto _ : state) {
    plain_lanes.Extend(1);
    lanes.Extend(1);
    for (int64_t layer = 0; layer < layers; ++layer) {
      plain_lanes.Append(layer);
      plain.Time([&] { plain_lanes.Attend(layer, false); });
      plain_lanes.ReplaceAny(layer, ++token);
      lanes.Append(layer);
      observed.Time([&] { lanes.Attend(layer, true); });
      if (layer > 0) continue;
      const OwnedTensor got = lanes.out();
      lanes.Attend(layer, false);
      if (!SameBytes(got, lanes.out()) || !lanes.HasElected(layer)) {
        state.SkipWithError("the observed pass attends to something else");
        return;
      }
    }
  }
  state.counters["alpha"] = observed.MedianRatio(plain) - 1;
  const double base = plain.Median(), with = observed.Median();
  state.SetIterationTime(with);
  state.counters["attend_us"] = base * 1e6;
  state.counters["observed_us"] = with * 1e6;
}

void Register() {
  for (Isa isa : {Isa::kBase, Isa::kV3, Isa::kV4, Isa::kV4Bf16})
    for (int64_t slots : {192, 640})
      for (int64_t group : {6, 7})
        for (bool cold : {false, true})
          if (IsaSupported(isa))
            benchmark::RegisterBenchmark(
                (std::string("Rkv/isa:") + IsaName(isa) + "/slots:" + std::to_string(slots) +
                 "/group:" + std::to_string(group) + (cold ? "/cold" : "/warm"))
                    .c_str(),
                [=](benchmark::State& s) { Bench(s, slots, group, cold, isa); })
                ->Iterations(cold ? 8 : 4000)
                ->Unit(benchmark::kMicrosecond);
}

}  // namespace
}  // namespace kvcore

int main(int argc, char** argv) {
  kvcore::Register();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
