#include "support/lane_fixture.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

namespace kvcore {
namespace {

CacheShape ShapeOf(const LaneShape& s, const std::vector<int32_t>& lens) {
  KV_ICHECK(static_cast<int64_t>(lens.size()) == s.rows * s.layers * s.kv_heads)
      << lens.size() << " lengths";
  int64_t blocks = s.spare_blocks;
  for (int32_t n : lens) {
    KV_ICHECK(n >= 0 && BlocksFor(n) <= s.max_blocks) << "length " << n;
    blocks += BlocksFor(n);
  }
  return {.dtype = s.dtype,
          .rows = s.rows,
          .layers = s.layers,
          .kv_heads = s.kv_heads,
          .q_heads = s.q_heads,
          .head_dim = s.head_dim,
          .max_blocks = s.max_blocks,
          .blocks = blocks,
          .window = s.window,
          .notes_not_finite = s.notes_not_finite,
          .planes = s.planes};
}

}  // namespace

LaneFixture::LaneFixture(const LaneShape& shape, const std::vector<int32_t>& lens, uint64_t seed)
    : CacheTensors(ShapeOf(shape, lens)), shape_(shape) {
  const LaneShape& s = shape_;
  const int64_t blocks = position.view().shape[0];
  not_finite.Fill(0);
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal;
  free_blocks_.resize(static_cast<size_t>(blocks));
  std::iota(free_blocks_.begin(), free_blocks_.end(), 0);
  std::shuffle(free_blocks_.begin(), free_blocks_.end(), rng);

  for (int64_t row = 0; row < s.rows; ++row) {
    const int64_t row_lanes = s.layers * s.kv_heads;
    const auto first = lens.begin() + row * row_lanes;
    const int32_t longest = row_lanes > 0 ? *std::max_element(first, first + row_lanes) : 0;
    const int32_t total = longest > 0 ? 2 * longest + 3 : 0;
    seq_len.Set({row}, total);
    for (int64_t layer = 0; layer < s.layers; ++layer)
      for (int64_t head = 0; head < s.kv_heads; ++head) {
        const int64_t lane = (row * s.layers + layer) * s.kv_heads + head;
        const int64_t n = lens[static_cast<size_t>(lane)];
        lane_len.Set({row, layer, head}, static_cast<double>(n));
        for (int64_t b = 0; b < BlocksFor(n); ++b) {
          block_table.Set({row, layer, head, b}, free_blocks_.back());
          free_blocks_.pop_back();
        }
        std::vector<int32_t> positions(static_cast<size_t>(std::max(total - 1, 0)));
        std::iota(positions.begin(), positions.end(), 0);
        std::shuffle(positions.begin(), positions.end(), rng);
        positions.resize(static_cast<size_t>(n));
        if (n > 0) positions[rng() % static_cast<uint64_t>(n)] = total - 1;
        for (int64_t slot = 0; slot < n; ++slot) {
          SetPosition(row, layer, head, slot, positions[static_cast<size_t>(slot)]);
          for (size_t p = 0; p < planes.size(); ++p)
            for (int64_t c = 0; c < s.planes[p].channels; ++c)
              planes[p].Set({Block(row, layer, head, slot), c, slot % kBlockSlots},
                            (IsFloat(s.planes[p].dtype) ? 0.05 : 50) * std::fabs(normal(rng)));
          for (int64_t d = 0; d < s.head_dim; ++d) {
            SetKey(row, layer, head, slot, d, normal(rng));
            SetValue(row, layer, head, slot, d, normal(rng));
          }
        }
      }
  }
  if (s.window > 0) {
    for (int64_t row = 0; row < s.rows; ++row) {
      const int64_t total = static_cast<int64_t>(seq_len.Get({row}));
      for (int64_t layer = 0; layer < s.layers; ++layer)
        for (int64_t head = 0; head < s.q_heads; ++head)
          for (int64_t p = std::max<int64_t>(0, total - s.window); p < total; ++p)
            for (int64_t d = 0; d < s.head_dim; ++d)
              query_ring.Set({row, layer, head, p % s.window, d}, normal(rng));
    }
  }
}

int64_t LaneFixture::Len(int64_t row, int64_t layer, int64_t head) const {
  return static_cast<int64_t>(lane_len.Get({row, layer, head}));
}

int64_t LaneFixture::Block(int64_t row, int64_t layer, int64_t head, int64_t slot) const {
  return static_cast<int64_t>(block_table.Get({row, layer, head, slot / kBlockSlots}));
}

double LaneFixture::Key(int64_t row, int64_t layer, int64_t head, int64_t slot, int64_t dim) const {
  return key_blocks.Get({Block(row, layer, head, slot), CpuKeyOffset(slot % kBlockSlots, dim)});
}

double LaneFixture::Value(int64_t row, int64_t layer, int64_t head, int64_t slot,
                          int64_t dim) const {
  return value_blocks.Get(
      {Block(row, layer, head, slot), RowMajorOffset(slot % kBlockSlots, dim, shape_.head_dim)});
}

int64_t LaneFixture::Position(int64_t row, int64_t layer, int64_t head, int64_t slot) const {
  return static_cast<int64_t>(position.Get({Block(row, layer, head, slot), slot % kBlockSlots}));
}

double LaneFixture::Number(int64_t row, int64_t layer, int64_t head, int64_t slot, int64_t channel,
                           size_t plane) const {
  return planes[plane].Get({Block(row, layer, head, slot), channel, slot % kBlockSlots});
}

void LaneFixture::SetKey(int64_t row, int64_t layer, int64_t head, int64_t slot, int64_t dim,
                         double x) {
  key_blocks.Set({Block(row, layer, head, slot), CpuKeyOffset(slot % kBlockSlots, dim)}, x);
}

void LaneFixture::SetValue(int64_t row, int64_t layer, int64_t head, int64_t slot, int64_t dim,
                           double x) {
  value_blocks.Set(
      {Block(row, layer, head, slot), RowMajorOffset(slot % kBlockSlots, dim, shape_.head_dim)}, x);
}

void LaneFixture::SetPosition(int64_t row, int64_t layer, int64_t head, int64_t slot, int64_t at) {
  position.Set({Block(row, layer, head, slot), slot % kBlockSlots}, static_cast<double>(at));
}

void LaneFixture::Extend(int64_t row, int64_t count) {
  seq_len.Set({row}, seq_len.Get({row}) + static_cast<double>(count));
  for (int64_t layer = 0; layer < shape_.layers; ++layer)
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      const int64_t n = Len(row, layer, head);
      for (int64_t b = BlocksFor(n); b < BlocksFor(n + count); ++b) {
        KV_ICHECK(!free_blocks_.empty()) << "spare_blocks too small";
        block_table.Set({row, layer, head, b}, free_blocks_.back());
        free_blocks_.pop_back();
      }
      lane_len.Set({row, layer, head}, static_cast<double>(n + count));
    }
}

}  // namespace kvcore
