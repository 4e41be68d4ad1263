// Full-width vectors beyond vec.h: comparison masks as bits, and sums in double.
#pragma once

#pragma GCC diagnostic ignored "-Wpsabi"  // wide vectors never cross a call boundary

#include "cpu/kernels/vec.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvcore {
namespace KV_ISA_NAMESPACE {
namespace {

using F = VecF<kWidth>;
using I = VecI<kWidth>;
using U = VecU<kWidth>;
// Half as many lanes: a register of doubles, and the floats that fill it.
constexpr int kHalfWidth = kWidth / 2;
using H = VecF<kHalfWidth>;
typedef double D __attribute__((vector_size(kHalfWidth * 8)));

constexpr float kInfinity = __builtin_inff();

KV_INLINE D LoadDouble(const float* p) { return __builtin_convertvector(Load<H>(p), D); }
KV_INLINE double SumLanes(D v) {
  double s = 0;
  for (int l = 0; l < kHalfWidth; ++l) s += v[l];
  return s;
}

// The two halves of a vector in double, and back. Templates, so that only the width in use is
// compiled.
template <typename V>
KV_INLINE D LowDouble(V x) {
  if constexpr (sizeof(V) == 64)
    return __builtin_convertvector(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7), D);
  else if constexpr (sizeof(V) == 32)
    return __builtin_convertvector(__builtin_shufflevector(x, x, 0, 1, 2, 3), D);
  else
    return __builtin_convertvector(__builtin_shufflevector(x, x, 0, 1), D);
}
template <typename V>
KV_INLINE D HighDouble(V x) {
  if constexpr (sizeof(V) == 64)
    return __builtin_convertvector(__builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15), D);
  else if constexpr (sizeof(V) == 32)
    return __builtin_convertvector(__builtin_shufflevector(x, x, 4, 5, 6, 7), D);
  else
    return __builtin_convertvector(__builtin_shufflevector(x, x, 2, 3), D);
}
template <typename V, typename Half = H>
KV_INLINE F FromDouble(V low, V high) {
  const Half a = __builtin_convertvector(low, Half), b = __builtin_convertvector(high, Half);
  if constexpr (sizeof(V) == 64)
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  else if constexpr (sizeof(V) == 32)
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7);
  else
    return __builtin_shufflevector(a, b, 0, 1, 2, 3);
}

// Bit l is set where a[l] > b[l].
KV_INLINE uint32_t MaskGreater(F a, F b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps(_mm_cmpgt_ps((__m128)a, (__m128)b)));
#else
  uint32_t mask = 0;
  for (int l = 0; l < kWidth; ++l) mask |= static_cast<uint32_t>(a[l] > b[l]) << l;
  return mask;
#endif
}

}  // namespace
}  // namespace KV_ISA_NAMESPACE
}  // namespace kvcore
