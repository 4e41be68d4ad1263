// Uniform random scores that depend on nothing but (seed, layer, head, position).
#include "ops/score_random.h"

#include <vector>

#include "base/parallel.h"
#include "base/rng.h"
#include "cpu/cpu_ops.h"
#include "cpu/slot_scores.h"

namespace kvcore {
void ScoreRandomCpu(const KvCacheView& view, const ScoreRandomParams& p, Stream) {
  view.Check();
  KV_CHECK(p.protect >= 0) << "protect: expected >= 0, got " << p.protect;
  CheckSlotScores(view, p.rows, p.score);
  const LanesOfRows lanes(view, p.rows);
  const int64_t slots = p.score.shape[3];

  ParallelFor(lanes.size(), 1, [&](int64_t begin, int64_t end, int) {
    thread_local std::vector<int32_t> position;
    for (int64_t index = begin; index < end; ++index) {
      const Lane lane = lanes[index];
      LanePositions(lane, &position);
      const uint64_t key = HashKey(HashKey(p.seed, static_cast<uint64_t>(lane.layer())),
                                   static_cast<uint64_t>(lane.head()));
      float* score = p.score.ptr<float>() + index * slots;
      for (size_t slot = 0; slot < position.size(); ++slot)
        score[slot] = UniformFloat(key, static_cast<uint64_t>(position[slot]));
      FinishScores(position, p.protect, slots, score);
    }
  });
}

}  // namespace kvcore
