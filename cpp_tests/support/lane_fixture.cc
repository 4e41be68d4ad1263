#include "support/lane_fixture.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace kvcore {

OwnedTensor::OwnedTensor(DType dtype, std::initializer_list<int64_t> shape)
    : layout_(MakeView(nullptr, dtype, shape)) {
  bytes_.resize(static_cast<size_t>(layout_.numel() * DTypeBytes(dtype)));
}

OwnedTensor::OwnedTensor(DType dtype, std::initializer_list<int64_t> shape,
                         std::initializer_list<int64_t> stride)
    : layout_(MakeView(nullptr, dtype, shape)) {
  std::copy(stride.begin(), stride.end(), layout_.stride);
  int64_t elements = layout_.numel() > 0 ? 1 : 0;
  for (int i = 0; i < layout_.ndim && elements > 0; ++i)
    elements += (layout_.shape[i] - 1) * layout_.stride[i];
  bytes_.resize(static_cast<size_t>(elements * DTypeBytes(dtype)));
}

OwnedTensor OwnedTensor::I32(const std::vector<int32_t>& values) {
  OwnedTensor t(DType::kI32, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) t.SetAt(static_cast<int64_t>(i), values[i]);
  return t;
}

TensorView OwnedTensor::view() const {
  static uint8_t nothing[64];
  TensorView v = layout_;
  v.data = const_cast<uint8_t*>(bytes_.empty() ? nothing : bytes_.data());
  return v;
}

int64_t OwnedTensor::Offset(std::initializer_list<int64_t> index) const {
  KV_ICHECK(static_cast<int>(index.size()) == layout_.ndim) << index.size() << " indices";
  int64_t offset = 0;
  int i = 0;
  for (int64_t at : index) {
    KV_ICHECK(at >= 0 && at < layout_.shape[i]) << "index " << at << " of dimension " << i;
    offset += at * layout_.stride[i++];
  }
  return offset;
}

double OwnedTensor::Get(std::initializer_list<int64_t> index) const { return At(Offset(index)); }

void OwnedTensor::Set(std::initializer_list<int64_t> index, double value) {
  SetAt(Offset(index), value);
}

double OwnedTensor::At(int64_t offset) const {
  const uint8_t* p = bytes_.data() + offset * DTypeBytes(layout_.dtype);
  const auto load = [p](auto x) {
    std::memcpy(&x, p, sizeof(x));
    return x;
  };
  switch (layout_.dtype) {
    case DType::kF32:
      return load(float{});
    case DType::kBF16:
      return ToFloat(load(BFloat16{}));
    case DType::kF16:
      return ToFloat(load(Half{}));
    case DType::kI32:
      return load(int32_t{});
    case DType::kI64:
      return static_cast<double>(load(int64_t{}));
    case DType::kF64:
      return load(double{});
    case DType::kU8:
    case DType::kBool:
      return *p;
  }
  return 0;
}

void OwnedTensor::SetAt(int64_t offset, double value) {
  uint8_t* p = bytes_.data() + offset * DTypeBytes(layout_.dtype);
  const auto store = [p](auto x) { std::memcpy(p, &x, sizeof(x)); };
  switch (layout_.dtype) {
    case DType::kF32:
      return store(static_cast<float>(value));
    case DType::kBF16:
      return store(FromFloat<BFloat16>(static_cast<float>(value)));
    case DType::kF16:
      return store(FromFloat<Half>(static_cast<float>(value)));
    case DType::kI32:
      return store(static_cast<int32_t>(value));
    case DType::kI64:
      return store(static_cast<int64_t>(value));
    case DType::kF64:
      return store(value);
    case DType::kU8:
    case DType::kBool:
      return store(static_cast<uint8_t>(value));
  }
}

void OwnedTensor::FillNormal(std::mt19937_64& rng, double scale) {
  std::normal_distribution<double> normal(0.0, scale);
  const int64_t n = static_cast<int64_t>(bytes_.size()) / DTypeBytes(layout_.dtype);
  for (int64_t i = 0; i < n; ++i) SetAt(i, normal(rng));
}

void OwnedTensor::Fill(double value) {
  const int64_t n = static_cast<int64_t>(bytes_.size()) / DTypeBytes(layout_.dtype);
  for (int64_t i = 0; i < n; ++i) SetAt(i, value);
}

LaneFixture::LaneFixture(const LaneShape& shape, const std::vector<int32_t>& lens, uint64_t seed)
    : shape_(shape) {
  const LaneShape& s = shape_;
  const int64_t lanes = s.rows * s.layers * s.kv_heads;
  KV_ICHECK(static_cast<int64_t>(lens.size()) == lanes) << lens.size() << " lengths";
  int64_t blocks = s.spare_blocks;
  for (int32_t n : lens) {
    KV_ICHECK(n >= 0 && BlocksFor(n) <= s.max_blocks) << "length " << n;
    blocks += BlocksFor(n);
  }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  key_blocks = OwnedTensor(s.dtype, {blocks, BlockElements(s.head_dim)});
  value_blocks = key_blocks;
  key_blocks.Fill(nan);
  value_blocks.Fill(nan);
  position = OwnedTensor(DType::kI32, {blocks, kBlockSlots});
  position.Fill(std::numeric_limits<int32_t>::min());
  if (s.stats_channels > 0) {
    attention_stats = OwnedTensor(DType::kF32, {blocks, s.stats_channels, kBlockSlots});
    attention_stats.Fill(nan);
    stats_start = OwnedTensor(DType::kF32, {s.stats_channels});
    for (int64_t c = 0; c < s.stats_channels; ++c) stats_start.SetAt(c, static_cast<double>(c));
  }
  block_table = OwnedTensor(DType::kI32, {s.rows, s.layers, s.kv_heads, s.max_blocks});
  block_table.Fill(kUnusedTableEntry);
  lane_len = OwnedTensor(DType::kI32, {s.rows, s.layers, s.kv_heads});
  seq_len = OwnedTensor(DType::kI32, {s.rows});

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
          for (int64_t c = 0; c < s.stats_channels; ++c)
            attention_stats.Set({Block(row, layer, head, slot), c, slot % kBlockSlots},
                                0.05 * std::fabs(normal(rng)));
          for (int64_t d = 0; d < s.head_dim; ++d) {
            SetKey(row, layer, head, slot, d, normal(rng));
            SetValue(row, layer, head, slot, d, normal(rng));
          }
        }
      }
  }
  if (s.window > 0) {
    query_ring = OwnedTensor(s.dtype, {s.rows, s.layers, s.q_heads, s.window, s.head_dim});
    query_ring.Fill(nan);
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

KvCacheView LaneFixture::view() const {
  KvCacheView v;
  v.key_blocks = key_blocks.view();
  v.value_blocks = value_blocks.view();
  v.position = position.view();
  v.block_table = block_table.view();
  v.lane_len = lane_len.view();
  v.seq_len = seq_len.view();
  if (shape_.window > 0) v.query_ring = query_ring.view();
  if (shape_.stats_channels > 0) {
    v.attention_stats = attention_stats.view();
    v.stats_start = stats_start.view();
  }
  v.head_dim = shape_.head_dim;
  return v;
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

double LaneFixture::Stat(int64_t row, int64_t layer, int64_t head, int64_t slot,
                         int64_t channel) const {
  return attention_stats.Get({Block(row, layer, head, slot), channel, slot % kBlockSlots});
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

bool SameBytes(const OwnedTensor& a, const OwnedTensor& b) { return a.bytes() == b.bytes(); }

}  // namespace kvcore
