// Passes over one row of logits. The vocabulary is read twice, once for block maxima and once for
// the sums of softmax and entropy; everything else touches only blocks whose maximum qualifies.
// Bound by the exponentials of the second pass.
#include "cpu/kernels/vec_wide.h"
#include "cpu/sample_tokens_kernels.h"

namespace kvcore {
namespace KV_ISA_NAMESPACE {
namespace {

constexpr int kBlock = static_cast<int>(kSampleBlock);
constexpr int kSpan = 2 * kWidth;  // elements that LoadSpan brings
constexpr int kFoldBlocks = 8;     // blocks summed in float before they go to double

KV_INLINE float NegativeInfinity(float) { return -kInfinity; }
KV_INLINE Bf16 NegativeInfinity(Bf16) { return {0xff80u}; }
KV_INLINE F16 NegativeInfinity(F16) { return {0xfc00u}; }

// Block b of the row; the last one is completed with -inf in `padded`.
template <typename T>
KV_INLINE const T* Block(const T* logits, int64_t count, int64_t b, T* padded) {
  const int64_t left = count - b * kBlock;
  if (left >= kBlock) return logits + b * kBlock;
  for (int64_t i = 0; i < kBlock; ++i)
    padded[i] = i < left ? logits[b * kBlock + i] : NegativeInfinity(T{});
  return padded;
}

KV_INLINE int64_t NumBlocks(int64_t count) { return (count + kBlock - 1) / kBlock; }

template <typename T>
bool BlockPeaks(const T* logits, int64_t count, float* peaks) {
  T padded[kBlock];
  I usable = I{} - 1;
  for (int64_t b = 0; b < NumBlocks(count); ++b) {
    const T* block = Block(logits, count, b, padded);
    F top[2] = {Splat<kWidth>(-kInfinity), Splat<kWidth>(-kInfinity)};
    for (int i = 0; i < kBlock; i += kSpan) {
      F x, y;
      LoadSpan<kWidth>(block + i, x, y);
      usable &= (I)(x < kInfinity) & (I)(y < kInfinity);
      top[0] = Max<kWidth>(top[0], x);
      top[1] = Max<kWidth>(top[1], y);
    }
    peaks[b] = MaxLanes<kWidth>(Max<kWidth>(top[0], top[1]));
  }
  bool all = true;
  for (int l = 0; l < kWidth; ++l) all &= usable[l] != 0;
  return all;
}

template <bool kScaled, typename T>
SampleSums Sums(const T* logits, int64_t count, float peak, float inverse_temperature) {
  T padded[kBlock];
  D mass = {}, moment = {}, scaled = {};
  for (int64_t first = 0; first < NumBlocks(count); first += kFoldBlocks) {
    const int64_t last =
        first + kFoldBlocks < NumBlocks(count) ? first + kFoldBlocks : NumBlocks(count);
    F fold_mass[2] = {}, fold_moment[2] = {}, fold_scaled[2] = {};
    for (int64_t b = first; b < last; ++b) {
      const T* block = Block(logits, count, b, padded);
      for (int i = 0; i < kBlock; i += kSpan) {
        F x[2];
        LoadSpan<kWidth>(block + i, x[0], x[1]);
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
          const F below = x[j] - peak;
          const F e = ExpBelow80<kWidth>(below);
          fold_mass[j] += e;
          // Where e is 0 the factor only has to be finite.
          fold_moment[j] += Max<kWidth>(below, Splat<kWidth>(-88.0f)) * e;
          if constexpr (kScaled) fold_scaled[j] += ExpBelow80<kWidth>(below * inverse_temperature);
        }
      }
    }
    const F sum_mass = fold_mass[0] + fold_mass[1], sum_moment = fold_moment[0] + fold_moment[1];
    const F sum_scaled = fold_scaled[0] + fold_scaled[1];
    float lanes[3 * kWidth];
    Store(lanes, sum_mass);
    Store(lanes + kWidth, sum_moment);
    Store(lanes + 2 * kWidth, sum_scaled);
    mass += LoadDouble(lanes) + LoadDouble(lanes + kHalfWidth);
    moment += LoadDouble(lanes + kWidth) + LoadDouble(lanes + kWidth + kHalfWidth);
    scaled += LoadDouble(lanes + 2 * kWidth) + LoadDouble(lanes + 2 * kWidth + kHalfWidth);
  }
  SampleSums s;
  s.mass = SumLanes(mass);
  s.moment = SumLanes(moment);
  s.scaled_mass = kScaled ? SumLanes(scaled) : s.mass;
  return s;
}

template <typename T>
void MassAbove(const T* logits, int64_t count, float peak, float inverse_temperature,
               const float* thresholds, double* masses) {
  T padded[kBlock];
  D mass[kSampleLevels] = {};
  for (int64_t first = 0; first < NumBlocks(count); first += kFoldBlocks) {
    const int64_t last =
        first + kFoldBlocks < NumBlocks(count) ? first + kFoldBlocks : NumBlocks(count);
    F fold[kSampleLevels] = {};
    for (int64_t b = first; b < last; ++b) {
      const T* block = Block(logits, count, b, padded);
      for (int i = 0; i < kBlock; i += kSpan) {
        F x[2];
        LoadSpan<kWidth>(block + i, x[0], x[1]);
        for (int j = 0; j < 2; ++j) {
          const F e = ExpBelow80<kWidth>((x[j] - peak) * inverse_temperature);
#pragma GCC unroll 8
          for (int level = 0; level < kSampleLevels; ++level)
            fold[level] += x[j] > thresholds[level] ? e : F{};
        }
      }
    }
    for (int level = 0; level < kSampleLevels; ++level) {
      float lanes[kWidth];
      Store(lanes, fold[level]);
      mass[level] += LoadDouble(lanes) + LoadDouble(lanes + kHalfWidth);
    }
  }
  for (int level = 0; level < kSampleLevels; ++level) masses[level] = SumLanes(mass[level]);
}

template <typename T>
int64_t Collect(const T* logits, int64_t count, const float* peaks, float threshold,
                SampleCandidate* out) {
  T padded[kBlock];
  const F limit = Splat<kWidth>(threshold);
  const bool all_finite = threshold == -kInfinity;
  constexpr uint32_t kAllLanes = (1u << kWidth) - 1u;
  // LoadSpan gives even and odd elements of bf16, lower and upper halves of the others.
  constexpr int kStep = kSame<T, Bf16> ? 2 : 1, kSecond = kSame<T, Bf16> ? 1 : kWidth;
  int64_t found = 0;
  for (int64_t b = 0; b < NumBlocks(count); ++b) {
    if (!(peaks[b] >= threshold)) continue;
    const T* block = Block(logits, count, b, padded);
    for (int i = 0; i < kBlock; i += kSpan) {
      F x[2];
      LoadSpan<kWidth>(block + i, x[0], x[1]);
      for (int j = 0; j < 2; ++j) {
        uint32_t hits =
            all_finite ? MaskGreater(x[j], limit) : ~MaskGreater(limit, x[j]) & kAllLanes;
        for (; hits != 0; hits &= hits - 1) {
          const int at = i + __builtin_ctz(hits) * kStep + j * kSecond;
          out[found].logit = ToFloat(block[at]);
          out[found].id = static_cast<int32_t>(b * kBlock + at);
          ++found;
        }
      }
    }
  }
  return found;
}

void Weigh(SampleCandidate* candidates, int64_t count, float peak, float temperature) {
  for (int64_t i = 0; i < count; i += kWidth) {
    const int here = static_cast<int>(count - i < kWidth ? count - i : kWidth);
    float x[kWidth] = {};
    for (int l = 0; l < here; ++l) x[l] = candidates[i + l].logit;
    Store(x, ExpBelow80<kWidth>((Load<F>(x) - peak) / temperature));
    for (int l = 0; l < here; ++l) candidates[i + l].weight = x[l];
  }
}

// Calls f with the row as an array of its type.
template <typename Fn>
auto WithType(const void* logits, DType dtype, Fn&& f) {
  if (dtype == DType::kBF16) return f(static_cast<const Bf16*>(logits));
  if (dtype == DType::kF16) return f(static_cast<const F16*>(logits));
  return f(static_cast<const float*>(logits));
}

bool BlockPeaksAny(const void* logits, DType dtype, int64_t count, float* peaks) {
  return WithType(logits, dtype, [&](auto* row) { return BlockPeaks(row, count, peaks); });
}

SampleSums SumsAny(const void* logits, DType dtype, int64_t count, float peak,
                   float inverse_temperature) {
  return WithType(logits, dtype, [&](auto* row) {
    return inverse_temperature == 1.0f ? Sums<false>(row, count, peak, 1.0f)
                                       : Sums<true>(row, count, peak, inverse_temperature);
  });
}

void MassAboveAny(const void* logits, DType dtype, int64_t count, float peak,
                  float inverse_temperature, const float* thresholds, double* masses) {
  WithType(logits, dtype, [&](auto* row) {
    MassAbove(row, count, peak, inverse_temperature, thresholds, masses);
  });
}

int64_t CollectAny(const void* logits, DType dtype, int64_t count, const float* peaks,
                   float threshold, SampleCandidate* out) {
  return WithType(logits, dtype,
                  [&](auto* row) { return Collect(row, count, peaks, threshold, out); });
}

}  // namespace

extern const SampleKernels kSampleKernels;
const SampleKernels kSampleKernels = {BlockPeaksAny, SumsAny, MassAboveAny, CollectAny, Weigh};

}  // namespace KV_ISA_NAMESPACE
}  // namespace kvcore
