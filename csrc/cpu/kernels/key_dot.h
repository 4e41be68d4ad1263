// Dot products of query rows with the keys of a lane's blocks, for fp32, bf16 and fp16 storage.
//
// Rows stay in registers, slots lie along vector lanes: one load of K serves all rows, and no sum
// goes across a vector. The arithmetic of a row never depends on the rows beside it, and the
// product of two keys is the same bits whichever of them is the row.
#pragma once

#include "cpu/attend_kernels.h"
#include "cpu/kernels/vec.h"

namespace kvcore {
namespace KV_ISA_NAMESPACE {
namespace {

constexpr int kBlock = 16;  // slots of a block
constexpr int kChunk = 128;
constexpr int kScoreStride = kChunk + 16;  // not a power of two: rows fall into different sets
constexpr int kUnitsPerBlock = kBlock / kWidth;  // a unit is kWidth slots of one block

// Asks for kElements elements that will be needed soon. A cache that has just been evicted from, or
// the layers of a whole model in turn, come from memory: the hardware follows one block, the next
// one lies anywhere.
template <int kElements, typename T>
KV_INLINE void Prefetch(const T* p) {
  constexpr int kLine = 64 / static_cast<int>(sizeof(T));
#pragma GCC unroll 4
  for (int i = 0; i < kElements; i += kLine) __builtin_prefetch(p + i, 0, 2);
}

constexpr int kQueryStride = kAttendQueryStride;

template <int R, int kExtra, typename V, int NV>
KV_INLINE void StoreRows(V (&acc)[R][NV], int v, float* s) {
#pragma GCC unroll 10
  for (int r = 0; r < R; ++r) Store(s + r * kScoreStride, acc[r][v]);
  if constexpr (kExtra > 0) {
    VecF<kWidth> top = (VecF<kWidth>)acc[0][v];
#pragma GCC unroll 8
    for (int r = 1; r < R - kExtra; ++r) top = Max<kWidth>((VecF<kWidth>)acc[r][v], top);
    Store(s + R * kScoreStride, top);
  }
}

// Query rows as the dot product wants them, kQueryStride floats apart: as floats, or with bf16
// multiply-add instructions as they are, a float holding a pair of dims.
template <typename T>
struct KeyDot {
  static KV_INLINE void PackQuery(const T* row, int64_t head_dim, float* q) {
    for (int64_t d = 0; d < head_dim; d += 8) {
      VecF<4> a, b;
      LoadSpan<4>(row + d, a, b);
      if constexpr (kSame<T, Bf16>) {
        const VecF<4> even = a, odd = b;
        a = __builtin_shufflevector(even, odd, 0, 4, 1, 5);
        b = __builtin_shufflevector(even, odd, 2, 6, 3, 7);
      }
      Store(q + d, a);
      Store(q + d + 4, b);
    }
  }
  // s[r][u * kWidth + lane] = q_r . k of the slots of NV units; with kExtra > 0 the row behind them
  // is the maximum over all rows but the last kExtra.
  template <int R, int NV, int kExtra = 0>
  static KV_INLINE void Run(const float* q, const T* const* unit, const T* const* ahead,
                            int64_t head_dim, float* s) {
    using F = VecF<kWidth>;
    F acc[R][NV] = {};
    const T* k[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) k[v] = unit[v];
    for (int64_t pair = 0; pair < head_dim / 2; ++pair) {
      F even[NV], odd[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        LoadKeys<kWidth>(k[v], even[v], odd[v]);
        k[v] += 2 * kBlock;
        Prefetch<2 * kWidth>(ahead[v] + 2 * kWidth * pair);
      }
#pragma GCC unroll 10
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[r][v] += even[v] * q[r * kQueryStride];
      }
#pragma GCC unroll 10
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[r][v] += odd[v] * q[r * kQueryStride + 1];
      }
      q += 2;
    }
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
#pragma GCC unroll 10
      for (int r = 0; r < R; ++r) acc[r][v] = SlotOrder<kWidth, T>(acc[r][v]);
      StoreRows<R, kExtra>(acc, v, s + v * kWidth);
    }
  }
};

#if defined(__AVX512BF16__)
template <>
struct KeyDot<Bf16> {
  static KV_INLINE void PackQuery(const Bf16* row, int64_t head_dim, float* q) {
    __builtin_memcpy(q, row, static_cast<unsigned long>(2 * head_dim));
  }
  template <int R, int NV, int kExtra = 0>
  static KV_INLINE void Run(const float* q, const Bf16* const* unit, const Bf16* const* ahead,
                            int64_t head_dim, float* s) {
    __m512 acc[R][NV];
    const Bf16* k[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      k[v] = unit[v];
#pragma GCC unroll 10
      for (int r = 0; r < R; ++r) acc[r][v] = _mm512_setzero_ps();
    }
    for (int64_t pair = 0; pair < head_dim / 2; ++pair) {
      __m512bh x[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        x[v] = Load<__m512bh>(k[v]);
        k[v] += 2 * kBlock;
        Prefetch<2 * kBlock>(ahead[v] + 2 * kBlock * pair);
      }
#pragma GCC unroll 10
      for (int r = 0; r < R; ++r) {
        const __m512bh qr = (__m512bh)_mm512_set1_ps(q[r * kQueryStride]);
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], x[v], qr);
      }
      ++q;
    }
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) StoreRows<R, kExtra>(acc, v, s + v * kWidth);
  }
};
#endif

// Units at a time: enough independent sums to hide the latency of a multiply-add, few enough to
// stay in registers.
constexpr int UnitsAtOnce(int rows) {
  return kWidth == 16 ? (rows >= 5 ? 2 : rows >= 2 ? 4 : 8) : rows >= 4 ? 1 : rows >= 2 ? 2 : 4;
}

// Scores of the chunk's first num_slots slots; `value` is fetched for later on the way. kExtra as
// in KeyDot::Run.
template <int R, int kExtra, typename T>
KV_INLINE void ScoreChunk(const float* q, const T* const* key, const T* const* value,
                          int64_t num_slots, int64_t head_dim, float* s) {
  constexpr int kUnits = UnitsAtOnce(R);
  const int64_t units = (num_slots + kWidth - 1) / kWidth;
  const T* unit[kChunk / kWidth];
  const T* ahead[kChunk / kWidth];
  for (int64_t u = 0; u < units; ++u) {
    const int64_t in_block = u % kUnitsPerBlock;
    unit[u] = key[u / kUnitsPerBlock] + in_block * 2 * kWidth;
    ahead[u] = value[u / kUnitsPerBlock] + in_block * kWidth * head_dim;
  }
  int64_t u = 0;
  for (; u + kUnits <= units; u += kUnits)
    KeyDot<T>::template Run<R, kUnits, kExtra>(q, unit + u, ahead + u, head_dim, s + u * kWidth);
  for (; u < units; ++u)
    KeyDot<T>::template Run<R, 1, kExtra>(q, unit + u, ahead + u, head_dim, s + u * kWidth);
}

}  // namespace
}  // namespace KV_ISA_NAMESPACE
}  // namespace kvcore
