// Attention of the newest query, summed over a layer. One work item is a layer of a row: its lanes
// are scored together. Bound by the products of the group's queries with the keys.
#include "ops/score_tova.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "cpu/cpu_ops.h"
#include "cpu/lane_keys.h"
#include "cpu/rkv_common.h"
#include "cpu/slot_scores.h"

namespace kvcore {
namespace {

// weight[s] = sum over the lane's query heads of their softmax. False, with zeroes, when some q.k
// is not finite.
bool GroupAttention(const Lane& lane, double scale, std::vector<double>* weight) {
  thread_local std::vector<double> column, logits;  // grow to the longest lane, then stay
  const KvCacheView& view = lane.view;
  const auto len = static_cast<size_t>(lane.len);
  const int64_t group = view.num_q_heads() / view.num_kv_heads();
  weight->assign(len, 0.0);
  if (len == 0) return true;
  const int64_t newest = (lane.seq_len() - 1) % view.window();
  logits.assign(len * static_cast<size_t>(group), 0.0);
  for (int64_t dim = 0; dim < view.head_dim; ++dim) {
    KeyColumn(lane, dim, &column);
    for (int64_t g = 0; g < group; ++g) {
      const char* ring = view.Ring(lane.row(), lane.layer(), lane.head() * group + g);
      const double q = StoredNumber(ring, view.dtype(), newest * view.head_dim + dim);
      double* logit = logits.data() + static_cast<size_t>(g) * len;
      for (size_t s = 0; s < len; ++s) logit[s] += q * column[s];
    }
  }
  for (double x : logits)
    if (!std::isfinite(x)) return false;
  for (int64_t g = 0; g < group; ++g) {
    double* logit = logits.data() + static_cast<size_t>(g) * len;
    const double top = *std::max_element(logit, logit + len);
    double sum = 0.0;
    for (size_t s = 0; s < len; ++s) sum += logit[s] = std::exp((logit[s] - top) * scale);
    for (size_t s = 0; s < len; ++s) (*weight)[s] += logit[s] / sum;
  }
  return true;
}

using Received = std::pair<int32_t, double>;  // position, attention

// Sorts by position and adds up equal positions, smaller values first.
void SumByPosition(std::vector<Received>* received) {
  std::sort(received->begin(), received->end());
  size_t count = 0;
  for (const Received& r : *received) {
    if (count > 0 && (*received)[count - 1].first == r.first)
      (*received)[count - 1].second += r.second;
    else
      (*received)[count++] = r;
  }
  received->resize(count);
}

}  // namespace

void ScoreTovaCpu(const KvCacheView& view, const ScoreTovaParams& p, Stream) {
  view.Check();
  KV_CHECK(p.protect >= 0) << "protect: expected >= 0, got " << p.protect;
  if (p.scale) CheckScale(*p.scale);
  KV_CHECK(view.window() >= 1) << "query_ring: expected a window of >= 1 queries, got none";
  CheckSlotScores(view, p.rows, p.score);
  CheckSeqLens(view, p.rows);
  const LanesOfRows lanes(view, p.rows);
  const int64_t slots = p.score.shape[3], heads = view.num_kv_heads();
  const double each = 1.0 / static_cast<double>(view.num_q_heads());
  const double scale = ScaleOr(p.scale, view.head_dim);
  FirstBadLane bad(lanes);

  ParallelFor(p.rows.shape[0] * view.num_layers(), 1, [&](int64_t begin, int64_t end, int) {
    thread_local std::vector<int32_t> position;
    thread_local std::vector<double> weight;
    thread_local std::vector<Received> received;
    for (int64_t item = begin; item < end; ++item) {
      received.clear();
      for (int64_t index = item * heads; index < (item + 1) * heads; ++index) {
        const Lane lane = lanes[index];
        if (!GroupAttention(lane, scale, &weight)) bad.Add(index);
        for (int64_t slot = 0; slot < lane.len; ++slot)
          received.emplace_back(lane.Position(slot), weight[static_cast<size_t>(slot)]);
      }
      SumByPosition(&received);
      for (int64_t index = item * heads; index < (item + 1) * heads; ++index) {
        LanePositions(lanes[index], &position);
        float* score = p.score.ptr<float>() + index * slots;
        for (size_t slot = 0; slot < position.size(); ++slot) {
          const Received key(position[slot], -std::numeric_limits<double>::infinity());
          const auto sum = std::lower_bound(received.begin(), received.end(), key);
          score[slot] = static_cast<float>(sum->second * each);
        }
        FinishScores(position, p.protect, slots, score);
      }
    }
  });
  bad.Check("score_tova", "its keys or newest queries are not finite");
}

}  // namespace kvcore
