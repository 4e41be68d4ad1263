// Packed linear layers equal their definition in double, and a row's bits depend on the row alone.
#include "ops/linear.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

#include "base/parallel.h"
#include "cpu/cpu_ops.h"
#include "ops/linear_layout.h"
#include "support/isa_levels.h"
#include "support/lane_fixture.h"

namespace kvcore {
namespace {

struct Layer {
  OwnedTensor weight, bias;  // packed; zero past the last output
  int64_t inputs, outputs;
  bool gated;
};

Layer MakeLayer(DType dtype, int64_t inputs, int64_t outputs, bool gated, uint64_t seed) {
  const int64_t group = gated ? 2 : 1, panels = (outputs + 15) / 16 * group;
  Layer layer{OwnedTensor(dtype, {panels, inputs, 16}), OwnedTensor(DType::kF32, {panels, 16}),
              inputs, outputs, gated};
  std::mt19937_64 rng(seed);
  layer.weight.FillNormal(rng);
  layer.bias.FillNormal(rng);
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t j = 0; j < 16; ++j)
      if (p / group * 16 + j >= outputs) {
        layer.bias.Set({p, j}, 0);
        for (int64_t k = 0; k < inputs; ++k) layer.weight.Set({p, k, j}, 0);
      }
  return layer;
}

OwnedTensor Apply(const Layer& layer, const OwnedTensor& x, bool with_bias) {
  const int64_t rows = x.view().shape[0], stride = layer.outputs + 3;
  OwnedTensor out(DType::kF32, {rows, layer.outputs}, {stride, 1});
  out.Fill(std::nan(""));
  LinearParams p;
  p.x = x.view();
  p.weight = layer.weight.view();
  if (with_bias) p.bias = layer.bias.view();
  p.out = out.view();
  p.gated = layer.gated;
  LinearCpu(p, 0);
  for (int64_t r = 0; r + 1 < rows; ++r)
    for (int64_t i = layer.outputs; i < stride; ++i)
      EXPECT_TRUE(std::isnan(out.At(r * stride + i))) << "written past row " << r;
  return out;
}

// The sum and the sum of magnitudes of one output.
std::pair<double, double> Sum(const Layer& layer, const OwnedTensor& x, int64_t row, int64_t panel,
                              int64_t j, bool with_bias) {
  double sum = with_bias ? layer.bias.Get({panel, j}) : 0, size = std::abs(sum);
  for (int64_t k = 0; k < layer.inputs; ++k) {
    const double term = x.Get({row, k}) * layer.weight.Get({panel, k, j});
    sum += term;
    size += std::abs(term);
  }
  return {sum, size};
}

void ExpectDefinition(const Layer& layer, const OwnedTensor& x, bool with_bias) {
  const OwnedTensor out = Apply(layer, x, with_bias);
  // Every addition and product rounds once, by 2^-24 of at most the sum of magnitudes.
  const double rounding = static_cast<double>(layer.inputs + 2) * std::ldexp(2.0, -24);
  for (int64_t r = 0; r < x.view().shape[0]; ++r)
    for (int64_t n = 0; n < layer.outputs; ++n) {
      const int64_t panel = n / 16, j = n % 16;
      const double got = out.Get({r, n});
      if (!layer.gated) {
        const auto [sum, size] = Sum(layer, x, r, panel, j, with_bias);
        ASSERT_NEAR(got, sum, rounding * size) << r << " " << n;
        continue;
      }
      const auto [z, z_size] = Sum(layer, x, r, 2 * panel, j, with_bias);
      const auto [up, up_size] = Sum(layer, x, r, 2 * panel + 1, j, with_bias);
      const double silu = z / (1 + std::exp(-z));
      // silu is 1.1-Lipschitz; its own arithmetic adds some roundings (exp: 2e-7).
      const double bound = rounding * (1.1 * z_size * std::abs(up) + std::abs(silu) * up_size +
                                       1.1 * rounding * z_size * up_size);
      ASSERT_NEAR(got, silu * up, bound + 1e-6 * std::abs(silu * up)) << r << " " << n;
    }
}

OwnedTensor Rows(int64_t rows, int64_t inputs, uint64_t seed) {
  OwnedTensor x(DType::kF32, {rows, inputs}, {inputs + 5, 1});
  std::mt19937_64 rng(seed);
  x.Fill(std::nan(""));
  OwnedTensor dense(DType::kF32, {rows, inputs});
  dense.FillNormal(rng);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < inputs; ++k) x.Set({r, k}, dense.Get({r, k}));
  return x;
}

class LinearTest : public testing::TestWithParam<std::tuple<Isa, DType, bool>> {
 protected:
  LinearTest() : isa_(std::get<0>(GetParam())) {}
  Layer Make(int64_t inputs, int64_t outputs, uint64_t seed) const {
    return MakeLayer(std::get<1>(GetParam()), inputs, outputs, std::get<2>(GetParam()), seed);
  }
  WithIsa isa_;
};

INSTANTIATE_TEST_SUITE_P(All, LinearTest,
                         testing::Combine(testing::ValuesIn(SupportedIsas()),
                                          testing::Values(DType::kF32, DType::kBF16),
                                          testing::Bool()),
                         [](const auto& info) {
                           return std::string(IsaName(std::get<0>(info.param))) + "_" +
                                  DTypeName(std::get<1>(info.param)) +
                                  (std::get<2>(info.param) ? "_gated" : "_plain");
                         });

TEST_P(LinearTest, EqualsItsDefinitionForEveryShape) {
  for (int64_t inputs : {1, 7, 255, 256, 257, 600})
    for (int64_t outputs : {1, 15, 16, 17, 32, 40})
      for (int64_t rows : {1, 2, 3, 5, 6, 7, 12, 13, 25})
        for (bool with_bias : {false, true})
          ExpectDefinition(Make(inputs, outputs, 3), Rows(rows, inputs, 4), with_bias);
}

TEST_P(LinearTest, ManyRowsAreLikeFew) {
  for (int64_t rows : {95, 96, 97, 200}) ExpectDefinition(Make(70, 33, 5), Rows(rows, 70, 6), true);
}

TEST_P(LinearTest, ARowHasTheSameBitsInEveryBatchAndWithAnyThreads) {
  const int64_t inputs = 515;
  const Layer layer = Make(inputs, 100, 7);
  const OwnedTensor x = Rows(120, inputs, 8), all = Apply(layer, x, true);
  const int threads = NumThreads();
  for (int64_t rows : {1, 2, 5, 8, 13, 33, 97})
    for (int n : {1, 3}) {
      SetNumThreads(n);
      OwnedTensor part(DType::kF32, {rows, inputs});
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; k < inputs; ++k) part.Set({r, k}, x.Get({120 - rows + r, k}));
      const OwnedTensor got = Apply(layer, part, true);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < 100; ++i)
          ASSERT_EQ(got.Get({r, i}), all.Get({120 - rows + r, i})) << rows << " " << r << " " << i;
    }
  SetNumThreads(threads);
}

TEST_P(LinearTest, ANumberThatIsNotFiniteStaysInItsRow) {
  for (double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    const Layer layer = Make(64, 32, 9);
    OwnedTensor x = Rows(3, 64, 10);
    const OwnedTensor before = Apply(layer, x, false);
    x.Set({1, 20}, bad);
    const OwnedTensor after = Apply(layer, x, false);
    int64_t finite = 0;
    for (int64_t i = 0; i < 32; ++i) {
      EXPECT_EQ(after.Get({0, i}), before.Get({0, i}));
      EXPECT_EQ(after.Get({2, i}), before.Get({2, i}));
      finite += std::isfinite(after.Get({1, i}));
    }
    // silu(-inf) * finite is 0 or NaN; nothing else may look like a number.
    if (std::isnan(bad) || !layer.gated) {
      EXPECT_EQ(finite, 0) << bad;
    }
  }
}

TEST(LinearErrors, NameTheArgument) {
  const Layer layer = MakeLayer(DType::kF32, 8, 20, false, 1);
  OwnedTensor x(DType::kF32, {2, 8}), wide(DType::kF32, {2, 9}), half(DType::kBF16, {2, 8}),
      out(DType::kF32, {2, 20}), small(DType::kF32, {2, 16}), large(DType::kF32, {2, 33}),
      bias(DType::kF32, {1, 16}), f16(DType::kF16, {2, 8, 16}), odd(DType::kF32, {3, 8, 16});
  const auto message = [&](const TensorView& in, const TensorView& weight, const TensorView& b,
                           const TensorView& result, bool gated) {
    LinearParams p;
    p.x = in;
    p.weight = weight;
    p.bias = b;
    p.out = result;
    p.gated = gated;
    try {
      LinearCpu(p, 0);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const TensorView w = layer.weight.view(), none;
  EXPECT_EQ(message(x.view(), w, none, out.view(), false), "");
  EXPECT_NE(message(half.view(), w, none, out.view(), false).find("x: "), std::string::npos);
  EXPECT_NE(message(wide.view(), w, none, out.view(), false).find("weight: "), std::string::npos);
  EXPECT_NE(message(x.view(), f16.view(), none, out.view(), false).find("weight: "),
            std::string::npos);
  EXPECT_NE(message(x.view(), odd.view(), none, out.view(), true).find("even number"),
            std::string::npos);
  EXPECT_NE(message(x.view(), w, bias.view(), out.view(), false).find("bias: "), std::string::npos);
  EXPECT_NE(message(x.view(), w, none, small.view(), false).find("out: "), std::string::npos);
  EXPECT_NE(message(x.view(), w, none, large.view(), false).find("out: "), std::string::npos);
}

TEST(LinearErrors, NoRowsIsLegal) {
  const Layer layer = MakeLayer(DType::kF32, 8, 20, false, 1);
  Apply(layer, OwnedTensor(DType::kF32, {0, 8}), true);
}

}  // namespace
}  // namespace kvcore
