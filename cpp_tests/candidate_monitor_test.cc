#include "detect/candidate_monitor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"
#include "support/detect_oracle.h"

namespace kvcore {
namespace {

using detect_oracle::Judge;
using detect_oracle::MakeText;
using detect_oracle::TextKind;
using detect_oracle::Tokens;
using detect_oracle::Verdict;

constexpr float kNanFloat = std::numeric_limits<float>::quiet_NaN();

// Push() of plain vectors. Outputs start as garbage: every entry must be written.
struct Batch {
  std::vector<int64_t> ids, tokens;
  std::vector<float> entropy;
  std::vector<uint8_t> firing, step_end;

  void Add(int64_t id, int64_t token, float nats) {
    ids.push_back(id);
    tokens.push_back(token);
    entropy.push_back(nats);
  }
  void Push(CandidateMonitor* monitor) {
    const int64_t n = static_cast<int64_t>(ids.size());
    firing.assign(n, 77);
    step_end.assign(n, 77);
    monitor->Push(MakeView(ids.data(), DType::kI64, {n}), MakeView(tokens.data(), DType::kI64, {n}),
                  MakeView(entropy.data(), DType::kF32, {n}),
                  MakeView(firing.data(), DType::kU8, {n}),
                  MakeView(step_end.data(), DType::kU8, {n}));
  }
};

Firing PushOne(CandidateMonitor* monitor, int64_t id, int64_t token, float nats = 0.5f) {
  Batch batch;
  batch.Add(id, token, nats);
  batch.Push(monitor);
  return static_cast<Firing>(batch.firing[0]);
}

std::shared_ptr<const TokenBytes> Letters() {
  return std::make_shared<TokenBytes>(std::vector<std::string_view>{"a", "b", "c\n\n", "", "\n"});
}

void ExpectSame(double a, double b) {
  EXPECT_TRUE(a == b || (std::isnan(a) && std::isnan(b))) << a << " " << b;
}

// Texts of all kinds run side by side, each ending or firing on its own.
class MonitorAgainstOracle : public testing::TestWithParam<std::tuple<bool, bool, int>> {};

TEST_P(MonitorAgainstOracle, EveryCandidateFiresWhereItsOwnOracleFires) {
  const auto [exact, repetition, num_threads] = GetParam();
  const int threads_before = NumThreads();
  SetNumThreads(num_threads);
  DetectorConfig config;
  config.gzip_exact = exact;
  config.repetition = repetition;
  config.repetition_min_tokens = 40;

  // One vocabulary for all candidates: concatenated tables with shifted ids.
  constexpr int kNumTexts = 42;
  std::vector<std::string> vocabulary;
  std::vector<std::vector<int64_t>> tokens(kNumTexts);
  std::vector<std::vector<float>> nats(kNumTexts);
  for (uint64_t i = 0; i < kNumTexts; ++i) {
    const auto kind = static_cast<TextKind>(i % (1 + uint64_t(TextKind::kLast)));
    const int64_t token_bytes = i % 3 ? 6 : 1;  // single bytes repeat as tokens too
    const Tokens cut = detect_oracle::Cut(MakeText(kind, 1300, 300 + i), token_bytes, i);
    for (int64_t id : cut.ids) tokens[i].push_back(id + int64_t(vocabulary.size()));
    for (int64_t id = 0; id < cut.table->size(); ++id) vocabulary.emplace_back((*cut.table)[id]);
    std::mt19937_64 rng(i);
    const bool incoherent = i % 5 == 4;
    for (size_t t = 0; t < cut.ids.size(); ++t) {
      nats[i].push_back((incoherent && t > 60 ? 6.5f : 0.5f) + float(rng() % 1000) / 999.0f);
    }
  }
  const auto table = std::make_shared<TokenBytes>(
      std::vector<std::string_view>(vocabulary.begin(), vocabulary.end()));

  CandidateMonitor monitor(config, table);
  std::vector<int64_t> ids;
  std::vector<Verdict> want;
  for (int i = 0; i < kNumTexts; ++i) {
    ids.push_back(monitor.Open(true));
    want.push_back(Judge(tokens[i], nats[i], *table, config));
  }
  std::vector<int> kinds(4, 0);
  for (size_t t = 0; t < 1300; ++t) {
    Batch batch;
    std::vector<int> who;
    for (int i = 0; i < kNumTexts; ++i) {
      if (t >= tokens[i].size()) continue;
      batch.Add(ids[i], tokens[i][t], nats[i][t]);
      who.push_back(i);
    }
    batch.Push(&monitor);
    for (size_t b = 0; b < who.size(); ++b) {
      const Verdict& v = want[who[b]];
      const int64_t now = int64_t(t) + 1;
      const Firing expected = v.fired_at == now ? v.firing : Firing::kNone;
      ASSERT_EQ(batch.firing[b], uint8_t(expected)) << "text " << who[b] << " token " << now;
      ASSERT_EQ(batch.step_end[b], v.step_ended_at == now) << "text " << who[b];
      kinds[size_t(expected)]++;
    }
  }
  for (int i = 0; i < kNumTexts; ++i) {
    EXPECT_EQ(monitor.Text(ids[i]), want[i].text);
    EXPECT_EQ(monitor.NumTokens(ids[i]), int64_t(tokens[i].size()));
    EXPECT_EQ(monitor.FiredAt(ids[i]), want[i].fired_at);
    ExpectSame(monitor.MaxMeanEntropy(ids[i]), float(want[i].max_mean_entropy));
    ExpectSame(monitor.GzipRatio(ids[i]), want[i].last_ratio);
    if (exact) ExpectSame(monitor.MinGzipRatio(ids[i]), want[i].min_ratio);
    if (!std::isnan(want[i].min_ratio)) {
      EXPECT_GE(monitor.MinGzipRatio(ids[i]), want[i].min_ratio);
    }
  }
  EXPECT_GT(kinds[1], 3);  // every outcome is exercised
  EXPECT_GT(kinds[2], 3);
  EXPECT_EQ(kinds[3] > 0, repetition);
  SetNumThreads(threads_before);
}

INSTANTIATE_TEST_SUITE_P(Modes, MonitorAgainstOracle,
                         testing::Combine(testing::Bool(), testing::Bool(), testing::Values(1, 2)));

TEST(CandidateMonitor, TestsInOrderEntropyGzipRepetition) {
  const auto fire = [](bool entropy, bool gzip) {
    DetectorConfig config;
    config.entropy = entropy;
    config.gzip = gzip;
    config.repetition = true;
    config.entropy_guard = config.repetition_min_tokens = config.gzip_window = 100;
    config.gzip_threshold = 0.5;  // 100 equal bytes: ratio 0.23
    CandidateMonitor monitor(config, Letters());
    const int64_t id = monitor.Open(true);
    for (int i = 1; i < 100; ++i) EXPECT_EQ(PushOne(&monitor, id, 0, 9.0f), Firing::kNone) << i;
    return PushOne(&monitor, id, 0, 9.0f);
  };
  EXPECT_EQ(fire(true, true), Firing::kEntropy);
  EXPECT_EQ(fire(false, true), Firing::kGzip);
  EXPECT_EQ(fire(false, false), Firing::kRepetition);
}

TEST(CandidateMonitor, FiresOnceAndThenOnlyCollectsText) {
  CandidateMonitor monitor({}, Letters());
  const int64_t id = monitor.Open(true);
  for (int i = 1; i <= 23; ++i) EXPECT_EQ(PushOne(&monitor, id, 0, 9.0f), Firing::kNone);
  EXPECT_EQ(PushOne(&monitor, id, 0, 9.0f), Firing::kEntropy);
  for (int i = 0; i < 900; ++i) EXPECT_EQ(PushOne(&monitor, id, 0, 9.0f), Firing::kNone);
  EXPECT_EQ(monitor.FiredAt(id), 24);
  EXPECT_EQ(monitor.NumTokens(id), 924);
  EXPECT_EQ(monitor.Text(id), std::string(924, 'a'));
  EXPECT_TRUE(std::isnan(monitor.MinGzipRatio(id)));
}

TEST(CandidateMonitor, UnscreenedCandidateOnlyHasTextAndStepEnd) {
  CandidateMonitor monitor({}, Letters());
  const int64_t id = monitor.Open(false);
  for (int i = 0; i < 900; ++i) EXPECT_EQ(PushOne(&monitor, id, 0, kNanFloat), Firing::kNone);
  Batch batch;
  batch.Add(id, 2, kNanFloat);
  batch.Push(&monitor);
  EXPECT_EQ(batch.step_end[0], 1);
  EXPECT_EQ(monitor.StepEnd(id), 903);
  EXPECT_EQ(monitor.FiredAt(id), 0);
  EXPECT_TRUE(std::isnan(monitor.MaxMeanEntropy(id)));
  EXPECT_TRUE(std::isnan(monitor.MinGzipRatio(id)));
  EXPECT_EQ(monitor.GzipRatio(id),
            double(detect_oracle::GzipBytes(monitor.Text(id).substr(103))) / 800);
}

TEST(CandidateMonitor, EmptyBatchIsLegal) {
  CandidateMonitor monitor({}, Letters());
  Batch().Push(&monitor);
}

// A bad entry anywhere leaves every candidate as it was.
TEST(CandidateMonitor, BadInputChangesNothing) {
  CandidateMonitor monitor({}, Letters());
  const int64_t a = monitor.Open(true), b = monitor.Open(true), closed = monitor.Open(true);
  monitor.Close(closed);
  const auto rejects = [&](int64_t id, int64_t token, float nats, const std::string& word) {
    Batch batch;
    batch.Add(a, 1, 0.5f);
    batch.Add(id, token, nats);
    try {
      batch.Push(&monitor);
      ADD_FAILURE() << "accepted " << word;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
    }
    EXPECT_EQ(monitor.NumTokens(a), 0);
    EXPECT_EQ(monitor.NumTokens(b), 0);
    EXPECT_EQ(monitor.Text(a), "");
    EXPECT_EQ(batch.firing, std::vector<uint8_t>(2, 77));
  };
  rejects(closed, 0, 0.5f, "ids");
  rejects(-1, 0, 0.5f, "ids");
  rejects(a, 0, 0.5f, "twice");
  rejects(b, 5, 0.5f, "tokens");
  rejects(b, -1, 0.5f, "tokens");
  rejects(b, 0, kNanFloat, "candidate 1");
  rejects(b, 0, std::numeric_limits<float>::infinity(), "entropy");
  Batch good;
  good.Add(a, 1, 0.5f);
  good.Add(b, 0, 0.5f);
  good.Push(&monitor);
  EXPECT_EQ(monitor.Text(a), "b");

  int64_t id = a, token = 0;
  float nats = 0;
  uint8_t firing[2] = {}, step_end = 0;
  EXPECT_THROW(monitor.Push(MakeView(&id, DType::kI64, {1}), MakeView(&token, DType::kI64, {1}),
                            MakeView(&nats, DType::kF32, {1}), MakeView(firing, DType::kU8, {2}),
                            MakeView(&step_end, DType::kU8, {1})),
               Error);
  EXPECT_EQ(monitor.NumTokens(a), 1);
}

TEST(CandidateMonitor, ClosedCandidatesAreUnknown) {
  CandidateMonitor monitor({}, Letters());
  const int64_t id = monitor.Open(true);
  EXPECT_EQ(monitor.num_open(), 1);
  monitor.Close(id);
  EXPECT_EQ(monitor.num_open(), 0);
  EXPECT_NE(monitor.Open(true), id);
  EXPECT_THROW(monitor.Close(id), Error);
  EXPECT_THROW(monitor.Text(id), Error);
  EXPECT_THROW(monitor.FiredAt(id), Error);
  EXPECT_THROW(monitor.GzipRatio(id), Error);
}

TEST(DetectorConfig, ValidateNamesTheFieldOfAnEnabledTestOnly) {
  struct Bad {
    const char* field;
    std::function<void(DetectorConfig*)> spoil;
    std::function<void(DetectorConfig*)> disable;
  };
  const auto no_entropy = [](DetectorConfig* c) { c->entropy = false; };
  const auto no_gzip = [](DetectorConfig* c) { c->gzip = false; };
  const auto no_repetition = [](DetectorConfig* c) { c->repetition = false; };
  const std::vector<Bad> bad = {
      {"entropy_threshold", [](DetectorConfig* c) { c->entropy_threshold = kNanFloat; },
       no_entropy},
      {"entropy_window", [](DetectorConfig* c) { c->entropy_window = 0; }, no_entropy},
      {"entropy_guard", [](DetectorConfig* c) { c->entropy_guard = -1; }, no_entropy},
      {"gzip_threshold", [](DetectorConfig* c) { c->gzip_threshold = 0; }, no_gzip},
      {"gzip_window", [](DetectorConfig* c) { c->gzip_window = 0; }, no_gzip},
      {"repetition_max_pattern_size", [](DetectorConfig* c) { c->repetition_max_pattern_size = 0; },
       no_repetition},
      {"repetition_min_count", [](DetectorConfig* c) { c->repetition_min_count = 1; },
       no_repetition},
      {"repetition_min_tokens", [](DetectorConfig* c) { c->repetition_min_tokens = -1; },
       no_repetition},
  };
  for (const Bad& b : bad) {
    DetectorConfig config;
    config.repetition = true;
    EXPECT_NO_THROW(config.Validate());
    b.spoil(&config);
    try {
      CandidateMonitor(config, Letters());
      ADD_FAILURE() << b.field;
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()).rfind(b.field, 0), 0u) << e.what();
    }
    b.disable(&config);
    EXPECT_NO_THROW(CandidateMonitor(config, Letters())) << b.field;
  }
  EXPECT_THROW(CandidateMonitor({}, nullptr), Error);
}

}  // namespace
}  // namespace kvcore
