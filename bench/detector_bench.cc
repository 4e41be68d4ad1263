// Cost of the degeneration detector per token and candidate, on ordinary text and on loops.
//
// Checked before anything is timed: the sizes against zlib's one-call compress, and that skipping
// ahead fires at the same token as testing every token. Texts are generated from written seeds.
#include <benchmark/benchmark.h>
#include <zlib.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/parallel.h"
#include "detect/candidate_monitor.h"

namespace kvcore {
namespace {

constexpr int64_t kNumTokens = 512;  // the longest step
constexpr int64_t kTokenBytes = 4;   // about what a token of English text holds

// Words drawn so that few are frequent: gzip ratio 0.5 to 0.6, as of mathematical prose.
std::string NaturalText(int64_t bytes, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::vector<std::string> words(300);
  for (std::string& w : words) {
    for (uint64_t i = 0, n = 1 + rng() % 9; i < n; ++i) w += "etaoinshrdlucmfwygpb"[rng() % 20];
  }
  std::string text;
  while (static_cast<int64_t>(text.size()) < bytes) {
    text += words[(rng() % 300) * (rng() % 300) / 300];
    text += rng() % 12 ? " " : " = " + std::to_string(rng() % 999) + ".\n";
  }
  text.resize(bytes);
  return text;
}

// One sentence for ever, a byte of it changed now and then so that the detector stays undecided.
std::string LoopText(int64_t bytes, int64_t period, uint64_t seed) {
  std::mt19937_64 rng(seed);
  const std::string phrase = NaturalText(period, seed);
  std::string text;
  while (static_cast<int64_t>(text.size()) < bytes) text += phrase;
  text.resize(bytes);
  for (int64_t i = 20; i < bytes; i += 40) text[i] = static_cast<char>('A' + rng() % 26);
  return text;
}

std::string Text(bool loop, uint64_t seed) {
  const int64_t bytes = kNumTokens * kTokenBytes;
  return loop ? LoopText(bytes, 60, seed) : NaturalText(bytes, seed);
}

// All texts as one vocabulary: token t of text i has id i * kNumTokens + t.
std::shared_ptr<const TokenBytes> Vocabulary(const std::vector<std::string>& texts) {
  std::vector<std::string_view> pieces;
  for (const std::string& text : texts) {
    for (int64_t t = 0; t < kNumTokens; ++t) {
      pieces.push_back(std::string_view(text).substr(t * kTokenBytes, kTokenBytes));
    }
  }
  return std::make_shared<TokenBytes>(pieces);
}

// Decodes all texts side by side to their last token; returns where each fired.
std::vector<int64_t> RunAll(const DetectorConfig& config, int64_t num_texts,
                            const std::shared_ptr<const TokenBytes>& vocabulary) {
  CandidateMonitor monitor(config, vocabulary);
  std::vector<int64_t> ids(num_texts), tokens(num_texts), fired(num_texts);
  std::vector<float> entropy(num_texts, 0.7f);
  std::vector<uint8_t> firing(num_texts), step_end(num_texts);
  for (int64_t& id : ids) id = monitor.Open(true);
  for (int64_t t = 0; t < kNumTokens; ++t) {
    for (int64_t i = 0; i < num_texts; ++i) tokens[i] = i * kNumTokens + t;
    monitor.Push(MakeView(ids.data(), DType::kI64, {num_texts}),
                 MakeView(tokens.data(), DType::kI64, {num_texts}),
                 MakeView(entropy.data(), DType::kF32, {num_texts}),
                 MakeView(firing.data(), DType::kU8, {num_texts}),
                 MakeView(step_end.data(), DType::kU8, {num_texts}));
  }
  for (int64_t i = 0; i < num_texts; ++i) fired[i] = monitor.FiredAt(ids[i]);
  return fired;
}

// Work that goes on to the last token: a threshold that the loops come near but do not cross.
DetectorConfig UndecidedConfig(bool loop) {
  DetectorConfig config;
  if (loop) config.gzip_threshold = 0.12;
  return config;
}

void CheckOrDie(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "detector_bench: %s\n", what);
  std::exit(1);
}

void CheckFirst() {
  for (bool loop : {false, true}) {
    std::vector<std::string> texts;
    for (uint64_t i = 0; i < 16; ++i) texts.push_back(Text(loop, i));
    const auto vocabulary = Vocabulary(texts);
    for (double threshold : {0.12, 0.18, 0.25, 0.5}) {
      DetectorConfig config;
      config.gzip_threshold = threshold;
      const std::vector<int64_t> fired = RunAll(config, 16, vocabulary);
      config.gzip_exact = true;
      CheckOrDie(RunAll(config, 16, vocabulary) == fired, "skipping fires elsewhere");
    }
    GzipSizer sizer;
    for (const std::string& text : texts) {
      std::string out(compressBound(800), '\0');
      uLongf size = out.size();
      compress2(reinterpret_cast<Bytef*>(out.data()), &size,
                reinterpret_cast<const Bytef*>(text.data()), 800, 9);
      CheckOrDie(
          sizer.Size(std::string_view(text).substr(0, 800)) == static_cast<int64_t>(size) + 12,
          "gzip size differs from zlib's");
    }
    const std::vector<int64_t> fired = RunAll(UndecidedConfig(loop), 16, vocabulary);
    for (int64_t at : fired) CheckOrDie(at == 0, "a timed text fires");
  }
}

void BM_GzipSize(benchmark::State& state) {
  GzipSizer sizer;
  const std::string text = Text(state.range(0), 1);
  int64_t at = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(sizer.Size(std::string_view(text).substr(at, 800)));
    at = (at + 37) % (static_cast<int64_t>(text.size()) - 800);
  }
}
BENCHMARK(BM_GzipSize)->ArgName("loop")->Arg(0)->Arg(1);

// items_per_second counts tokens of candidates. One thread: the cost that a step cannot hide.
void BM_Push(benchmark::State& state) {
  const bool loop = state.range(0);
  const int64_t num_texts = state.range(1);
  DetectorConfig config = UndecidedConfig(loop);
  config.gzip_exact = state.range(2);
  config.repetition = state.range(3);
  std::vector<std::string> texts;
  for (int64_t i = 0; i < num_texts; ++i) texts.push_back(Text(loop, i));
  const auto vocabulary = Vocabulary(texts);
  for (auto _ : state) benchmark::DoNotOptimize(RunAll(config, num_texts, vocabulary));
  state.SetItemsProcessed(state.iterations() * num_texts * kNumTokens);
  state.counters["time_per_token"] =
      benchmark::Counter(static_cast<double>(state.iterations() * num_texts * kNumTokens),
                         benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}
BENCHMARK(BM_Push)
    ->ArgNames({"loop", "candidates", "exact", "repetition"})
    ->ArgsProduct({{0, 1}, {8, 64}, {0}, {0, 1}})
    ->Args({0, 8, 1, 0})
    ->Args({1, 8, 1, 0})
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace kvcore

int main(int argc, char** argv) {
  kvcore::SetNumThreads(1);
  kvcore::CheckFirst();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
