#include "base/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace kvcore {
namespace {

float FromBits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Value of a 16-bit float from its fields, in double: exact for every finite value.
double Decode(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1)
    return mantissa != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

template <typename T>
struct Format;
template <>
struct Format<BFloat16> {
  static constexpr int kExponent = 8, kMantissa = 7;
};
template <>
struct Format<Half> {
  static constexpr int kExponent = 5, kMantissa = 10;
};

template <typename T>
class SixteenBits : public testing::Test {};
using Types = testing::Types<BFloat16, Half>;
TYPED_TEST_SUITE(SixteenBits, Types);

TYPED_TEST(SixteenBits, ToFloatIsExactForEveryBitPattern) {
  using F = Format<TypeParam>;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto b = static_cast<uint16_t>(bits);
    const double want = Decode(b, F::kExponent, F::kMantissa);
    const float got = ToFloat(TypeParam{b});
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << bits;
    } else {
      EXPECT_EQ(got, want) << bits;
      EXPECT_EQ(std::signbit(got), std::signbit(want)) << bits;
    }
  }
}

TYPED_TEST(SixteenBits, RoundTripKeepsEveryBitPattern) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const TypeParam x{static_cast<uint16_t>(bits)};
    const TypeParam back = FromFloat<TypeParam>(ToFloat(x));
    if (std::isnan(ToFloat(x)))
      EXPECT_TRUE(std::isnan(ToFloat(back))) << bits;
    else
      EXPECT_EQ(back.bits, x.bits) << bits;
  }
}

// The nearest of all finite values, the even one of two equally near; infinity from half a step
// above the largest on.
template <typename T>
uint16_t Nearest(float f) {
  using F = Format<T>;
  const uint16_t sign = std::signbit(f) ? 0x8000 : 0;
  const double x = std::fabs(static_cast<double>(f));
  const auto infinity = static_cast<uint16_t>(((1 << F::kExponent) - 1) << F::kMantissa);
  const auto value = [](uint16_t bits) { return Decode(bits, F::kExponent, F::kMantissa); };
  uint16_t low = 0, high = infinity;  // value(low) <= x < value(high)
  if (std::isinf(x)) return sign | infinity;
  while (high - low > 1) {
    const auto mid = static_cast<uint16_t>((low + high) / 2);
    (value(mid) <= x ? low : high) = mid;
  }
  const double step = high == infinity ? value(low) - value(static_cast<uint16_t>(low - 1))
                                       : value(high) - value(low);
  const double above = x - value(low);
  const bool up = above > step / 2 || (above == step / 2 && (low & 1) != 0);
  return static_cast<uint16_t>(sign | (up ? high : low));
}

TYPED_TEST(SixteenBits, FromFloatRoundsToNearestEven) {
  std::mt19937 rng(1);
  const auto check = [](uint32_t bits) {
    const float f = FromBits(bits);
    if (std::isnan(f)) return;
    ASSERT_EQ(FromFloat<TypeParam>(f).bits, Nearest<TypeParam>(f)) << std::hex << bits;
  };
  for (int i = 0; i < 200000; ++i) check(static_cast<uint32_t>(rng()));
  // Around every value and every midpoint.
  for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const float f = ToFloat(TypeParam{static_cast<uint16_t>(bits)});
    uint32_t wide;
    std::memcpy(&wide, &f, 4);
    const uint32_t half_step = 1u << (22 - Format<TypeParam>::kMantissa);
    for (uint32_t at : {wide, wide + half_step})
      for (uint32_t near : {at - 1, at, at + 1}) check(near & 0x7fffffffu);
  }
}

TYPED_TEST(SixteenBits, NanStaysNan) {
  for (uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0x7fc00000u})
    EXPECT_TRUE(std::isnan(ToFloat(FromFloat<TypeParam>(FromBits(bits))))) << bits;
}

TEST(DType, BytesAndNames) {
  EXPECT_EQ(DTypeBytes(DType::kF32), 4);
  EXPECT_EQ(DTypeBytes(DType::kBF16), 2);
  EXPECT_EQ(DTypeBytes(DType::kF16), 2);
  EXPECT_EQ(DTypeBytes(DType::kI32), 4);
  EXPECT_EQ(DTypeBytes(DType::kI64), 8);
  EXPECT_EQ(DTypeBytes(DType::kU8), 1);
  EXPECT_EQ(DTypeBytes(DType::kF64), 8);
  EXPECT_EQ(DTypeBytes(DType::kBool), 1);
  EXPECT_STREQ(DTypeName(DType::kBF16), "bfloat16");
}

}  // namespace
}  // namespace kvcore
