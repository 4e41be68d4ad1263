#include "cpu/check_lanes.h"

#include <vector>

#include "base/check.h"

namespace kvcore {

void CheckRows(const KvCacheView& view, const TensorView& rows, Dims* dims) {
  MatchTensor({"seqs"}).DType(DType::kI32).Contiguous().Check(rows, "rows", dims);
  const int32_t* row = rows.ptr<int32_t>();
  std::vector<bool> seen(static_cast<size_t>(view.num_rows()));
  for (int64_t s = 0; s < rows.shape[0]; ++s) {
    KV_CHECK(row[s] >= 0 && row[s] < view.num_rows())
        << "rows[" << s << "]: expected a row in [0, " << view.num_rows() << "), got " << row[s];
    KV_CHECK(!seen[static_cast<size_t>(row[s])])
        << "rows[" << s << "]: row " << row[s] << " appears twice";
    seen[static_cast<size_t>(row[s])] = true;
  }
}

void CheckBatch(const KvCacheView& view, const RaggedBatch& batch, int64_t tokens, Dims* dims) {
  CheckRows(view, batch.rows, dims);
  const int64_t seqs = batch.rows.shape[0];
  MatchTensor({"_"}).DType(DType::kI32).Contiguous().Check(batch.cu_tokens, "cu_tokens", dims);
  KV_CHECK(batch.cu_tokens.shape[0] == seqs + 1)
      << "cu_tokens: expected " << seqs + 1 << " entries, got " << batch.cu_tokens.shape[0];
  const int32_t* cu = batch.cu_tokens.ptr<int32_t>();
  KV_CHECK(cu[0] == 0) << "cu_tokens[0]: expected 0, got " << cu[0];
  for (int64_t s = 0; s < seqs; ++s)
    KV_CHECK(cu[s + 1] >= cu[s]) << "cu_tokens[" << s + 1 << "]: expected at least " << cu[s]
                                 << ", got " << cu[s + 1];
  KV_CHECK(cu[seqs] == tokens) << "cu_tokens[" << seqs << "]: expected the number of tokens, "
                               << tokens << ", got " << cu[seqs];
}

void CheckLayer(const KvCacheView& view, int64_t layer) {
  KV_CHECK(layer >= 0 && layer < view.num_layers())
      << "layer: expected a layer in [0, " << view.num_layers() << "), got " << layer;
}

void CheckLane(const KvCacheView& view, int64_t row, int64_t layer, int64_t head, int64_t min_len) {
  const int64_t lane = view.LaneId(row, layer, head);
  const int64_t len = view.lane_len.ptr<int32_t>()[lane];
  KV_CHECK(len >= min_len) << "lane_len: expected at least " << min_len << " slots in row " << row
                           << ", layer " << layer << ", head " << head << ", got " << len;
  KV_CHECK(len >= 0 && BlocksFor(len) <= view.max_blocks())
      << "lane_len: row " << row << ", layer " << layer << ", head " << head << " has " << len
      << " slots, its table holds " << view.max_blocks() * kBlockSlots;
  const int32_t* table = view.block_table.ptr<int32_t>() + lane * view.max_blocks();
  const auto num_blocks = static_cast<uint64_t>(view.num_blocks());
  for (int64_t b = 0; b < BlocksFor(len); ++b)
    KV_CHECK(static_cast<uint64_t>(static_cast<int64_t>(table[b])) < num_blocks)
        << "block_table: entry " << b << " of row " << row << ", layer " << layer << ", head "
        << head << ": expected a block in [0, " << num_blocks << "), got " << table[b];
}

void NoteNotFinite(const KvCacheView& view, int64_t row, int64_t position) {
  if (view.not_finite.empty()) return;
  const auto wanted = static_cast<int32_t>(position + 1);
  int32_t* const first = view.not_finite.ptr<int32_t>() + row;
  int32_t known = __atomic_load_n(first, __ATOMIC_RELAXED);
  while ((known == 0 || wanted < known) &&
         !__atomic_compare_exchange_n(first, &known, wanted, /*weak=*/true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
}

}  // namespace kvcore
