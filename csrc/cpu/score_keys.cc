// Scores from the keys of a lane alone: their norms, or how far they are from the mean direction.
// One lane per work item; bound by reading the keys, once for norms, twice for differences.
#include "ops/score_keys.h"

#include <cmath>
#include <vector>

#include "base/parallel.h"
#include "cpu/cpu_ops.h"
#include "cpu/lane_keys.h"
#include "cpu/slot_scores.h"

namespace kvcore {
namespace {

constexpr double kTiny = 1e-8;

// x to 17 significant bits.
double Coarse(double x) {
  int exponent = 0;
  const double mantissa = std::frexp(x, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(mantissa, 17)), exponent - 17);
}

void ScoreLane(const Lane& lane, KeyScore kind, float* score) {
  thread_local std::vector<double> column, norm, dot;  // grow to the longest lane, then stay
  const auto len = static_cast<size_t>(lane.len);
  const int64_t head_dim = lane.view.head_dim;
  norm.assign(len, 0.0);
  for (int64_t dim = 0; dim < head_dim; ++dim) {
    KeyColumn(lane, dim, &column);
    for (size_t s = 0; s < len; ++s) norm[s] += column[s] * column[s];
  }
  for (double& x : norm) x = std::sqrt(x);
  if (kind == KeyScore::kNorm) {
    for (size_t s = 0; s < len; ++s) score[s] = static_cast<float>(-Coarse(norm[s]));
    return;
  }
  // -cos(k_s, m) with m the mean of unit keys, one dim of m at a time.
  dot.assign(len, 0.0);
  double mean_square = 0.0;
  for (int64_t dim = 0; dim < head_dim; ++dim) {
    KeyColumn(lane, dim, &column);
    double mean = 0.0;
    for (size_t s = 0; s < len; ++s) mean += column[s] / (norm[s] + kTiny);
    mean /= static_cast<double>(len);
    mean_square += mean * mean;
    for (size_t s = 0; s < len; ++s) dot[s] += column[s] * mean;
  }
  const double mean_norm = std::sqrt(mean_square) + kTiny;
  for (size_t s = 0; s < len; ++s)
    score[s] = static_cast<float>(-dot[s] / ((norm[s] + kTiny) * mean_norm));
}

}  // namespace

void ScoreKeysCpu(const KvCacheView& view, const ScoreKeysParams& p, Stream) {
  view.Check();
  KV_CHECK(p.protect >= 0) << "protect: expected >= 0, got " << p.protect;
  KV_CHECK(p.kind == KeyScore::kNorm || p.kind == KeyScore::kDifference)
      << "kind: expected 0 (norm) or 1 (difference), got " << static_cast<int64_t>(p.kind);
  CheckSlotScores(view, p.rows, p.score);
  const LanesOfRows lanes(view, p.rows);
  const int64_t slots = p.score.shape[3];
  FirstBadLane bad(lanes);

  ParallelFor(lanes.size(), 1, [&](int64_t begin, int64_t end, int) {
    thread_local std::vector<int32_t> position;
    for (int64_t index = begin; index < end; ++index) {
      const Lane lane = lanes[index];
      float* score = p.score.ptr<float>() + index * slots;
      ScoreLane(lane, p.kind, score);
      for (int64_t slot = 0; slot < lane.len; ++slot)
        if (!std::isfinite(score[slot])) bad.Add(index);
      LanePositions(lane, &position);
      FinishScores(position, p.protect, slots, score);
    }
  });
  bad.Check("score_keys", "its keys are not finite");
}

}  // namespace kvcore
