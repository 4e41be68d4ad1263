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

// Sets `weight` row `cell` from logits [capacity] whose entries past the lane's end are -inf. The
// maximum runs over all that can belong to the past while the row is in use.
KV_INLINE void SetWeights(const RkvLane& a, int64_t cell, const float* logit) {
  const int64_t past = a.len - a.protect;
  const int64_t reach = past + a.window < a.len ? past + a.window : a.len;
  const I last = a.position[a.order[reach - 1]] - I{};
  const F minus_inf = Splat<kWidth>(-kInfinity);
  F top = minus_inf;
  for (int64_t j = 0; j < a.len; j += kWidth)
    top = Max<kWidth>(Load<I>(a.position + j) <= last ? Load<F>(logit + j) : minus_inf, top);
  const F peak = Splat<kWidth>(MaxLanes<kWidth>(top));
  float* to = a.weight + cell * a.capacity;
  for (int64_t j = 0; j < a.len; j += kWidth) {
    const F x = Load<F>(logit + j) - peak;
    Store(to + j, ExpNonPositive<kWidth>(x > F{} ? F{} : x));  // NaN stays
  }
}

// imp[j] = mean over queries of the softmax over the past. False if a sum has vanished.
KV_INLINE bool MeanWeights(const RkvLane& a, float* importance) {
  constexpr int64_t kRows = 8;
  const I last = a.position[a.order[a.len - a.protect - 1]] - I{};
  for (int64_t first = 0; first < a.num_queries; first += kRows) {
    const int64_t rows = a.num_queries - first < kRows ? a.num_queries - first : kRows;
    const float* weight = a.weight + first * a.capacity;
    float factor[kRows];
    F sum[kRows] = {};
    for (int64_t j = 0; j < a.len; j += kWidth) {
      const I in_past = Load<I>(a.position + j) <= last;
#pragma GCC unroll 8
      for (int64_t t = 0; t < kRows; ++t)
        if (t < rows) sum[t] += (F)((I)Load<F>(weight + t * a.capacity + j) & in_past);
    }
    for (int64_t t = 0; t < rows; ++t) {
      const float total = SumLanes<kWidth>(sum[t]);
      if (!(total > 1e-20f)) return false;  // vanished, or NaN
      factor[t] = 1.0f / (total * static_cast<float>(a.num_queries));
    }
    for (int64_t j = 0; j < a.len; j += kWidth) {
      F mean = first == 0 ? F{} : Load<F>(importance + j);
#pragma GCC unroll 8
      for (int64_t t = 0; t < kRows; ++t)
        if (t < rows) mean += Load<F>(weight + t * a.capacity + j) * factor[t];
      Store(importance + j, mean);
    }
  }
  return true;
}

// redundancy[j] = exp(c_j) over the sum of all, times (1 - mix). False if not finite.
KV_INLINE bool Redundancy(const RkvLane& a, float* redundancy) {
  const double each = 1.0 / static_cast<double>(a.len);
  F sum = {};
  for (int64_t j = 0; j < a.len; j += kWidth) {
    const D low = (Load<D>(a.column_sum + j) - Load<D>(a.pointed_sum + j)) * each;
    const D high =
        (Load<D>(a.column_sum + j + kHalfWidth) - Load<D>(a.pointed_sum + j + kHalfWidth)) * each;
    const H a_low = __builtin_convertvector(low, H), a_high = __builtin_convertvector(high, H);
    float c[kWidth];
    Store(c, a_low);
    Store(c + kHalfWidth, a_high);
    // Means of cosines are at most 1 but for rounding.
    F x = ExpNonPositive<kWidth>(Load<F>(c) - 1.00001f);
    if (j + kWidth > a.len) x = Iota<kWidth>() < static_cast<int32_t>(a.len - j) ? x : F{};
    Store(redundancy + j, x);
    sum += x;
  }
  const float total = SumLanes<kWidth>(sum);
  const float factor = (1.0f - a.mix) / total;
  for (int64_t j = 0; j < a.len; j += kWidth)
    Store(redundancy + j, Load<F>(redundancy + j) * factor);
  return __builtin_isfinite(factor);
}

// The slot of the past with the lowest score; of equal ones the oldest.
KV_INLINE int32_t Elect(const RkvLane& a) {
  const int64_t past = a.len - a.protect, half = a.kernel / 2, n = a.capacity + 64;
  // Two vectors of room on both sides of what is pooled.
  float *importance = a.scratch, *redundancy = importance + n;
  float *by_rank = redundancy + n, *taken = by_rank + n, *pooled = taken + n;
  if (!MeanWeights(a, importance)) {
    for (int64_t t = 0; t < a.num_queries; ++t)
      if (!(a.weight[t * a.capacity + a.order[0]] >= 0)) return kNotFinite;
    return kNotElected;
  }
  if (!Redundancy(a, redundancy)) return kNotFinite;
  for (int64_t k = 0; k < past; ++k) {
    const int32_t slot = a.order[k];
    by_rank[k] = importance[slot];
    taken[k] = redundancy[slot];
  }
  for (int64_t k = past; k < past + kWidth; ++k) by_rank[k] = 0, taken[k] = 0;
  if (half <= kWidth) {    // one pass; importance is >= 0, so that 0 stands for what is outside
    float* edge = pooled;  // [kWidth zeroes][past][kWidth zeroes]
    for (int64_t k = 0; k < kWidth; ++k) edge[k] = 0;
    for (int64_t k = 0; k < past + kWidth; k += kWidth)
      Store(edge + kWidth + k, Load<F>(by_rank + k));
    for (int64_t k = past; k < past + 2 * kWidth; ++k) edge[kWidth + k] = 0;
    for (int64_t k = 0; k < past; k += kWidth) {
      F top = Load<F>(edge + kWidth + k);
      for (int64_t o = 1; o <= half; ++o)
        top = Max<kWidth>(Max<kWidth>(Load<F>(edge + kWidth + k - o), top),
                          Load<F>(edge + kWidth + k + o));
      Store(by_rank + k, top * a.mix - Load<F>(taken + k));
    }
  } else {
    for (int64_t k = 0; k < past; ++k) {
      float top = 0;
      for (int64_t o = k - half < 0 ? 0 : k - half; o <= k + half && o < past; ++o)
        top = by_rank[o] > top ? by_rank[o] : top;
      pooled[k] = top * a.mix - taken[k];
    }
    for (int64_t k = 0; k < past; ++k) by_rank[k] = pooled[k];
  }
  for (int64_t k = past; k < past + kWidth; ++k) by_rank[k] = kInfinity;
  F low = Splat<kWidth>(kInfinity);
  for (int64_t k = 0; k < past; k += kWidth) {
    const F x = Load<F>(by_rank + k);
    low = x < low ? x : low;
  }
  const float least = -MaxLanes<kWidth>(-low);
  for (int64_t k = 0; k < past; ++k)
    if (by_rank[k] == least) {
      *a.elected_rank = static_cast<int32_t>(k);
      return a.order[k];
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

KV_INLINE void Point(const RkvLane& a, int64_t r, int64_t j, float value) {
  a.pointer[r] = static_cast<int32_t>(j);
  a.pointer_value[r] = value;
  a.pointed_sum[j] += static_cast<double>(value);
}

// Rows without a similar slot point at the oldest one.
template <typename T>
KV_INLINE void PointAtOldest(const RkvLane& a, const int32_t* rows, int64_t count) {
  const int64_t oldest = a.order[0];
  constexpr int64_t kFew = 4;
  if (count <= kFew) {
    for (int64_t i = 0; i < count; ++i)
      Point(a, rows[i], oldest, rows[i] == oldest ? 0.0f : Similarity<T>(a, rows[i], oldest));
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
    Point(a, r, oldest, r == oldest ? 0.0f : value);
  }
}

// Slot x holds a new key at `position`. new_dot and old_dot are the products of the new and of the
// replaced key with every slot of the lane (x holds the new one); both are zeroed past its end.
// False if the new key is not finite.
template <typename T>
bool Replace(const RkvLane& a, int64_t x, int32_t position, const float* new_dot,
             const float* old_dot) {
  const int64_t words = a.capacity / 8;
  const float square = new_dot[x];
  const float inverse_old = a.inverse_norm[x];
  const float inverse_new = 1.0f / (__builtin_sqrtf(square) + 1e-8f);
  a.inverse_norm[x] = 0;  // S[x, x] = 0
  float* similarity = a.scratch;
  int32_t* touched = reinterpret_cast<int32_t*>(similarity + a.capacity + 64);
  int64_t num_touched = 0;
  uint8_t* bits = a.similar + x * words;
  // Most similar rows pointed at the token before: those are taken off its sum together.
  const int32_t before = a.order[a.len - 1];
  D row_sum = {}, hit_sum = {}, before_sum = {};
  const I here = static_cast<int32_t>(x) - I{}, last = before - I{};
  I newest_position = -1 - I{};
  const F threshold = Splat<kWidth>(a.threshold);
  for (int64_t j = 0; j < a.len; j += kWidth) {
    const F inverse = Load<F>(a.inverse_norm + j);
    const F added = Load<F>(new_dot + j) * (inverse * inverse_new);
    const F gone = Load<F>(old_dot + j) * (inverse * inverse_old);
    Store(similarity + j, added);
    const I is_hit = added > threshold;
    const I pointer = Load<I>(a.pointer + j);
    const F value = Load<F>(a.pointer_value + j);
    const I at_last = is_hit & (pointer == last), elsewhere = is_hit & (pointer != last);
    float parts[4 * kWidth];
    Store(parts, added);
    Store(parts + kWidth, gone);
    Store(parts + 2 * kWidth, (F)((I)added & is_hit));
    Store(parts + 3 * kWidth, (F)((I)value & at_last));
    for (int half = 0; half < 2; ++half) {
      const float* part = parts + half * kHalfWidth;
      const D plus = LoadDouble(part);
      double* sum = a.column_sum + j + half * kHalfWidth;
      Store(sum, Load<D>(sum) + (plus - LoadDouble(part + kWidth)));
      row_sum += plus;
      hit_sum += LoadDouble(part + 2 * kWidth);
      before_sum += LoadDouble(part + 3 * kWidth);
    }
    const I age = Load<I>(a.position + j);
    newest_position = (is_hit & (age > newest_position)) ? age : newest_position;
    const uint32_t hits = MaskGreater(added, threshold);
    if constexpr (kWidth == 16) {
      const uint16_t two = static_cast<uint16_t>(hits);
      __builtin_memcpy(bits + j / 8, &two, 2);
    } else if constexpr (kWidth == 8) {
      bits[j / 8] = static_cast<uint8_t>(hits);
    } else {
      bits[j / 8] = static_cast<uint8_t>(j % 8 == 0 ? hits : bits[j / 8] | hits << 4);
    }
    for (uint32_t open = MaskTrue(elsewhere); open != 0; open &= open - 1) {
      const int64_t r = j + __builtin_ctz(open);
      a.pointed_sum[a.pointer[r]] -= static_cast<double>(a.pointer_value[r]);
    }
    for (uint32_t open = MaskTrue((pointer == here) & ~is_hit); open != 0; open &= open - 1)
      touched[num_touched++] = static_cast<int32_t>(j) + __builtin_ctz(open);
    Store(a.pointer + j, is_hit ? here : pointer);
    Store(a.pointer_value + j, is_hit ? added : value);
    Store(a.alone + j, Load<I>(a.alone + j) & ~is_hit);
  }
  const double total = SumLanes(row_sum);
  a.inverse_norm[x] = inverse_new;
  if (!(square < kInfinity) || !(total - total == 0)) return false;
  a.pointed_sum[before] -= SumLanes(before_sum);

  const int64_t rank = *a.elected_rank;
  __builtin_memmove(a.order + rank, a.order + rank + 1,
                    static_cast<unsigned long>(a.len - 1 - rank) * sizeof(int32_t));
  a.order[a.len - 1] = static_cast<int32_t>(x);
  a.position[x] = position;
  a.column_sum[x] = total;
  a.pointed_sum[a.pointer[x]] -= static_cast<double>(a.pointer_value[x]);  // of the replaced key
  a.pointed_sum[x] = SumLanes(hit_sum);

  int64_t num_alone = 0;
  for (int64_t i = 0; i < num_touched; ++i) {
    // The replaced key was its newest similar one: the next newest is older than that.
    const int64_t r = touched[i];
    if (r == x || r >= a.len) continue;
    int64_t next = -1;
    if (!a.alone[r])
      for (int64_t k = rank - 1; k >= 0 && next < 0; --k)
        if (a.order[k] != r && IsSimilar(a, r, a.order[k])) next = a.order[k];
    if (next >= 0) {
      Point(a, r, next, Similarity<T>(a, r, next));
    } else {
      a.alone[r] = 1;
      touched[num_alone++] = static_cast<int32_t>(r);
    }
  }
  int32_t newest = -1;  // position of the newest slot that is similar to x
  for (int l = 0; l < kWidth; ++l)
    newest = newest_position[l] > newest ? newest_position[l] : newest;
  a.alone[x] = newest < 0;
  int64_t k = newest < 0 ? 0 : a.len - 2;
  while (newest >= 0 && a.position[a.order[k]] != newest) --k;
  Point(a, x, a.order[k], a.order[k] == x ? 0.0f : similarity[a.order[k]]);
  if (num_alone > 0) PointAtOldest<T>(a, touched, num_alone);
  return true;
}

}  // namespace
}  // namespace KV_ISA_NAMESPACE
}  // namespace kvcore
