// The state of the fused R-KV pass from a lane's keys and its last queries. Costs len^2 products;
// needed when a lane first fills up and after a chunk has been taken in.
#include "cpu/kernels/rkv_stream.h"

namespace kvcore {
namespace KV_ISA_NAMESPACE {
namespace {

constexpr int kRows = 8;

template <typename T>
void FillNorms(const RkvLane& a) {
  for (int64_t j = 0; j < a.capacity; j += kWidth) {
    F square = {};
    if (j < a.len) {
      const T* key = static_cast<const T*>(a.key_blocks) +
                     int64_t{a.table[j / kBlock]} * kBlock * a.head_dim + j % kBlock * 2;
      for (int64_t d = 0; d < a.head_dim; d += 2, key += 2 * kBlock) {
        F even, odd;
        LoadKeys<kWidth>(key, even, odd);
        square += even * even;
        square += odd * odd;
      }
      square = SlotOrder<kWidth, T>(square);
    }
    for (int l = 0; l < kWidth; ++l)
      a.inverse_norm[j + l] = j + l < a.len ? 1.0f / (__builtin_sqrtf(square[l]) + 1e-8f) : 0.0f;
  }
}

// Column sums, neighbours and pointers of up to kRows rows from their products with the lane.
void FillRows(const RkvLane& a, int64_t first, int64_t count, float* dots, int64_t stride) {
  const int64_t words = a.capacity / 8;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t r = first + i;
    float* s = dots + i * stride;
    double sum = 0;
    int64_t newest = -1;
    for (int64_t j = 0; j < words; ++j) a.similar[r * words + j] = 0;
    for (int64_t j = 0; j < a.len; ++j) {
      s[j] *= a.inverse_norm[r] * a.inverse_norm[j];
      if (j == r) s[j] = 0;
      sum += static_cast<double>(s[j]);
      if (j == r || !(s[j] > a.threshold)) continue;
      a.similar[r * words + j / 8] =
          static_cast<uint8_t>(a.similar[r * words + j / 8] | 1 << j % 8);
      if (newest < 0 || a.position[j] > a.position[newest]) newest = j;
    }
    a.column[r] += sum;
    const int64_t j = newest < 0 ? a.order[0] : newest;
    Point(a, r, j, s[j], newest < 0);
  }
}

template <typename T>
int32_t Build(const RkvBuild& b) {
  const RkvLane& a = b.lane;
  const int64_t stride = a.capacity + 16;
  float* const packed = b.dots + kRows * stride;
  T row[256];
  FillNorms<T>(a);
  for (int64_t j = 0; j < a.capacity; ++j) {
    a.column[j] = 0;
    a.pointer[j] = -1;
    a.pointer_value[j] = 0;
  }
  for (int64_t first = 0; first < a.len && a.mix < 1; first += kRows) {
    const int64_t count = a.len - first < kRows ? a.len - first : kRows;
    for (int64_t i = 0; i < kRows; ++i) {
      UnpackKey(a, first + (i < count ? i : 0), row);
      KeyDot<T>::PackQuery(row, a.head_dim, packed + i * kQueryStride);
    }
    DotLane<kRows, T>(a, packed, b.dots, stride);
    FillRows(a, first, count, b.dots, stride);
  }
  for (int64_t j = 0; j < a.len; ++j)
    if (!(a.column[j] - a.column[j] == 0) || !(a.inverse_norm[j] > 0)) return kNotFinite;

  float* const logit = b.dots;
  bool finite = true;  // all products: a maximum would lose a NaN
  for (int64_t cell = 0; cell < a.num_queries; ++cell) {
    for (int64_t g = 0; g < b.group; ++g) {
      KeyDot<T>::PackQuery(static_cast<const T*>(b.queries[cell * b.group + g]), a.head_dim,
                           packed);
      float* const dots = b.dots + stride;
      DotLane<1, T>(a, packed, dots, stride);
      for (int64_t j = 0; j < a.len; ++j) {
        const float x = dots[j] * b.scale;
        finite &= x - x == 0.0f;
        logit[j] = g == 0 || x > logit[j] ? x : logit[j];
      }
    }
    float peak = -kInfinity;
    for (int64_t j = 0; j < a.len; ++j) peak = logit[j] > peak ? logit[j] : peak;
    for (int64_t j = a.len; j < a.capacity; ++j) logit[j] = -kInfinity;
    SetWeights(a, cell, logit, peak);
  }
  if (!finite) return kNotFinite;
  const int32_t elected = a.mix < 1 ? Elect<true>(a) : Elect<false>(a);
  return elected == kNoReplace ? kNotFinite : elected;
}

}  // namespace

extern const RkvKernels kRkvKernels = {Build<float>, Build<Bf16>, Build<F16>};

}  // namespace KV_ISA_NAMESPACE
}  // namespace kvcore
