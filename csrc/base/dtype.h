// Element types of tensors, and the two 16-bit float storage types with exact conversions.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvcore {

enum class DType : int8_t { kF32, kBF16, kF16, kI32, kI64, kU8, kF64, kBool };

constexpr int64_t DTypeBytes(DType t) {
  switch (t) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kI64:
    case DType::kF64:
      return 8;
    case DType::kU8:
    case DType::kBool:
      return 1;
  }
  return 0;
}

constexpr const char* DTypeName(DType t) {
  switch (t) {
    case DType::kF32:
      return "float32";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
    case DType::kU8:
      return "uint8";
    case DType::kF64:
      return "float64";
    case DType::kBool:
      return "bool";
  }
  return "?";
}

// Storage only: arithmetic happens in float.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

// The type of T's numbers.
template <typename T>
inline constexpr DType kDTypeOf = DType::kBool;
template <>
inline constexpr DType kDTypeOf<float> = DType::kF32;
template <>
inline constexpr DType kDTypeOf<BFloat16> = DType::kBF16;
template <>
inline constexpr DType kDTypeOf<Half> = DType::kF16;
template <>
inline constexpr DType kDTypeOf<int32_t> = DType::kI32;
template <>
inline constexpr DType kDTypeOf<int64_t> = DType::kI64;
template <>
inline constexpr DType kDTypeOf<uint8_t> = DType::kU8;
template <>
inline constexpr DType kDTypeOf<double> = DType::kF64;

inline float ToFloat(float x) { return x; }

inline float ToFloat(BFloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &wide, 4);
  return f;
}

inline float ToFloat(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1fu, mantissa = x.bits & 0x3ffu;
  uint32_t wide;
  float f;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in float
    f = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    std::memcpy(&wide, &f, 4);
    wide |= sign;
  } else if (exponent == 31) {
    wide = sign | 0x7f800000u | (mantissa << 13);
  } else {
    wide = sign | ((exponent + 112) << 23) | (mantissa << 13);
  }
  std::memcpy(&f, &wide, 4);
  return f;
}

template <typename T>
T FromFloat(float x);

template <>
inline float FromFloat<float>(float x) {
  return x;
}

// Round to nearest, ties to even; NaN stays NaN.
template <>
inline BFloat16 FromFloat<BFloat16>(float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  if ((wide & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((wide >> 16) | 0x40u)};
  wide += 0x7fffu + ((wide >> 16) & 1u);
  return {static_cast<uint16_t>(wide >> 16)};
}

// Round to nearest, ties to even; overflow gives infinity.
template <>
inline Half FromFloat<Half>(float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  const uint16_t sign = static_cast<uint16_t>((wide >> 16) & 0x8000u);
  wide &= 0x7fffffffu;
  if (wide > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (wide >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (wide < 0x38800000u) {  // subnormal half: let float addition round at 2^-24
    float f;
    std::memcpy(&f, &wide, 4);
    f += 0.5f;
    std::memcpy(&wide, &f, 4);
    return {static_cast<uint16_t>(sign | (wide - 0x3f000000u))};
  }
  wide += 0xfffu + ((wide >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((wide - 0x38000000u) >> 13))};
}

}  // namespace kvcore
