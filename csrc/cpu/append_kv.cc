#include "ops/append_kv.h"

#include <algorithm>
#include <cstring>

#include "base/parallel.h"
#include "cpu/check_lanes.h"
#include "cpu/cpu_ops.h"
#include "cpu/slot_bits.h"

namespace kvcore {
namespace {

constexpr int64_t kMinRangeElements = 16'384;

// Keys go in pairs of dims that lie 16 pairs apart; values are one row.
template <typename Pair>
void WriteKey(const void* from, void* block, int64_t slot, int64_t head_dim) {
  const char* src = static_cast<const char*>(from);
  Pair* dst = static_cast<Pair*>(block) + slot;
  for (int64_t i = 0; i < head_dim / 2; ++i)
    std::memcpy(dst + i * kBlockSlots, src + i * static_cast<int64_t>(sizeof(Pair)), sizeof(Pair));
}

template <typename Pair>
void ReadKey(const void* block, int64_t slot, int64_t head_dim, void* to) {
  const Pair* src = static_cast<const Pair*>(block) + slot;
  char* dst = static_cast<char*>(to);
  for (int64_t i = 0; i < head_dim / 2; ++i)
    std::memcpy(dst + i * static_cast<int64_t>(sizeof(Pair)), src + i * kBlockSlots, sizeof(Pair));
}

// Whether all numbers of a row are finite: no exponent is all ones.
template <typename Bits>
bool IsFinite(const void* row, int64_t count, Bits exponent) {
  const char* at = static_cast<const char*>(row);
  Bits bad = 0;
  for (int64_t i = 0; i < count; ++i) {
    Bits x;
    std::memcpy(&x, at + i * static_cast<int64_t>(sizeof(Bits)), sizeof(Bits));
    bad = static_cast<Bits>(bad | ((x & exponent) == exponent));
  }
  return bad == 0;
}

// What stands for a row that is not finite: kMaxHeadDim times the type's quiet NaN.
class FiniteRows {
 public:
  explicit FiniteRows(DType dtype) : dtype_(dtype) {
    if (dtype == DType::kF32)
      std::fill_n(reinterpret_cast<uint32_t*>(nan_), kMaxHeadDim, 0x7fc00000u);
    else
      std::fill_n(reinterpret_cast<uint16_t*>(nan_), kMaxHeadDim,
                  static_cast<uint16_t>(dtype == DType::kBF16 ? 0x7fc0 : 0x7e00));
  }
  // The row, or NaN throughout where it is not finite, which is then noted in `finite`.
  const char* Checked(const char* row, int64_t head_dim, bool* finite) const {
    const bool good = dtype_ == DType::kF32    ? IsFinite<uint32_t>(row, head_dim, 0x7f800000u)
                      : dtype_ == DType::kBF16 ? IsFinite<uint16_t>(row, head_dim, 0x7f80)
                                               : IsFinite<uint16_t>(row, head_dim, 0x7c00);
    *finite &= good;
    return good ? row : nan_;
  }

 private:
  DType dtype_;
  alignas(8) char nan_[kMaxHeadDim * 4];
};

const char* RowOf(const TensorView& t, int64_t token, int64_t head) {
  return t.ptr<char>() + (token * t.stride[0] + head * t.stride[1]) * DTypeBytes(t.dtype);
}

void CheckParams(const KvCacheView& view, const AppendKvParams& p) {
  view.Check();
  CheckLayer(view, p.layer);
  Dims dims;
  MatchTensor({"tokens", "kv_heads", "head_dim"})
      .DType(view.dtype())
      .InnerContiguous()
      .Check(p.key, "key", &dims);
  MatchTensor({"tokens", "kv_heads", "head_dim"})
      .DType(view.dtype())
      .InnerContiguous()
      .Check(p.value, "value", &dims);
  KV_CHECK(dims["kv_heads"] == view.num_kv_heads() && dims["head_dim"] == view.head_dim)
      << "key: expected [tokens, " << view.num_kv_heads() << ", " << view.head_dim << "], got "
      << p.key.ShapeString();
  KV_CHECK(p.query.empty() == view.query_ring().empty() || p.key.shape[0] == 0)
      << "query: " << (p.query.empty() ? "required by" : "given without") << " the query ring";
  if (!p.query.empty()) {
    MatchTensor({"tokens", "q_heads", "head_dim"})
        .DType(view.dtype())
        .InnerContiguous()
        .Check(p.query, "query", &dims);
    KV_CHECK(view.query_ring().empty() || dims["q_heads"] == view.num_q_heads())
        << "query: expected " << view.num_q_heads() << " heads, got " << p.query.ShapeString();
  }
  const int64_t tokens = p.key.shape[0];
  CheckBatch(view, p.batch, tokens, &dims);
  const LanesOfBatch lanes(view, p.batch, p.layer);
  for (int64_t s = 0; s < lanes.num_seqs(); ++s) {
    const int64_t count = lanes.Count(s);
    if (count == 0) continue;
    for (int64_t h = 0; h < view.num_kv_heads(); ++h) {
      const Lane lane = lanes.At(s, h);
      lane.Check(count);
      KV_CHECK(lane.Replaced() < lane.len) << "replace: expected a slot below lane_len " << lane.len
                                           << " in " << lane.Name() << ", got " << lane.Replaced();
      if (count == 1 && lane.Replaced() >= 0 && !view.state_of.empty()) lane.CheckState();
    }
    const int64_t row = lanes.Row(s), total = view.seq_len.ptr<int32_t>()[row];
    KV_CHECK(total >= count) << "seq_len[" << row << "]: expected at least " << count << ", got "
                             << total;
  }
}

void WriteQueries(const KvCacheView& view, const AppendKvParams& p, const FiniteRows& check) {
  const int64_t q_heads = view.num_q_heads(), window = view.window();
  const int64_t row_bytes = view.head_dim * DTypeBytes(view.dtype());
  const LanesOfBatch lanes(view, p.batch, p.layer);
  for (int64_t s = 0; s < lanes.num_seqs(); ++s) {
    const int64_t row = lanes.Row(s), count = lanes.Count(s);
    const int64_t first_position = view.seq_len.ptr<int32_t>()[row] - count;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t position = first_position + t;
      bool finite = true;
      for (int64_t h = 0; h < q_heads; ++h) {
        const char* query =
            check.Checked(RowOf(p.query, lanes.First(s) + t, h), view.head_dim, &finite);
        if (t >= count - window)
          std::memcpy(view.Ring(row, p.layer, h) + position % window * row_bytes, query,
                      static_cast<size_t>(row_bytes));
      }
      if (!finite) NoteNotFinite(view, row, position);
    }
  }
}

// Slot `slot` of block `block` begins with the plane's start values.
template <typename T>
void BeginSlot(const SideTensor& plane, int64_t block, int64_t slot) {
  const int64_t channels = plane.tensor.shape[1];
  T* to = plane.tensor.ptr<T>() + block * channels * kBlockSlots + slot;
  for (int64_t c = 0; c < channels; ++c) to[c * kBlockSlots] = plane.start.ptr<T>()[c];
}

}  // namespace

void AppendKvCpu(const KvCacheView& view, const AppendKvParams& p, Stream) {
  CheckParams(view, p);
  const int64_t tokens = p.key.shape[0];
  if (tokens == 0) return;
  const int64_t heads = view.num_kv_heads(), head_dim = view.head_dim;
  const int64_t element = DTypeBytes(view.dtype()), block_bytes = BlockElements(head_dim) * element;
  const auto write_key = element == 2 ? WriteKey<uint32_t> : WriteKey<uint64_t>;
  const auto read_key = element == 2 ? ReadKey<uint32_t> : ReadKey<uint64_t>;
  const RkvStateLayout state = view.StateLayout();
  const LanesOfBatch lanes(view, p.batch, p.layer);
  const FiniteRows check(view.dtype());
  const int64_t grain =
      std::max<int64_t>(1, lanes.num_seqs() * kMinRangeElements / (tokens * head_dim));
  ParallelFor(lanes.size(), grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t s = i / heads, head = i % heads, count = lanes.Count(s), row = lanes.Row(s);
      if (count == 0) continue;
      const Lane lane = lanes.At(s, head);
      const int32_t replaced = count == 1 ? lane.Replaced() : kNoReplace;
      const int64_t first_slot = replaced >= 0 ? replaced : lane.len - count;
      if (replaced >= 0 && !view.lane_state.empty())
        read_key(view.key_blocks.ptr<char>() + lane.Block(replaced) * block_bytes,
                 replaced % kBlockSlots, head_dim, lane.State() + state.replaced_key);
      const int64_t first_position = view.seq_len.ptr<int32_t>()[row] - count;
      for (int64_t t = 0; t < count; ++t) {
        const int64_t block = lane.Block(first_slot + t), slot = (first_slot + t) % kBlockSlots;
        const int64_t token = lanes.First(s) + t;
        bool finite = true;
        const char* key = check.Checked(RowOf(p.key, token, head), head_dim, &finite);
        const char* value = check.Checked(RowOf(p.value, token, head), head_dim, &finite);
        if (!finite) NoteNotFinite(view, row, first_position + t);
        write_key(key, view.key_blocks.ptr<char>() + block * block_bytes, slot, head_dim);
        std::memcpy(view.value_blocks.ptr<char>() + block * block_bytes +
                        RowMajorOffset(slot, 0, head_dim) * element,
                    value, static_cast<size_t>(head_dim * element));
        lane.Position(first_slot + t) = static_cast<int32_t>(first_position + t);
        for (const SideTensor& plane : view.planes)
          if (!plane.empty())
            WithBits(plane.tensor.dtype, [&]<typename T>() { BeginSlot<T>(plane, block, slot); });
      }
    }
  });
  if (!view.query_ring().empty()) WriteQueries(view, p, check);
}

}  // namespace kvcore
