// The per-level kernels behind SampleTokensCpu: passes over one row of logits.
#pragma once

#include <stdint.h>

#include "base/dtype.h"
#include "cpu/isa.h"

namespace kvcore {

// A row is summarised in blocks of this many logits.
inline constexpr int64_t kSampleBlock = 128;

struct SampleCandidate {
  float logit;
  int32_t id;
  float weight;  // exp((logit - peak) / temperature)
};

struct SampleSums {
  double mass;         // sum of e^x with x = logit - peak
  double moment;       // sum of x e^x
  double scaled_mass;  // sum of e^(x / temperature)
};

// Thresholds of one mass_above pass.
inline constexpr int kSampleLevels = 8;

struct SampleKernels {
  // peaks[b] = largest logit of block b. False when a logit is NaN or +inf.
  bool (*block_peaks)(const void* logits, DType dtype, int64_t count, float* peaks);
  // REQUIRES: no NaN, no +inf, peak = the largest logit, finite; 0 < inverse_temperature < inf.
  // Relative error below 1e-6. -inf adds nothing.
  SampleSums (*sums)(const void* logits, DType dtype, int64_t count, float peak,
                     float inverse_temperature);
  // masses[i] = sum of e^((logit - peak) * inverse_temperature) over logits > thresholds[i].
  // REQUIRES as for sums; kSampleLevels thresholds, none NaN.
  void (*mass_above)(const void* logits, DType dtype, int64_t count, float peak,
                     float inverse_temperature, const float* thresholds, double* masses);
  // Writes logit and id of every finite logit >= threshold, in no particular order; returns how
  // many. REQUIRES: room for all of them; peaks from block_peaks.
  int64_t (*collect)(const void* logits, DType dtype, int64_t count, const float* peaks,
                     float threshold, SampleCandidate* out);
  // Sets the weights. REQUIRES: 0 < temperature < inf.
  void (*weigh)(SampleCandidate* candidates, int64_t count, float peak, float temperature);
};
KV_DECLARE_ISA_TABLE(SampleKernels, kSampleKernels)

}  // namespace kvcore
