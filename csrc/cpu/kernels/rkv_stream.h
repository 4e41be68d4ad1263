// One token of the fused R-KV pass: the new key's and the replaced key's products with the lane are
// at hand, the state follows, and the slot to overwrite next is elected.
//
// Sums over a column are kept in double: what a key added is subtracted exactly when it goes, since
// the product of two keys is the same bits whichever of them was new.
#pragma once

#include "cpu/kernels/key_dot.h"
#include "cpu/kernels/vec_wide.h"
#include "cpu/rkv_lane.h"

namespace kvcore {
namespace KV_ISA_NAMESPACE {
namespace {

// Bit l is set where a comparison has held.
KV_INLINE uint32_t MaskTrue(I mask) { return MaskGreater((F)(mask & (I)Splat<kWidth>(1.0f)), F{}); }

KV_INLINE bool IsSimilar(const RkvLane& a, int64_t r, int64_t j) {
  const int64_t newer = a.position[r] > a.position[j] ? r : j, older = r + j - newer;
  return a.similar[newer * (a.capacity / 8) + older / 8] >> (older % 8) & 1;
}

// row = the key in `slot`, dims in order.
template <typename T>
KV_INLINE void UnpackKey(const RkvLane& a, int64_t slot, T* row) {
  const T* key = static_cast<const T*>(a.key_blocks) +
                 (int64_t{a.table[slot / kBlock]} * a.head_dim * kBlock + slot % kBlock * 2);
  for (int64_t d = 0; d < a.head_dim; d += 2) {
    row[d] = key[d * kBlock];
    row[d + 1] = key[d * kBlock + 1];
  }
}

// dots[r][slot] for rows of packed queries against all blocks of the lane, up to the end of the
// last block; what lies past the lane's end is anything.
template <int R, typename T>
__attribute__((noinline)) void DotLane(const RkvLane& a, const float* packed, float* dots,
                                       int64_t stride) {
  constexpr int kUnits = UnitsAtOnce(R);
  const int64_t units = (a.len + kWidth - 1) / kWidth;
  float tile[R * kScoreStride];
  for (int64_t u = 0; u < units; u += kUnits) {
    const int64_t count = units - u < kUnits ? units - u : kUnits;
    const T* unit[kUnits];
    for (int64_t v = 0; v < kUnits; ++v) {
      const int64_t at = u + (v < count ? v : 0);
      unit[v] = static_cast<const T*>(a.key_blocks) +
                int64_t{a.table[at / kUnitsPerBlock]} * kBlock * a.head_dim +
                at % kUnitsPerBlock * 2 * kWidth;
    }
    KeyDot<T>::template Run<R, kUnits>(packed, unit, unit, a.head_dim, tile);
    for (int r = 0; r < R; ++r)
      for (int64_t v = 0; v < count; ++v)
        Store(dots + r * stride + (u + v) * kWidth, Load<F>(tile + r * kScoreStride + v * kWidth));
  }
}

// ---- election --------------------------------------------------------------------------------

// The "past" of a lane are its slots that are no longer protected; the newest of them came at:
KV_INLINE int32_t LastOfPast(const RkvLane& a) {
  return a.position[a.order[a.len - a.protect - 1]];
}

constexpr double kVanished = 1e-25;

// weight[j] = exp(logit[j] - peak), at most e^80; returns the sum over the past.
KV_INLINE double SetWeightsFrom(const RkvLane& a, float* weight, const float* logit, float peak,
                                I last) {
  F sum = {};
  const F most = Splat<kWidth>(80.0f);
  for (int64_t j = 0; j < a.len; j += kWidth) {
    const F x = Load<F>(logit + j) - peak;
    const F w = ExpBelow80<kWidth>(x > most ? most : x);  // NaN stays
    Store(weight + j, w);
    sum += (F)((I)w & (I)(Load<I>(a.position + j) <= last));
  }
  return static_cast<double>(SumLanes<kWidth>(sum));
}

// Row `cell` of the weights from logits [padded len] whose entries past the lane's end are -inf.
// `peak` is their maximum; where the past is negligible beside it, the past's own takes its place.
KV_INLINE void SetWeights(const RkvLane& a, int64_t cell, const float* logit, float peak) {
  const I last = LastOfPast(a) - I{};
  float* const weight = a.weight + cell * a.capacity;
  double sum = SetWeightsFrom(a, weight, logit, peak, last);
  if (!(sum > kVanished)) {
    const F minus_inf = Splat<kWidth>(-kInfinity);
    F top = minus_inf;
    for (int64_t j = 0; j < a.len; j += kWidth)
      top = Max<kWidth>(Load<I>(a.position + j) <= last ? Load<F>(logit + j) : minus_inf, top);
    sum = SetWeightsFrom(a, weight, logit, MaxLanes<kWidth>(top), last);
  }
  a.weight_sum[cell] = sum;
}

// Sums of the weights' rows after slot `gone` has left the past and slot `come` has joined it.
// REQUIRES: `order` is that after it.
KV_INLINE void MoveWeightSums(const RkvLane& a, int64_t gone, int64_t come) {
  for (int64_t t = 0; t < a.num_queries; ++t) {
    const float* weight = a.weight + t * a.capacity;
    double sum = a.weight_sum[t] - static_cast<double>(weight[gone]);
    if (sum < 0.5 * a.weight_sum[t]) {  // little is left that rounding has not touched
      sum = 0;
      for (int64_t k = 0; k < a.len - a.protect; ++k)
        sum += static_cast<double>(weight[a.order[k]]);
    } else {
      sum += static_cast<double>(weight[come]);
    }
    a.weight_sum[t] = sum;
  }
}

// importance[j] = mean over queries of the softmax over the past, for the slots of the past.
KV_INLINE void MeanWeights(const RkvLane& a, float* importance) {
  constexpr int64_t kRows = 8;
  const double count = static_cast<double>(a.num_queries);
  for (int64_t first = 0; first < a.num_queries; first += kRows) {
    const int64_t rows = a.num_queries - first < kRows ? a.num_queries - first : kRows;
    const float* weight = a.weight + first * a.capacity;
    F factor[kRows];
    for (int64_t t = 0; t < kRows; ++t)
      factor[t] =
          Splat<kWidth>(t < rows ? static_cast<float>(1.0 / (a.weight_sum[first + t] * count)) : 0);
    if (first == 0 && rows == kRows) {
      for (int64_t j = 0; j < a.len; j += kWidth) {
        F even = {}, odd = {};
#pragma GCC unroll 8
        for (int64_t t = 0; t < kRows; t += 2) {
          even += Load<F>(weight + t * a.capacity + j) * factor[t];
          odd += Load<F>(weight + (t + 1) * a.capacity + j) * factor[t + 1];
        }
        Store(importance + j, even + odd);
      }
    } else {
      for (int64_t j = 0; j < a.len; j += kWidth) {
        F mean = first == 0 ? F{} : Load<F>(importance + j);
        for (int64_t t = 0; t < rows; ++t) mean += Load<F>(weight + t * a.capacity + j) * factor[t];
        Store(importance + j, mean);
      }
    }
  }
}

// redundancy[j] = exp(c_j) times a constant; returns (1 - mix) over the sum of all.
KV_INLINE float Redundancy(const RkvLane& a, float* redundancy) {
  const double each = 1.0 / static_cast<double>(a.len);
  F sum = {};
  for (int64_t j = 0; j < a.len; j += kWidth) {
    const F c = FromDouble(Load<D>(a.column + j) * each, Load<D>(a.column + j + kHalfWidth) * each);
    // Means of cosines are at most 1 but for rounding.
    F x = ExpBelow80<kWidth>(c - 1.0f);
    if (j + kWidth > a.len) x = Iota<kWidth>() < static_cast<int32_t>(a.len - j) ? x : F{};
    Store(redundancy + j, x);
    sum += x;
  }
  return (1.0f - a.mix) / SumLanes<kWidth>(sum);
}

// y[k] = the largest of x[k - half .. k + half], of n numbers >= 0. x has kPoolRoom floats of room
// before it and n + 2 * kPoolRoom from it on.
constexpr int64_t kPoolRoom = 16;
KV_INLINE void MaxPool(float* x, int64_t n, int64_t half, float* y) {
  if (half > kPoolRoom) {
    for (int64_t k = 0; k < n; ++k) {
      y[k] = 0;
      for (int64_t o = k < half ? 0 : k - half; o < n && o <= k + half; ++o)
        y[k] = x[o] > y[k] ? x[o] : y[k];
    }
    return;
  }
  for (int64_t o = 0; o < kPoolRoom; ++o) x[o - kPoolRoom] = 0;
  for (int64_t o = 0; o < 2 * kPoolRoom; ++o) x[n + o] = 0;
  for (int64_t k = 0; k < n; k += kWidth) {
    F top = Load<F>(x + k);
    for (int64_t o = 1; o <= half; ++o)
      top = Max<kWidth>(Max<kWidth>(Load<F>(x + k - o), top), Load<F>(x + k + o));
    Store(y + k, top);
  }
}

// The slot of the past with the lowest score; of equal ones the oldest. Without kRedundancy by
// importance alone.
template <bool kRedundancy>
KV_INLINE int32_t Elect(const RkvLane& a) {
  const int64_t past = a.len - a.protect, half = a.kernel / 2, n = a.capacity + 64;
  for (int64_t t = 0; t < a.num_queries; ++t)
    if (!(a.weight_sum[t] > kVanished))
      return a.weight_sum[t] == a.weight_sum[t] ? kNoReplace : kNotFinite;
  float *importance = a.scratch, *redundancy = importance + n;
  float *by_rank = redundancy + n, *score = by_rank + n;  // of the past, by age
  MeanWeights(a, importance);
  const float factor = kRedundancy ? Redundancy(a, redundancy) : 0.0f;
  if (!__builtin_isfinite(factor)) return kNotFinite;
  float* const by_age = by_rank + kPoolRoom;
  for (int64_t k = 0; k < past; ++k) {
    const int32_t slot = a.order[k];
    by_age[k] = importance[slot];
    if (kRedundancy) score[k] = redundancy[slot];
  }
  float* const pooled = importance;  // which has served
  MaxPool(by_age, past, half, pooled);
  F low = Splat<kWidth>(kInfinity);
  for (int64_t k = 0; k < past; k += kWidth) {
    F x = Load<F>(pooled + k) * a.mix;
    if (kRedundancy) x -= Load<F>(score + k) * factor;
    if (k + kWidth > past)
      x = Iota<kWidth>() < static_cast<int32_t>(past - k) ? x : Splat<kWidth>(kInfinity);
    Store(score + k, x);
    low = x < low ? x : low;
  }
  const F least = Splat<kWidth>(-MaxLanes<kWidth>(-low));
  for (int64_t k = 0; k < past; k += kWidth) {
    const uint32_t equal = MaskTrue((I)(Load<F>(score + k) == least));
    if (equal == 0) continue;
    const int64_t rank = k + __builtin_ctz(equal);
    *a.elected_rank = static_cast<int32_t>(rank);
    return a.order[rank];
  }
  return kNotFinite;
}

// ---- one token -------------------------------------------------------------------------------

// v = S[r, j] of two live slots.
template <typename T>
KV_INLINE float Similarity(const RkvLane& a, int64_t r, int64_t j) {
  T row[256], other[256];
  UnpackKey(a, r, row);
  UnpackKey(a, j, other);
  F sum = {};
  float left[256], right[256];
  for (int64_t d = 0; d < a.head_dim; ++d) left[d] = ToFloat(row[d]), right[d] = ToFloat(other[d]);
  float tail = 0;
  int64_t d = 0;
  for (; d + kWidth <= a.head_dim; d += kWidth) sum += Load<F>(left + d) * Load<F>(right + d);
  for (; d < a.head_dim; ++d) tail += left[d] * right[d];
  return (SumLanes<kWidth>(sum) + tail) * (a.inverse_norm[r] * a.inverse_norm[j]);
}

// Row r points at slot j with v_r = value, as its newest similar slot or for want of one.
KV_INLINE void Point(const RkvLane& a, int64_t r, int64_t j, float value, bool alone) {
  a.pointer[r] = static_cast<int32_t>(alone ? ~j : j);
  a.pointer_value[r] = value;
  a.column[j] -= static_cast<double>(value);
}
// The slot that row r points at.
KV_INLINE int32_t PointedAt(const RkvLane& a, int64_t r) {
  return a.pointer[r] < 0 ? ~a.pointer[r] : a.pointer[r];
}

// Rows without a similar slot point at the oldest one.
template <typename T>
KV_INLINE void PointAtOldest(const RkvLane& a, const int32_t* rows, int64_t count) {
  const int64_t oldest = a.order[0];
  constexpr int64_t kFew = 4;
  if (count <= kFew) {
    for (int64_t i = 0; i < count; ++i)
      Point(a, rows[i], oldest, rows[i] == oldest ? 0.0f : Similarity<T>(a, rows[i], oldest), true);
    return;
  }
  float* packed = a.scratch + 5 * (a.capacity + 64);
  float* dots = a.scratch;
  T key[256];
  UnpackKey(a, oldest, key);
  KeyDot<T>::PackQuery(key, a.head_dim, packed);
  DotLane<1, T>(a, packed, dots, a.capacity);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t r = rows[i];
    const float value = dots[r] * (a.inverse_norm[r] * a.inverse_norm[oldest]);
    Point(a, r, oldest, r == oldest ? 0.0f : value, true);
  }
}

// A bit per slot of a vector, into a row of `similar`.
KV_INLINE void StoreBits(uint8_t* row, int64_t j, uint32_t bits) {
  if constexpr (kWidth == 16) {
    const uint16_t two = static_cast<uint16_t>(bits);
    __builtin_memcpy(row + j / 8, &two, 2);
  } else if constexpr (kWidth == 8) {
    row[j / 8] = static_cast<uint8_t>(bits);
  } else {
    row[j / 8] = static_cast<uint8_t>(j % 8 == 0 ? bits : row[j / 8] | bits << 4);
  }
}

// Row r pointed at a slot that has gone: at its next newest similar one, which is older than that
// and so has a rank below `rank`. False if there is none.
template <typename T>
KV_INLINE bool PointAtNext(const RkvLane& a, int64_t r, int64_t rank) {
  for (int64_t k = rank - 1; k >= 0; --k) {
    const int64_t j = a.order[k];
    if (j == r || !IsSimilar(a, r, j)) continue;
    Point(a, r, j, Similarity<T>(a, r, j), false);
    return true;
  }
  return false;
}

// Slot x, which was the elected one, holds a new token at `position`: order and weights follow.
KV_INLINE void MakeNewest(const RkvLane& a, int64_t x, int32_t position) {
  const int64_t rank = *a.elected_rank;
  __builtin_memmove(a.order + rank, a.order + rank + 1,
                    static_cast<unsigned long>(a.len - 1 - rank) * sizeof(int32_t));
  a.order[a.len - 1] = static_cast<int32_t>(x);
  a.position[x] = position;
  MoveWeightSums(a, x, a.order[a.len - a.protect - 1]);
}

// Slot x holds a new key at `position`; the whole state follows. new_dot and old_dot are the
// products of the new and of the replaced key with every slot of the lane (x holds the new one);
// both are zeroed past its end. False if the new key is not finite.
template <typename T>
bool Replace(const RkvLane& a, int64_t x, int32_t position, const float* new_dot,
             const float* old_dot) {
  const float square = new_dot[x];
  const float inverse_old = a.inverse_norm[x];
  const float inverse_new = 1.0f / (__builtin_sqrtf(square) + 1e-8f);
  a.inverse_norm[x] = 0;  // S[x, x] = 0
  float* const similarity = a.scratch;
  int32_t* const touched = reinterpret_cast<int32_t*>(similarity + a.capacity + 64);
  int64_t num_touched = 0;
  uint8_t* const bits = a.similar + x * (a.capacity / 8);
  // Most similar rows pointed at one of the two tokens before: those leave its column together.
  const int32_t before = a.order[a.len - 1], earlier = a.order[a.len > 1 ? a.len - 2 : 0];
  // Sums in float err once in a slot's life; what comes and goes token by token is in double.
  F row_sum = {}, hit_sum = {}, before_sum = {}, earlier_sum = {};
  uint32_t any_hit = 0;
  const I here = static_cast<int32_t>(x) - I{}, last = before - I{}, second = earlier - I{};
  const F threshold = Splat<kWidth>(a.threshold);
  for (int64_t j = 0; j < a.len; j += kWidth) {
    const F inverse = Load<F>(a.inverse_norm + j);
    const F added = Load<F>(new_dot + j) * (inverse * inverse_new);
    const F gone = Load<F>(old_dot + j) * (inverse * inverse_old);
    Store(similarity + j, added);
    double* const column = a.column + j;
    Store(column, Load<D>(column) + (LowDouble(added) - LowDouble(gone)));
    Store(column + kHalfWidth,
          Load<D>(column + kHalfWidth) + (HighDouble(added) - HighDouble(gone)));
    row_sum += added;
    const uint32_t hits = MaskGreater(added, threshold);
    StoreBits(bits, j, hits);
    any_hit |= hits;
    const I is_hit = added > threshold;
    const I pointer = Load<I>(a.pointer + j);
    const I at_last = is_hit & (I)(pointer == last), at_second = is_hit & (I)(pointer == second);
    const F value = Load<F>(a.pointer_value + j);
    hit_sum += (F)((I)added & is_hit);
    before_sum += (F)((I)value & at_last);
    earlier_sum += (F)((I)value & at_second);
    for (uint32_t open = hits & ~MaskTrue(at_last | at_second); open != 0; open &= open - 1) {
      const int64_t r = j + __builtin_ctz(open);
      a.column[PointedAt(a, r)] += static_cast<double>(a.pointer_value[r]);
    }
    const I at_here = (I)(pointer == here) | (I)(pointer == ~here);
    for (uint32_t open = MaskTrue(at_here) & ~hits; open != 0; open &= open - 1)
      touched[num_touched++] = static_cast<int32_t>(j) + __builtin_ctz(open);
    Store(a.pointer + j, is_hit ? here : pointer);
    Store(a.pointer_value + j, is_hit ? added : value);
  }
  const float total = SumLanes<kWidth>(row_sum);
  a.inverse_norm[x] = inverse_new;
  if (!(square < kInfinity) || !(total - total == 0)) return false;
  a.column[before] += static_cast<double>(SumLanes<kWidth>(before_sum));
  if (earlier != before) a.column[earlier] += static_cast<double>(SumLanes<kWidth>(earlier_sum));
  a.column[PointedAt(a, x)] += static_cast<double>(a.pointer_value[x]);  // of the replaced key
  a.column[x] = static_cast<double>(total) - static_cast<double>(SumLanes<kWidth>(hit_sum));

  const int64_t rank = *a.elected_rank;
  MakeNewest(a, x, position);
  int64_t num_alone = 0;
  for (int64_t i = 0; i < num_touched; ++i) {
    const int64_t r = touched[i];
    if (r == x || r >= a.len) continue;
    if (a.pointer[r] < 0 || !PointAtNext<T>(a, r, rank))
      touched[num_alone++] = static_cast<int32_t>(r);
  }
  int64_t k = a.len - 2;  // rank of the newest slot that is similar to x
  while (any_hit != 0 && !(similarity[a.order[k]] > a.threshold)) --k;
  const int64_t to = a.order[any_hit != 0 ? k : 0];
  Point(a, x, to, to == x ? 0.0f : similarity[to], any_hit == 0);
  if (num_alone > 0) PointAtOldest<T>(a, touched, num_alone);
  return true;
}

}  // namespace
}  // namespace KV_ISA_NAMESPACE
}  // namespace kvcore
