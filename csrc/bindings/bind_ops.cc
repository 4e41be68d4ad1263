// The operations for Python. Contracts: ops/<op>.h; this file only carries arguments.
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>

#include "base/parallel.h"
#include "base/rng.h"
#include "bindings/bindings.h"
#include "bindings/tensor_caster.h"
#include "ops/op_table.h"
#include "ops/score_random.h"

namespace py = pybind11;

namespace kvcore {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

const OpTable& OpsOf(const BoundStore& s) { return GetOps(s.store.view().key_blocks.device); }

void AppendKv(const BoundStore& s, int64_t layer, const TensorArg<"key">& key,
              const TensorArg<"value">& value, const OptionalTensorArg<"query">& query,
              const TensorArg<"rows">& rows, const TensorArg<"cu_tokens">& cu_tokens,
              Stream stream) {
  AppendKvParams p;
  p.key = key;
  p.value = value;
  p.query = query;
  p.batch = {rows, cu_tokens};
  p.layer = layer;
  s.store.CheckAppend(p.batch, layer);
  OpsOf(s).append_kv(s.store.view(), p, stream);
}

void Attend(const BoundStore& s, int64_t layer, const TensorArg<"query">& query,
            const TensorArg<"out">& out, const OptionalTensorArg<"lse">& lse,
            const TensorArg<"scratch">& scratch, const TensorArg<"rows">& rows,
            const TensorArg<"cu_tokens">& cu_tokens, float scale,
            const std::optional<RkvSettings>& observe_rkv, bool accumulate, Stream stream) {
  AttendParams p;
  p.query = query;
  p.out = out;
  p.lse = lse;
  p.scratch = scratch;
  p.batch = {rows, cu_tokens};
  p.layer = layer;
  p.scale = scale;
  p.observe_rkv = observe_rkv.has_value();
  if (observe_rkv) p.rkv = *observe_rkv;
  p.accumulate = accumulate;
  OpsOf(s).attend(s.store.view(), p, stream);
}

void BuildRkvState(const BoundStore& s, const TensorArg<"rows">& rows,
                   const TensorArg<"full">& full, const TensorArg<"scratch">& scratch, float scale,
                   const RkvSettings& settings, Stream stream) {
  BuildRkvStateParams p;
  p.rows = rows;
  p.full = full;
  p.scratch = scratch;
  p.scale = scale;
  p.rkv = settings;
  OpsOf(s).build_rkv_state(s.store.view(), p, stream);
}

void ScoreRkv(const BoundStore& s, const TensorArg<"rows">& rows, const TensorArg<"score">& score,
              const TensorArg<"scratch">& scratch, int64_t protect, int64_t kernel, float mix,
              float threshold, bool pool_first, Stream stream, std::optional<float> scale) {
  ScoreRkvParams p;
  p.rows = rows;
  p.score = score;
  p.scratch = scratch;
  p.protect = protect;
  p.kernel = kernel;
  p.mix = mix;
  p.threshold = threshold;
  p.pool_first = pool_first;
  p.scale = scale;
  OpsOf(s).score_rkv(s.store.view(), p, stream);
}

void ScoreRandom(const BoundStore& s, const TensorArg<"rows">& rows,
                 const TensorArg<"score">& score, uint64_t seed, int64_t protect, Stream stream) {
  ScoreRandomParams p;
  p.rows = rows;
  p.score = score;
  p.seed = seed;
  p.protect = protect;
  OpsOf(s).score_random(s.store.view(), p, stream);
}

void ScoreKeys(const BoundStore& s, const TensorArg<"rows">& rows, const TensorArg<"score">& score,
               int64_t kind, int64_t protect, Stream stream) {
  ScoreKeysParams p;
  p.rows = rows;
  p.score = score;
  p.kind = static_cast<KeyScore>(kind);
  p.protect = protect;
  OpsOf(s).score_keys(s.store.view(), p, stream);
}

void ScoreTova(const BoundStore& s, const TensorArg<"rows">& rows, const TensorArg<"score">& score,
               int64_t protect, Stream stream, std::optional<float> scale) {
  ScoreTovaParams p;
  p.rows = rows;
  p.score = score;
  p.protect = protect;
  p.scale = scale;
  OpsOf(s).score_tova(s.store.view(), p, stream);
}

void SelectSlots(const BoundStore& s, const TensorArg<"rows">& rows,
                 const TensorArg<"score">& score, const TensorArg<"keep">& keep,
                 const TensorArg<"drop">& drop, const TensorArg<"drop_count">& drop_count,
                 Stream stream) {
  SelectSlotsParams p;
  p.rows = rows;
  p.score = score;
  p.keep = keep;
  p.drop = drop;
  p.drop_count = drop_count;
  OpsOf(s).select_slots(s.store.view(), p, stream);
}

void CopyBlocks(const BoundStore& s, const TensorArg<"src">& src, const TensorArg<"dst">& dst,
                Stream stream) {
  CopyBlocksParams p;
  p.src = src;
  p.dst = dst;
  OpsOf(s).copy_blocks(s.store.view(), p, stream);
}

void Linear(const TensorArg<"x">& x, const TensorArg<"weight">& weight,
            const OptionalTensorArg<"bias">& bias, const TensorArg<"out">& out, bool gated,
            Stream stream) {
  LinearParams p;
  p.x = x;
  p.weight = weight;
  p.bias = bias;
  p.out = out;
  p.gated = gated;
  GetOps(x.device).linear(p, stream);
}

void SampleTokens(const TensorArg<"logits">& logits, const TensorArg<"temperature">& temperature,
                  const TensorArg<"top_k">& top_k, const TensorArg<"top_p">& top_p,
                  const TensorArg<"min_p">& min_p, const TensorArg<"rng_key">& rng_key,
                  const TensorArg<"rng_counter">& rng_counter, const TensorArg<"token">& token,
                  const TensorArg<"entropy">& entropy, const TensorArg<"logprob">& logprob,
                  const TensorArg<"scratch">& scratch, int64_t vocab, Stream stream) {
  SampleTokensParams p;
  p.logits = logits;
  p.temperature = temperature;
  p.top_k = top_k;
  p.top_p = top_p;
  p.min_p = min_p;
  p.rng_key = rng_key;
  p.rng_counter = rng_counter;
  p.token = token;
  p.entropy = entropy;
  p.logprob = logprob;
  p.scratch = scratch;
  p.vocab = vocab;
  GetOps(logits.device).sample_tokens(p, stream);
}

}  // namespace

void BindOps(py::module_& m) {
  m.def("append_kv", &AppendKv, py::arg("store"), py::arg("layer"), py::arg("key"),
        py::arg("value"), py::arg("query"), py::arg("rows"), py::arg("cu_tokens"),
        py::arg("stream") = 0, NoGil());
  m.def("attend", &Attend, py::arg("store"), py::arg("layer"), py::arg("query"), py::arg("out"),
        py::arg("lse"), py::arg("scratch"), py::arg("rows"), py::arg("cu_tokens"), py::arg("scale"),
        py::arg("observe_rkv") = py::none(), py::arg("accumulate") = false, py::arg("stream") = 0,
        NoGil());
  py::class_<RkvSettings>(m, "RkvSettings")
      .def(py::init([](int64_t protect, int64_t kernel, float mix, float threshold) {
             return RkvSettings{protect, kernel, mix, threshold};
           }),
           py::arg("protect"), py::arg("kernel"), py::arg("mix"), py::arg("threshold"));
  m.def("build_rkv_state", &BuildRkvState, py::arg("store"), py::arg("rows"), py::arg("full"),
        py::arg("scratch"), py::arg("scale"), py::arg("settings"), py::arg("stream") = 0, NoGil());
  m.def(
      "build_rkv_state_scratch_bytes",
      [](const BoundStore& s) { return BuildRkvStateScratchBytes(s.store.view(), NumThreads()); },
      py::arg("store"));
  m.def(
      "rkv_state_bytes",
      [](int64_t slots, int64_t window, int64_t head_dim) {
        return RkvStateLayout(slots, window, head_dim).bytes;
      },
      py::arg("slots"), py::arg("window"), py::arg("head_dim"));
  m.def(
      "attend_scratch_bytes",
      [](const BoundStore& s) { return AttendScratchBytes(s.store.view(), NumThreads()); },
      py::arg("store"));
  m.def("score_rkv", &ScoreRkv, py::arg("store"), py::arg("rows"), py::arg("score"),
        py::arg("scratch"), py::arg("protect"), py::arg("kernel"), py::arg("mix"),
        py::arg("threshold"), py::arg("pool_first") = false, py::arg("stream") = 0,
        py::arg("scale") = py::none(), NoGil());
  m.def(
      "score_rkv_scratch_bytes",
      [](const BoundStore& s, int64_t max_slots) {
        return ScoreRkvScratchBytes(s.store.view(), max_slots, NumThreads());
      },
      py::arg("store"), py::arg("max_slots"));
  m.def("score_random", &ScoreRandom, py::arg("store"), py::arg("rows"), py::arg("score"),
        py::arg("seed"), py::arg("protect"), py::arg("stream") = 0, NoGil());
  m.def("score_keys", &ScoreKeys, py::arg("store"), py::arg("rows"), py::arg("score"),
        py::arg("kind"), py::arg("protect"), py::arg("stream") = 0, NoGil());
  m.def("score_tova", &ScoreTova, py::arg("store"), py::arg("rows"), py::arg("score"),
        py::arg("protect"), py::arg("stream") = 0, py::arg("scale") = py::none(), NoGil());
  m.def("select_slots", &SelectSlots, py::arg("store"), py::arg("rows"), py::arg("score"),
        py::arg("keep"), py::arg("drop"), py::arg("drop_count"), py::arg("stream") = 0, NoGil());
  m.def("copy_blocks", &CopyBlocks, py::arg("store"), py::arg("src"), py::arg("dst"),
        py::arg("stream") = 0, NoGil());
  m.def("linear", &Linear, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("out"),
        py::arg("gated") = false, py::arg("stream") = 0, NoGil());
  m.def("sample_tokens", &SampleTokens, py::arg("logits"), py::arg("temperature"), py::arg("top_k"),
        py::arg("top_p"), py::arg("min_p"), py::arg("rng_key"), py::arg("rng_counter"),
        py::arg("token"), py::arg("entropy"), py::arg("logprob"), py::arg("scratch"),
        py::arg("vocab"), py::arg("stream") = 0, NoGil());
  m.def(
      "sample_tokens_scratch_bytes",
      [](int64_t columns) { return SampleTokensScratchBytes(columns, NumThreads()); },
      py::arg("columns"));
  m.def("hash_key", &HashKey, py::arg("key"), py::arg("word"));
}

}  // namespace kvcore
