// Entropy, log probability and draws equal a full sort in double; draws follow the distribution.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "base/parallel.h"
#include "base/rng.h"
#include "cpu/cpu_ops.h"
#include "support/isa_levels.h"
#include "support/lane_fixture.h"
#include "support/sample_oracle.h"

namespace kvcore {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Filter {
  float temperature = 1;
  int32_t top_k = 0;
  float top_p = 1;
  float min_p = 0;
};

struct Draws {
  std::vector<int64_t> token;
  std::vector<double> entropy, logprob;
};

// One draw per row of `logits`; row r uses filter[r % filters], key `key` and counter r.
Draws Sample(const OwnedTensor& logits, int64_t vocab, const std::vector<Filter>& filters,
             int64_t key) {
  const TensorView view = logits.view();
  const int64_t rows = view.shape[0];
  OwnedTensor temperature(DType::kF32, {rows}), top_k(DType::kI32, {rows}),
      top_p(DType::kF32, {rows}), min_p(DType::kF32, {rows}), rng_key(DType::kI64, {rows}),
      counter(DType::kI64, {rows}), token(DType::kI64, {rows}), entropy(DType::kF32, {rows}),
      logprob(DType::kF32, {rows});
  for (int64_t r = 0; r < rows; ++r) {
    const Filter& f = filters[static_cast<size_t>(r) % filters.size()];
    temperature.Set({r}, f.temperature);
    top_k.Set({r}, f.top_k);
    top_p.Set({r}, f.top_p);
    min_p.Set({r}, f.min_p);
    rng_key.Set({r}, static_cast<double>(key));
    counter.Set({r}, static_cast<double>(r));
  }
  const int64_t bytes = SampleTokensScratchBytes(view.shape[1], NumThreads());
  std::vector<uint8_t> scratch(static_cast<size_t>(bytes) + 64, 0xcd);
  SampleTokensParams p;
  p.logits = view;
  p.temperature = temperature.view();
  p.top_k = top_k.view();
  p.top_p = top_p.view();
  p.min_p = min_p.view();
  p.rng_key = rng_key.view();
  p.rng_counter = counter.view();
  p.token = token.view();
  p.entropy = entropy.view();
  p.logprob = logprob.view();
  p.scratch = MakeView(scratch.data(), DType::kU8, {bytes});
  p.vocab = vocab;
  SampleTokensCpu(p, 0);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(scratch[static_cast<size_t>(bytes) + i], 0xcd);
  Draws d;
  for (int64_t r = 0; r < rows; ++r) {
    d.token.push_back(static_cast<int64_t>(token.Get({r})));
    d.entropy.push_back(entropy.Get({r}));
    d.logprob.push_back(logprob.Get({r}));
  }
  return d;
}

std::vector<double> Row(const OwnedTensor& logits, int64_t row, int64_t vocab) {
  std::vector<double> out;
  for (int64_t id = 0; id < vocab; ++id) out.push_back(logits.Get({row, id}));
  return out;
}

double Uniform(int64_t key, int64_t row) {
  return UniformDouble(static_cast<uint64_t>(key), static_cast<uint64_t>(row));
}

// Draws the same row `draws` times under one filter and compares every draw with the oracle.
void ExpectOracle(DType dtype, const std::vector<double>& logits, const Filter& f, int64_t draws) {
  const int64_t vocab = static_cast<int64_t>(logits.size());
  OwnedTensor one(dtype, {1, vocab});
  for (int64_t id = 0; id < vocab; ++id) one.SetAt(id, logits[static_cast<size_t>(id)]);
  const std::vector<double> rounded = Row(one, 0, vocab);
  const SampleOracleResult want = SampleOracle(rounded, f.temperature, f.top_k, f.top_p, f.min_p);
  OwnedTensor table(dtype, {draws, vocab}, {0, 1});  // every row is the same memory
  for (int64_t id = 0; id < vocab; ++id) table.SetAt(id, rounded[static_cast<size_t>(id)]);

  const Draws got = Sample(table, vocab, {f}, 77);
  for (int64_t r = 0; r < draws; ++r) {
    ASSERT_NEAR(got.entropy[r], want.entropy, 1e-5 * (1 + want.entropy));
    ASSERT_GE(got.token[r], 0);
    ASSERT_LT(got.token[r], vocab);
    const double logprob = want.log_softmax[got.token[r]];
    ASSERT_NEAR(got.logprob[r], logprob, 1e-5 * (1 + std::abs(logprob)));
    // Float weights place the borders between tokens within 1e-5.
    const double u = Uniform(77, r), margin = want.Margin(u);
    if (margin <= 1e-5) continue;
    ASSERT_EQ(got.token[r], want.Token(u))
        << "draw " << r << ", uniform " << u << ", margin " << margin;
  }
}

std::vector<double> Normal(int64_t vocab, double scale, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal(0, scale);
  std::vector<double> x(static_cast<size_t>(vocab));
  for (double& v : x) v = normal(rng);
  return x;
}

class SampleTokensTest : public testing::TestWithParam<std::tuple<Isa, DType>> {
 protected:
  SampleTokensTest() : isa_(std::get<0>(GetParam())), dtype_(std::get<1>(GetParam())) {}
  WithIsa isa_;
  DType dtype_;
};

INSTANTIATE_TEST_SUITE_P(All, SampleTokensTest,
                         testing::Combine(testing::ValuesIn(SupportedIsas()),
                                          testing::Values(DType::kF32, DType::kBF16, DType::kF16)),
                         [](const auto& info) {
                           return std::string(IsaName(std::get<0>(info.param))) + "_" +
                                  DTypeName(std::get<1>(info.param));
                         });

const Filter kFilters[] = {{1, 0, 1},
                           {0, 0, 1},
                           {0, 20, 0.5f},
                           {0.7f, 20, 0.8f},
                           {0.6f, 0, 0.95f},
                           {1.5f, 0, 0.5f},
                           {1, 1, 1},
                           {1, 5, 1},
                           {1, 0, 1e-6f},
                           {2, 300, 0.9f},
                           {0.3f, 1000000, 1},
                           {1, 0, 1, 0.1f},
                           {0.7f, 20, 0.8f, 0.05f},
                           {2, 0, 0.9f, 0.3f},
                           {1.5f, 3, 1, 1},
                           {0, 0, 1, 0.5f},
                           {1, 0, 1, 1e-6f},
                           {0.6f, 0, 0.95f, 1e-30f},
                           {3, 0, 1, 0.7f}};

TEST_P(SampleTokensTest, EqualsTheOracleForEveryVocabulary) {
  for (int64_t vocab : {1, 2, 16, 127, 128, 129, 1000, 3001})
    for (double scale : {0.01, 3.0}) {
      const std::vector<double> logits = Normal(vocab, scale, static_cast<uint64_t>(vocab));
      for (const Filter& f : kFilters) {
        SCOPED_TRACE("vocab " + std::to_string(vocab) + " scale " + std::to_string(scale) + " T " +
                     std::to_string(f.temperature) + " k " + std::to_string(f.top_k) + " p " +
                     std::to_string(f.top_p) + " min p " + std::to_string(f.min_p));
        ExpectOracle(dtype_, logits, f, 40);
      }
    }
}

TEST_P(SampleTokensTest, EqualsTheOracleForALargeVocabulary) {
  for (double scale : {0.1, 2.0}) {
    const std::vector<double> logits = Normal(152064, scale, 5);
    for (const Filter& f : {Filter{1, 0, 1}, Filter{0.7f, 20, 0.8f}, Filter{0.6f, 0, 0.95f},
                            Filter{1, 0, 1, 0.02f}, Filter{1, 0, 0.9f, 0.3f}}) {
      SCOPED_TRACE("scale " + std::to_string(scale) + " T " + std::to_string(f.temperature));
      ExpectOracle(dtype_, logits, f, 6);
    }
  }
}

TEST_P(SampleTokensTest, EqualLogitsGoToTheLowerId) {
  std::vector<double> logits(700, -1.0);
  for (int64_t id : {650, 130, 131, 300}) logits[static_cast<size_t>(id)] = 2.0;
  for (const Filter& f : {Filter{0, 0, 1}, Filter{1, 2, 1}, Filter{1, 3, 0.5f}, Filter{1, 0, 1},
                          Filter{0.2f, 0, 0.6f}, Filter{1, 6, 1}})
    ExpectOracle(dtype_, logits, f, 60);
  ExpectOracle(dtype_, logits, {1, 0, 1, 1}, 60);  // min-p keeps all equals of the largest
  ExpectOracle(dtype_, logits, {1, 3, 1, 1}, 60);
  ExpectOracle(dtype_, std::vector<double>(700, 0.25), {0, 0, 1}, 2);
  ExpectOracle(dtype_, std::vector<double>(700, 0.25), {1, 0, 0.3f}, 60);
}

// Tokens at -inf change nothing: whole blocks of them, the first ids and the last, and at
// temperatures where any finite stand-in for -inf would be drawn.
TEST_P(SampleTokensTest, VocabularyWithTokensAtMinusInfinityEqualsTheOneWithoutThem) {
  const int64_t vocab = 700, draws = 3000;
  const std::vector<double> finite = Normal(71, 1, 6);
  std::vector<int64_t> ids;  // where the finite ones lie
  for (int64_t id = 3; id < vocab && ids.size() < finite.size(); id += id % 128 == 100 ? 200 : 5)
    ids.push_back(id);
  ASSERT_EQ(ids.size(), finite.size());
  ASSERT_LT(ids.back(), vocab - 1);
  OwnedTensor sparse(dtype_, {draws, vocab}, {0, 1}), dense(dtype_, {draws, 71}, {0, 1});
  for (int64_t id = 0; id < vocab; ++id) sparse.SetAt(id, -kInf);
  for (size_t i = 0; i < ids.size(); ++i) {
    sparse.SetAt(ids[i], finite[i]);
    dense.SetAt(static_cast<int64_t>(i), finite[i]);
  }
  const double entropy = SampleOracle(Row(dense, 0, 71), 1, 0, 1).entropy;
  for (const Filter& f : {Filter{1, 0, 1}, Filter{0, 0, 1}, Filter{1, 400, 1}, Filter{100, 0, 1},
                          Filter{100, 0, 0.99f}, Filter{3e38f, 0, 1}, Filter{3e38f, 400, 1},
                          Filter{3e38f, 0, 0.99f}, Filter{3e38f, 0, 1, 0.5f}}) {
    SCOPED_TRACE("T " + std::to_string(f.temperature) + " k " + std::to_string(f.top_k) + " p " +
                 std::to_string(f.top_p));
    const Draws got = Sample(sparse, vocab, {f}, 78), want = Sample(dense, 71, {f}, 78);
    std::vector<int> count(static_cast<size_t>(vocab), 0);
    int64_t moved = 0;
    for (size_t r = 0; r < static_cast<size_t>(draws); ++r) {
      ASSERT_NEAR(got.entropy[r], entropy, 1e-5 * (1 + entropy));
      ASSERT_GE(got.token[r], 0);
      ASSERT_LT(got.token[r], vocab);
      ++count[static_cast<size_t>(got.token[r])];
      moved += got.token[r] != ids[static_cast<size_t>(want.token[r])];
    }
    // Sums of other order round differently: a draw may fall on the other side of a border.
    EXPECT_LE(moved, 2);
    for (int64_t id = 0; id < vocab; ++id) {
      if (!std::binary_search(ids.begin(), ids.end(), id)) {
        ASSERT_EQ(count[id], 0) << "id " << id;
      } else if (f.temperature > 1e30f && f.top_p == 1) {  // uniform: every finite token is drawn
        EXPECT_GT(count[id], 0) << "id " << id;
      }
    }
  }
  OwnedTensor single(dtype_, {2, 300}, {0, 1});
  for (int64_t id = 0; id < 300; ++id) single.SetAt(id, -kInf);
  single.SetAt(299, -5);
  const Draws only = Sample(single, 300, {{1, 0, 1}}, 1);
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(only.token[r], 299);
    EXPECT_EQ(only.entropy[r], 0);
    EXPECT_EQ(only.logprob[r], 0);
  }
}

TEST_P(SampleTokensTest, ExtremeTemperaturesApproachGreedyAndUniform) {
  const std::vector<double> logits = Normal(40, 1, 7);
  for (float t : {1e-3f, 1e-30f, 1e-42f, 1e30f, 3e38f}) {
    SCOPED_TRACE(t);
    ExpectOracle(dtype_, logits, {t, 0, 1}, 100);
    ExpectOracle(dtype_, logits, {t, 10, 1}, 100);
    ExpectOracle(dtype_, logits, {t, 0, 0.9f}, 100);
    ExpectOracle(dtype_, logits, {t, 0, 1, 0.9f}, 100);
  }
}

TEST_P(SampleTokensTest, LargeLogitsStayExact) {
  std::vector<double> logits = Normal(300, 1, 8);
  for (double& z : logits) z += 30000;  // float16 holds these, 16 or more apart
  ExpectOracle(dtype_, logits, {1, 0, 1}, 20);
  for (double& z : logits) z = (z - 30000) * 10000;
  ExpectOracle(dtype_, logits, {1, 0, 1}, 20);
}

TEST_P(SampleTokensTest, UnusableRowsGetNoTokenAndSpoilNoOther) {
  const int64_t vocab = 260;
  OwnedTensor logits(dtype_, {5, vocab});
  std::mt19937_64 rng(9);
  logits.FillNormal(rng);
  const Draws clean = Sample(logits, vocab, {kFilters[3]}, 1);
  logits.Set({1, 259}, std::nan(""));
  logits.Set({2, 0}, kInf);
  for (int64_t id = 0; id < vocab; ++id) logits.Set({3, id}, -kInf);
  for (const Filter& f : {kFilters[3], Filter{0, 0, 1}}) {
    const Draws got = Sample(logits, vocab, {f}, 1);
    for (int64_t row : {1, 2, 3}) {
      EXPECT_EQ(got.token[row], -1);
      EXPECT_TRUE(std::isnan(got.entropy[row]));
      EXPECT_TRUE(std::isnan(got.logprob[row]));
    }
    for (int64_t row : {0, 4}) EXPECT_EQ(got.entropy[row], clean.entropy[row]);
  }
  const Draws got = Sample(logits, vocab, {kFilters[3]}, 1);
  for (int64_t row : {0, 4}) EXPECT_EQ(got.token[row], clean.token[row]);
}

TEST_P(SampleTokensTest, IdsPastVocabAndRowPaddingAreNeverRead) {
  const int64_t vocab = 133, columns = 150, stride = 163;
  OwnedTensor padded(dtype_, {3, columns}, {stride, 1}), tight(dtype_, {3, vocab});
  std::mt19937_64 rng(10);
  tight.FillNormal(rng);
  padded.Fill(std::nan(""));
  for (int64_t row = 0; row < 3; ++row)
    for (int64_t id = 0; id < vocab; ++id) padded.Set({row, id}, tight.Get({row, id}));
  const Draws a = Sample(padded, vocab, {kFilters[0]}, 2),
              b = Sample(tight, vocab, {kFilters[0]}, 2);
  EXPECT_EQ(a.token, b.token);
  EXPECT_EQ(a.entropy, b.entropy);
  EXPECT_EQ(a.logprob, b.logprob);
}

TEST_P(SampleTokensTest, DrawsFollowTheDistribution) {
  const int64_t draws = 20000;
  const std::vector<double> logits = {0.5, -1, 2, 1.5, 0, 0, 1, -2, 0.25, 1.75, -0.5, 0.75};
  for (const Filter& f :
       {Filter{1, 0, 1}, Filter{0.7f, 6, 1}, Filter{1.3f, 0, 0.8f}, Filter{1.3f, 0, 1, 0.2f}}) {
    OwnedTensor table(dtype_, {draws, 12}, {0, 1});
    for (int64_t id = 0; id < 12; ++id) table.SetAt(id, logits[static_cast<size_t>(id)]);
    const SampleOracleResult want = SampleOracle(logits, f.temperature, f.top_k, f.top_p, f.min_p);
    std::vector<double> count(12, 0.0);
    for (int64_t token : Sample(table, 12, {f}, 12345).token) ++count[static_cast<size_t>(token)];
    double chi2 = 0, inside = 0;
    for (size_t i = 0; i < want.kept.size(); ++i) {
      const double expected = want.probability[i] * draws, got = count[want.kept[i]];
      chi2 += (got - expected) * (got - expected) / expected;
      inside += got;
    }
    EXPECT_EQ(inside, draws) << "a token outside the kept set was drawn";
    EXPECT_LT(chi2, 31.3);  // 0.1 % point of chi-square with 11 degrees of freedom
  }
}

TEST_P(SampleTokensTest, ADrawDependsOnlyOnItsRow) {
  OwnedTensor logits(dtype_, {9, 400});
  std::mt19937_64 rng(11);
  logits.FillNormal(rng, 2);
  const Draws together = Sample(logits, 400, {kFilters[4]}, 3);
  for (int64_t row = 0; row < 9; ++row) {
    OwnedTensor prefix(dtype_, {row + 1, 400});  // the same counter, other company
    std::mt19937_64 other(static_cast<uint64_t>(row));
    prefix.FillNormal(other, 1);
    for (int64_t id = 0; id < 400; ++id) prefix.Set({row, id}, logits.Get({row, id}));
    const Draws got = Sample(prefix, 400, {kFilters[4]}, 3);
    EXPECT_EQ(got.token[row], together.token[row]);
    EXPECT_EQ(got.entropy[row], together.entropy[row]);
  }
}

TEST(SampleTokensErrors, NameTheArgument) {
  OwnedTensor logits(DType::kF32, {2, 10});
  const auto error = [&](const Filter& f, int64_t vocab) -> std::string {
    try {
      Sample(logits, vocab, {Filter{}, f}, 1);
    } catch (const Error& e) {
      return std::string(e.what()).substr(0, 9);
    }
    return "none";
  };
  EXPECT_EQ(error({}, 10), "none");
  EXPECT_EQ(error({.temperature = -1}, 10), "temperatu");
  EXPECT_EQ(error({.temperature = std::nanf("")}, 10), "temperatu");
  EXPECT_EQ(error({.temperature = INFINITY}, 10), "temperatu");
  EXPECT_EQ(error({.top_k = -1}, 10), "top_k[1]:");
  EXPECT_EQ(error({.top_p = 0}, 10), "top_p[1]:");
  EXPECT_EQ(error({.top_p = 1.01f}, 10), "top_p[1]:");
  EXPECT_EQ(error({.top_p = std::nanf("")}, 10), "top_p[1]:");
  EXPECT_EQ(error({.min_p = -0.1f}, 10), "min_p[1]:");
  EXPECT_EQ(error({.min_p = 1.01f}, 10), "min_p[1]:");
  EXPECT_EQ(error({.min_p = std::nanf("")}, 10), "min_p[1]:");
  EXPECT_EQ(error({}, 0), "vocab: ex");
  EXPECT_EQ(error({}, 11), "vocab: ex");
}

TEST(SampleTokensErrors, NoRowsIsLegal) {
  EXPECT_TRUE(Sample(OwnedTensor(DType::kF32, {0, 10}), 10, {Filter{}}, 1).token.empty());
}

}  // namespace
}  // namespace kvcore
