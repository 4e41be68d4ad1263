// Entropy and one draw per row: two vectorised passes over the vocabulary, then a selection among
// the few candidates that can matter.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "base/parallel.h"
#include "base/rng.h"
#include "cpu/cpu_ops.h"
#include "cpu/sample_tokens_kernels.h"
#include "cpu/scratch.h"

namespace kvcore {
namespace {

// Without top-k the draw nearly always lands among this many largest logits.
constexpr int64_t kFirstTry = 128;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The order in which probabilities accumulate: largest first, then the lower id.
bool Before(const SampleCandidate& a, const SampleCandidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

double Mass(const SampleCandidate* first, const SampleCandidate* last) {
  double mass = 0;
  for (; first != last; ++first) mass += static_cast<double>(first->weight);
  return mass;
}

struct Crossing {
  int64_t index;  // c[0..index] are then the index + 1 first candidates, c[index] the last of them
  double mass;    // of c[0..index]
};

// Finds the first candidate at which the accumulated weight satisfies reached(mass), which must be
// monotonic, by quickselect; rearranges the candidates. The last candidate when nothing does.
template <typename Reached>
Crossing FindCrossing(SampleCandidate* c, int64_t count, Reached&& reached) {
  int64_t begin = 0, end = count;
  double before = 0;
  while (end - begin > 64) {
    const int64_t middle = begin + (end - begin) / 2;
    std::nth_element(c + begin, c + middle, c + end, Before);
    const double mass = before + Mass(c + begin, c + middle);
    if (reached(mass)) {
      end = middle;
    } else {
      before = mass;
      begin = middle;
    }
  }
  std::sort(c + begin, c + end, Before);
  for (int64_t i = begin;; ++i) {
    before += static_cast<double>(c[i].weight);
    if (reached(before) || i == end - 1) return {i, before};
  }
}

class RowSampler {
 public:
  RowSampler(DType dtype, int64_t vocab, int64_t columns, Carver* carver)
      : kernels_(KV_ISA_TABLE(kSampleKernels)), dtype_(dtype), vocab_(vocab) {
    const int64_t blocks = (columns + kSampleBlock - 1) / kSampleBlock;
    num_blocks_ = (vocab + kSampleBlock - 1) / kSampleBlock;
    peaks_ = carver->Take<float>(blocks);
    sorted_peaks_ = carver->Take<float>(blocks);
    candidates_ = carver->Take<SampleCandidate>(columns);
  }
  static int64_t ScratchBytes(int64_t columns) {
    Carver carver(nullptr);
    const RowSampler measured(DType::kF32, columns, columns, &carver);
    return carver.bytes();
  }

  struct Result {
    int64_t token = -1;
    float entropy = kNan, logprob = kNan;
  };

  Result Sample(const void* logits, float temperature, int64_t top_k, float top_p, float min_p,
                double uniform) {
    logits_ = logits;
    if (!kernels_.block_peaks(logits, dtype_, vocab_, peaks_)) return {};
    peak_ = *std::max_element(peaks_, peaks_ + num_blocks_);
    if (peak_ == -std::numeric_limits<float>::infinity()) return {};
    // The total over the whole vocabulary is wanted only where nothing else bounds the candidates.
    const bool unbounded = temperature > 0 && top_k == 0 && min_p == 0;
    inverse_temperature_ = unbounded
                               ? std::clamp(1.0f / temperature, std::numeric_limits<float>::min(),
                                            std::numeric_limits<float>::max())
                               : 1.0f;
    const SampleSums sums = kernels_.sums(logits, dtype_, vocab_, peak_, inverse_temperature_);
    const SampleCandidate chosen =
        temperature == 0 ? Largest()
                         : Draw(temperature, top_k, top_p, min_p, uniform, sums.scaled_mass);
    Result r;
    r.token = chosen.id;
    r.entropy = static_cast<float>(std::max(0.0, std::log(sums.mass) - sums.moment / sums.mass));
    r.logprob = static_cast<float>(static_cast<double>(chosen.logit) - peak_ - std::log(sums.mass));
    return r;
  }

 private:
  SampleCandidate Largest() {
    const int64_t count = Collect(peak_);
    return *std::min_element(candidates_, candidates_ + count, Before);
  }

  SampleCandidate Draw(float temperature, int64_t top_k, float top_p, float min_p, double uniform,
                       double scaled_mass) {
    const bool nucleus = top_p < 1, unbounded = top_k == 0 && min_p == 0;
    const int64_t limit = top_k > 0 ? top_k : unbounded ? kFirstTry : vocab_;
    int64_t count = CollectLargest(limit, temperature, min_p);
    double total = Mass(candidates_, candidates_ + count);
    if (unbounded) {
      const double need = (nucleus ? static_cast<double>(top_p) : uniform) * scaled_mass;
      if (total <= need) count = CollectMass(need, temperature);
      total = scaled_mass;
    }
    if (nucleus) {
      const double need = static_cast<double>(top_p) * total;
      const Crossing last =
          FindCrossing(candidates_, count, [need](double mass) { return mass >= need; });
      count = last.index + 1;
      total = last.mass;
    }
    const double need = uniform * total;
    return candidates_[FindCrossing(candidates_, count, [need](double mass) {
                         return mass > need;
                       }).index];
  }

  int64_t Collect(float threshold) {
    return kernels_.collect(logits_, dtype_, vocab_, peaks_, threshold, candidates_);
  }

  // Makes candidates_ the `limit` first in order, those of weight 0 or below min_p left out;
  // returns how many.
  int64_t CollectLargest(int64_t limit, float temperature, float min_p) {
    // Whoever weighs min_p lies above this; the sums round, so that Weigh has the last word.
    float threshold =
        min_p == 0 ? -std::numeric_limits<float>::infinity()
                   : peak_ + temperature * (std::log(min_p) - 1e-3f) - 1e-6f * std::abs(peak_);
    // The limit-th largest block maximum is a lower bound of the limit-th largest logit.
    if (limit <= num_blocks_) {
      std::copy(peaks_, peaks_ + num_blocks_, sorted_peaks_);
      std::nth_element(sorted_peaks_, sorted_peaks_ + (limit - 1), sorted_peaks_ + num_blocks_,
                       std::greater<float>());
      threshold = std::max(threshold, sorted_peaks_[limit - 1]);
    }
    int64_t count = Collect(threshold);
    if (count > limit) {
      std::nth_element(candidates_, candidates_ + (limit - 1), candidates_ + count, Before);
      count = limit;
    }
    return Weigh(count, temperature, min_p);
  }

  // Makes candidates_ the largest logits that together weigh more than `need`, or all of them.
  int64_t CollectMass(double need, float temperature) {
    float thresholds[kSampleLevels];
    double masses[kSampleLevels];
    for (int i = 0; i < kSampleLevels; ++i)
      thresholds[i] = peak_ - temperature * static_cast<float>(2 * i + 2);
    kernels_.mass_above(logits_, dtype_, vocab_, peak_, inverse_temperature_, thresholds, masses);
    const double surely = need * (1 + 1e-5);  // the sums round
    for (int i = 0; i < kSampleLevels; ++i)
      if (masses[i] > surely) return Weigh(Collect(thresholds[i]), temperature, 0);
    return Weigh(Collect(-std::numeric_limits<float>::infinity()), temperature, 0);
  }

  // Weighs the candidates, leaves out those of weight 0 or below min_p; returns how many remain.
  int64_t Weigh(int64_t count, float temperature, float min_p) {
    kernels_.weigh(candidates_, count, peak_, temperature);
    return std::partition(
               candidates_, candidates_ + count,
               [min_p](const SampleCandidate& c) { return c.weight > 0 && c.weight >= min_p; }) -
           candidates_;
  }

  const SampleKernels& kernels_;
  const DType dtype_;
  const int64_t vocab_;
  int64_t num_blocks_;
  const void* logits_ = nullptr;
  float peak_ = 0, inverse_temperature_ = 1;
  float* peaks_;         // [num_blocks_]
  float* sorted_peaks_;  // [num_blocks_]
  SampleCandidate* candidates_;
};

void CheckParams(const SampleTokensParams& p, Dims* dims) {
  MatchTensor({"rows", "columns"}).Floating().InnerContiguous().Check(p.logits, "logits", dims);
  const auto per_row = [&](const TensorView& t, DType dtype, const char* name) {
    MatchTensor({"rows"}).DType(dtype).Contiguous().Check(t, name, dims);
  };
  per_row(p.temperature, DType::kF32, "temperature");
  per_row(p.top_k, DType::kI32, "top_k");
  per_row(p.top_p, DType::kF32, "top_p");
  per_row(p.min_p, DType::kF32, "min_p");
  per_row(p.rng_key, DType::kI64, "rng_key");
  per_row(p.rng_counter, DType::kI64, "rng_counter");
  per_row(p.token, DType::kI64, "token");
  per_row(p.entropy, DType::kF32, "entropy");
  per_row(p.logprob, DType::kF32, "logprob");
  const int64_t columns = (*dims)["columns"];
  KV_CHECK(columns <= std::numeric_limits<int32_t>::max())
      << "logits: expected fewer than 2^31 columns, got " << columns;
  KV_CHECK(p.vocab >= 1 && p.vocab <= columns)
      << "vocab: expected 1 <= vocab <= " << columns << ", got " << p.vocab;
  for (int64_t row = 0; row < (*dims)["rows"]; ++row) {
    const float temperature = p.temperature.ptr<float>()[row], top_p = p.top_p.ptr<float>()[row];
    const float min_p = p.min_p.ptr<float>()[row];
    KV_CHECK(temperature >= 0 && std::isfinite(temperature))
        << "temperature[" << row << "]: expected a finite number >= 0, got " << temperature;
    KV_CHECK(p.top_k.ptr<int32_t>()[row] >= 0)
        << "top_k[" << row << "]: expected >= 0, got " << p.top_k.ptr<int32_t>()[row];
    KV_CHECK(top_p > 0 && top_p <= 1)
        << "top_p[" << row << "]: expected a number in (0, 1], got " << top_p;
    KV_CHECK(min_p >= 0 && min_p <= 1)
        << "min_p[" << row << "]: expected a number in [0, 1], got " << min_p;
  }
}

}  // namespace

int64_t SampleTokensScratchBytes(int64_t columns, int threads) {
  return Scratch::Bytes(0, RowSampler::ScratchBytes(columns), threads);
}

void SampleTokensCpu(const SampleTokensParams& p, Stream) {
  Dims dims;
  CheckParams(p, &dims);
  const int64_t rows = dims["rows"], columns = dims["columns"];
  if (rows == 0) return;
  const Scratch scratch(p.scratch, 0, RowSampler::ScratchBytes(columns));
  const int64_t row_bytes = p.logits.stride[0] * DTypeBytes(p.logits.dtype);
  ParallelFor(rows, 1, scratch.threads(), [&](int64_t begin, int64_t end, int thread_id) {
    Carver carver(scratch.Of(thread_id));
    RowSampler sampler(p.logits.dtype, p.vocab, columns, &carver);
    for (int64_t row = begin; row < end; ++row) {
      const double uniform =
          UniformDouble(static_cast<uint64_t>(p.rng_key.ptr<int64_t>()[row]),
                        static_cast<uint64_t>(p.rng_counter.ptr<int64_t>()[row]));
      const RowSampler::Result r =
          sampler.Sample(static_cast<const char*>(p.logits.data) + row * row_bytes,
                         p.temperature.ptr<float>()[row], p.top_k.ptr<int32_t>()[row],
                         p.top_p.ptr<float>()[row], p.min_p.ptr<float>()[row], uniform);
      p.token.ptr<int64_t>()[row] = r.token;
      p.entropy.ptr<float>()[row] = r.entropy;
      p.logprob.ptr<float>()[row] = r.logprob;
    }
  });
}

}  // namespace kvcore
