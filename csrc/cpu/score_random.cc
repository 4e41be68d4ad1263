// Uniform random scores that depend on nothing but (seed, layer, head, position).
#include "ops/score_random.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "base/parallel.h"
#include "base/rng.h"
#include "cpu/cpu_ops.h"
#include "cpu/slot_scores.h"

namespace kvcore {
namespace {

// The oldest of the `protect` newest positions; above every position when protect is 0.
int64_t FirstProtected(const int32_t* position, int64_t len, int64_t protect) {
  if (protect == 0) return std::numeric_limits<int64_t>::max();
  if (protect >= len) return std::numeric_limits<int64_t>::min();
  thread_local std::vector<int32_t> newest;  // grows to the longest lane, then stays
  newest.assign(position, position + len);
  std::nth_element(newest.begin(), newest.begin() + (protect - 1), newest.end(),
                   std::greater<int32_t>());
  return newest[static_cast<size_t>(protect - 1)];
}

}  // namespace

void ScoreRandomCpu(const KvCacheView& view, const ScoreRandomParams& p, Stream) {
  view.Check();
  KV_CHECK(p.protect >= 0) << "protect: expected >= 0, got " << p.protect;
  CheckSlotScores(view, p.rows, p.score);
  const int64_t slots = p.score.shape[3];

  ParallelFor(NumBatchLanes(view, p.rows), 1, [&](int64_t begin, int64_t end, int) {
    thread_local std::vector<int32_t> position;
    for (int64_t index = begin; index < end; ++index) {
      const BatchLane lane(view, p.rows, index);
      position.resize(static_cast<size_t>(lane.len));
      for (int64_t slot = 0; slot < lane.len; ++slot)
        position[static_cast<size_t>(slot)] = lane.Position(view, slot);

      const int64_t first_protected = FirstProtected(position.data(), lane.len, p.protect);
      const uint64_t key = HashKey(HashKey(p.seed, static_cast<uint64_t>(lane.layer)),
                                   static_cast<uint64_t>(lane.head));
      float* score = p.score.ptr<float>() + index * slots;
      for (int64_t slot = 0; slot < lane.len; ++slot) {
        const int32_t at = position[static_cast<size_t>(slot)];
        score[slot] = at >= first_protected ? std::numeric_limits<float>::infinity()
                                            : UniformFloat(key, static_cast<uint64_t>(at));
      }
      std::fill(score + lane.len, score + slots, -std::numeric_limits<float>::infinity());
    }
  });
}

}  // namespace kvcore
