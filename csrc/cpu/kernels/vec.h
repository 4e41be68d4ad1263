// Vectors for the kernels: GCC vector extensions of W floats, loads from every storage type, exp.
//
// Everything lives in an unnamed namespace inside KV_ISA_NAMESPACE, and no standard header is
// included, so that an object file compiled for one instruction set leaks no symbol into another.
#pragma once

#include <stdint.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define KV_INLINE inline __attribute__((always_inline))

namespace kvcore {
namespace KV_ISA_NAMESPACE {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;  // floats in the widest vector
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

template <int W>
struct Vec {
  typedef float F __attribute__((vector_size(W * 4)));
  typedef int32_t I __attribute__((vector_size(W * 4)));
  typedef uint32_t U __attribute__((vector_size(W * 4)));
  typedef uint16_t H __attribute__((vector_size(W * 2)));
};
template <int W>
using VecF = typename Vec<W>::F;
template <int W>
using VecI = typename Vec<W>::I;
template <int W>
using VecU = typename Vec<W>::U;
template <int W>
using VecH = typename Vec<W>::H;

template <typename V>
KV_INLINE V Load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}
template <typename V>
KV_INLINE void Store(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}
template <int W>
KV_INLINE VecF<W> Splat(float x) {
  return x - VecF<W>{};
}
template <int W>
KV_INLINE VecI<W> Iota() {
  VecI<W> v;
  for (int i = 0; i < W; ++i) v[i] = i;
  return v;
}
template <int W>
KV_INLINE VecF<W> Max(VecF<W> a, VecF<W> b) {
  return a > b ? a : b;
}

// Two vectors that hold 2W adjacent elements; bf16 gives even and odd elements (a shift and a mask
// instead of shuffles), the others the lower and the upper half. StoreSpan is the inverse.
template <int W>
KV_INLINE void LoadSpan(const Bf16* p, VecF<W>& a, VecF<W>& b) {
  const VecU<W> x = Load<VecU<W>>(p);
  a = (VecF<W>)(x << 16);
  b = (VecF<W>)(x & 0xffff0000u);
}
template <int W>
KV_INLINE void LoadSpan(const float* p, VecF<W>& a, VecF<W>& b) {
  a = Load<VecF<W>>(p);
  b = Load<VecF<W>>(p + W);
}

template <int W>
KV_INLINE VecF<W> LoadHalf(const F16* p) {
#if defined(__AVX512F__)
  if constexpr (W == 16)  // maskz: the plain form warns of an uninitialised value in gcc 12
    return (VecF<W>)_mm512_maskz_cvtph_ps(0xffff, (__m256i)Load<VecH<W>>(p));
#endif
#if defined(__F16C__)
  if constexpr (W == 8) return (VecF<W>)_mm256_cvtph_ps((__m128i)Load<VecH<W>>(p));
  if constexpr (W == 4) {
    uint64_t x;
    __builtin_memcpy(&x, p, 8);
    return (VecF<W>)_mm_cvtph_ps(_mm_cvtsi64_si128(static_cast<long long>(x)));
  }
#endif
  // Moving the bits up by 13 makes a float 2^112 too small; subnormals come out right as well.
  const VecU<W> x = __builtin_convertvector(Load<VecH<W>>(p), VecU<W>);
  const VecF<W> small = (VecF<W>)((x & 0x7fffu) << 13);
  const VecU<W> finite = (VecU<W>)(small * 0x1p112f);
  const VecU<W> special = (VecU<W>)((x & 0x7c00u) == 0x7c00u);
  return (VecF<W>)(finite | (special & 0x7f800000u) | ((x & 0x8000u) << 16));
}
template <int W>
KV_INLINE void LoadSpan(const F16* p, VecF<W>& a, VecF<W>& b) {
  a = LoadHalf<W>(p);
  b = LoadHalf<W>(p + W);
}

// Round to nearest even, in the upper half of each word; NaN stays NaN.
template <int W>
KV_INLINE VecU<W> RoundBf16(VecF<W> f) {
  const VecU<W> x = (VecU<W>)f;
  const VecU<W> rounded = x + 0x7fffu + ((x >> 16) & 1u);
  return f == f ? rounded : (x | 0x400000u);
}
template <int W>
KV_INLINE void StoreSpan(Bf16* p, VecF<W> a, VecF<W> b) {
  Store(p, (RoundBf16<W>(a) >> 16) | (RoundBf16<W>(b) & 0xffff0000u));
}
template <int W>
KV_INLINE void StoreSpan(float* p, VecF<W> a, VecF<W> b) {
  Store(p, a);
  Store(p + W, b);
}
KV_INLINE F16 RoundF16(float f) {
  uint32_t x;
  __builtin_memcpy(&x, &f, 4);
  const uint32_t sign = (x >> 16) & 0x8000u;
  x &= 0x7fffffffu;
  uint32_t y;
  if (x > 0x7f800000u) {
    y = 0x7e00u;
  } else if (x >= 0x477ff000u) {
    y = 0x7c00u;
  } else if (x < 0x38800000u) {  // subnormal half: float addition rounds at 2^-24
    float shifted;
    __builtin_memcpy(&shifted, &x, 4);
    shifted += 0.5f;
    __builtin_memcpy(&y, &shifted, 4);
    y -= 0x3f000000u;
  } else {
    y = (x + 0xfffu + ((x >> 13) & 1u) - 0x38000000u) >> 13;
  }
  return {static_cast<uint16_t>(sign | y)};
}
template <int W>
KV_INLINE void StoreSpan(F16* p, VecF<W> a, VecF<W> b) {
  for (int i = 0; i < W; ++i) {
    p[i] = RoundF16(a[i]);
    p[W + i] = RoundF16(b[i]);
  }
}

template <typename A, typename B>
constexpr bool kSame = false;
template <typename A>
constexpr bool kSame<A, A> = true;

// The two dims of W slots of a key block, [16][2] elements a pair. float and half leave the slots
// in the order of a shuffle within 128-bit lanes, which SlotOrder undoes once per result.
template <int W, typename T>
KV_INLINE void LoadKeys(const T* p, VecF<W>& even, VecF<W>& odd) {
  VecF<W> a, b;
  LoadSpan<W>(p, a, b);
  if constexpr (kSame<T, Bf16>) {
    even = a;
    odd = b;
  } else if constexpr (W == 16) {
    even = __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30);
    odd = __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
  } else if constexpr (W == 8) {
    even = __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14);
    odd = __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
  } else {
    even = __builtin_shufflevector(a, b, 0, 2, 4, 6);
    odd = __builtin_shufflevector(a, b, 1, 3, 5, 7);
  }
}
template <int W, typename T>
KV_INLINE VecF<W> SlotOrder(VecF<W> x) {
  if constexpr (kSame<T, Bf16>) {
    return x;
  } else if constexpr (W == 16) {
    return __builtin_shufflevector(x, x, 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  } else if constexpr (W == 8) {
    return __builtin_shufflevector(x, x, 0, 1, 4, 5, 2, 3, 6, 7);
  } else {
    return x;
  }
}

KV_INLINE float ToFloat(float x) { return x; }
KV_INLINE float ToFloat(Bf16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float f;
  __builtin_memcpy(&f, &wide, 4);
  return f;
}
KV_INLINE float ToFloat(F16 x) {
  const F16 four[4] = {x, x, x, x};
  return LoadHalf<4>(four)[0];
}

// exp(x) for x <= 80: 0 below -87 (-inf included), relative error below 2e-7, NaN for every NaN.
// Source: the polynomial of Cephes expf.
template <int W>
KV_INLINE VecF<W> ExpBelow80(VecF<W> x) {
  const VecI<W> tiny = x < -87.0f;
  x = tiny ? Splat<W>(-87.0f) : x;
  const float magic = 0x1.8p23f;  // adding it rounds to an integer in the low bits
  const VecF<W> shifted = x * 1.44269504088896341f + magic;
  const VecF<W> k = shifted - magic;
  const VecF<W> r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
  VecF<W> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  const VecU<W> scaled = (VecU<W>)p + ((VecU<W>)shifted << 23);
  // The exponent's addition may carry the payload of a NaN into its sign: x * 0 brings it back.
  return tiny ? VecF<W>{} : (VecF<W>)scaled + x * 0.0f;
}

template <int W>
KV_INLINE float SumLanes(VecF<W> x) {
  float lanes[W];
  Store(lanes, x);
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}
template <int W>
KV_INLINE float MaxLanes(VecF<W> x) {
  float lanes[W];
  Store(lanes, x);
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i)
      lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

}  // namespace
}  // namespace KV_ISA_NAMESPACE
}  // namespace kvcore
