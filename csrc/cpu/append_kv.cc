#include "ops/append_kv.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/parallel.h"
#include "cpu/check_lanes.h"
#include "cpu/cpu_ops.h"

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
  KV_CHECK(p.query.empty() == view.query_ring.empty() || p.key.shape[0] == 0)
      << "query: " << (p.query.empty() ? "required by" : "given without") << " the query ring";
  if (!p.query.empty()) {
    MatchTensor({"tokens", "q_heads", "head_dim"})
        .DType(view.dtype())
        .InnerContiguous()
        .Check(p.query, "query", &dims);
    KV_CHECK(view.query_ring.empty() || dims["q_heads"] == view.query_ring.shape[2])
        << "query: expected " << view.query_ring.shape[2] << " heads, got "
        << p.query.ShapeString();
  }
  const int64_t tokens = p.key.shape[0];
  CheckBatch(view, p.batch, tokens, &dims);
  const int32_t* rows = p.batch.rows.ptr<int32_t>();
  const int32_t* cu = p.batch.cu_tokens.ptr<int32_t>();
  for (int64_t s = 0; s < p.batch.rows.shape[0]; ++s) {
    const int64_t count = cu[s + 1] - cu[s];
    if (count == 0) continue;
    for (int64_t h = 0; h < view.num_kv_heads(); ++h) {
      CheckLane(view, rows[s], p.layer, h, count);
      const int64_t lane = view.LaneId(rows[s], p.layer, h);
      KV_CHECK(view.Replaced(lane) < view.lane_len.ptr<int32_t>()[lane])
          << "replace: expected a slot below lane_len " << view.lane_len.ptr<int32_t>()[lane]
          << " in row " << rows[s] << ", layer " << p.layer << ", kv head " << h << ", got "
          << view.Replaced(lane);
      KV_CHECK(count != 1 || view.Replaced(lane) < 0 || view.state_of.empty() ||
               view.State(lane) != nullptr)
          << "state_of: expected a state of [0, " << view.num_states() << ") in row " << rows[s]
          << ", layer " << p.layer << ", kv head " << h << ", whose slot " << view.Replaced(lane)
          << " is overwritten, got " << view.state_of.ptr<int32_t>()[lane];
    }
    const int64_t total = view.seq_len.ptr<int32_t>()[rows[s]];
    KV_CHECK(total >= count) << "seq_len[" << rows[s] << "]: expected at least " << count
                             << ", got " << total;
  }
}

void WriteQueries(const KvCacheView& view, const AppendKvParams& p, const FiniteRows& check) {
  const int64_t q_heads = view.query_ring.shape[2], window = view.window();
  const int64_t row_bytes = view.head_dim * DTypeBytes(view.dtype());
  const int32_t* rows = p.batch.rows.ptr<int32_t>();
  const int32_t* cu = p.batch.cu_tokens.ptr<int32_t>();
  for (int64_t s = 0; s < p.batch.rows.shape[0]; ++s) {
    const int64_t total = view.seq_len.ptr<int32_t>()[rows[s]];
    for (int64_t token = cu[s]; token < cu[s + 1]; ++token) {
      const int64_t position = total - cu[s + 1] + token;
      bool finite = true;
      for (int64_t h = 0; h < q_heads; ++h) {
        const char* query = check.Checked(RowOf(p.query, token, h), view.head_dim, &finite);
        if (token < cu[s + 1] - window) continue;
        const int64_t ring_row =
            ((rows[s] * view.num_layers() + p.layer) * q_heads + h) * window + position % window;
        std::memcpy(view.query_ring.ptr<char>() + ring_row * row_bytes, query,
                    static_cast<size_t>(row_bytes));
      }
      if (!finite) NoteNotFinite(view, rows[s], position);
    }
  }
}

}  // namespace

void AppendKvCpu(const KvCacheView& view, const AppendKvParams& p, Stream) {
  CheckParams(view, p);
  const int64_t tokens = p.key.shape[0];
  if (tokens == 0) return;
  const int64_t seqs = p.batch.rows.shape[0], heads = view.num_kv_heads();
  const int64_t element = DTypeBytes(view.dtype()), head_dim = view.head_dim;
  const int64_t block_bytes = BlockElements(head_dim) * element;
  const auto write_key = element == 2 ? WriteKey<uint32_t> : WriteKey<uint64_t>;
  const auto read_key = element == 2 ? ReadKey<uint32_t> : ReadKey<uint64_t>;
  const RkvStateLayout state = view.StateLayout();
  const int64_t channels = view.stats_channels();
  const int32_t* rows = p.batch.rows.ptr<int32_t>();
  const int32_t* cu = p.batch.cu_tokens.ptr<int32_t>();
  const FiniteRows check(view.dtype());
  const int64_t grain = std::max<int64_t>(1, seqs * kMinRangeElements / (tokens * head_dim));
  ParallelFor(seqs * heads, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t s = i / heads, head = i % heads, count = cu[s + 1] - cu[s];
      const int64_t lane = view.LaneId(rows[s], p.layer, head);
      const int32_t* table = view.block_table.ptr<int32_t>() + lane * view.max_blocks();
      const int32_t replaced = count == 1 ? view.Replaced(lane) : -1;
      const int64_t first_slot =
          replaced >= 0 ? replaced : view.lane_len.ptr<int32_t>()[lane] - count;
      if (replaced >= 0 && !view.lane_state.empty())
        read_key(view.key_blocks.ptr<char>() + table[replaced / kBlockSlots] * block_bytes,
                 replaced % kBlockSlots, head_dim, view.State(lane) + state.replaced_key);
      const int64_t first_position = view.seq_len.ptr<int32_t>()[rows[s]] - count;
      for (int64_t t = 0; t < count; ++t) {
        const int64_t slot = (first_slot + t) % kBlockSlots;
        const int64_t block = table[(first_slot + t) / kBlockSlots];
        bool finite = true;
        const char* key = check.Checked(RowOf(p.key, cu[s] + t, head), head_dim, &finite);
        const char* value = check.Checked(RowOf(p.value, cu[s] + t, head), head_dim, &finite);
        if (!finite) NoteNotFinite(view, rows[s], first_position + t);
        write_key(key, view.key_blocks.ptr<char>() + block * block_bytes, slot, head_dim);
        std::memcpy(view.value_blocks.ptr<char>() + block * block_bytes +
                        RowMajorOffset(slot, 0, head_dim) * element,
                    value, static_cast<size_t>(head_dim * element));
        view.position.ptr<int32_t>()[block * kBlockSlots + slot] =
            static_cast<int32_t>(first_position + t);
        for (int64_t c = 0; c < channels; ++c)
          view.attention_stats.ptr<float>()[(block * channels + c) * kBlockSlots + slot] =
              view.stats_start.ptr<float>()[c];
      }
    }
  });
  if (!view.query_ring.empty()) WriteQueries(view, p, check);
}

}  // namespace kvcore
