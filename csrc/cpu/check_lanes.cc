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

void NoteNotFinite(const KvCacheView& view, int64_t row, int64_t position) {
  const TensorView& not_finite = view.row_state(kNotFiniteAt);
  if (not_finite.empty()) return;
  const auto wanted = static_cast<int32_t>(position + 1);
  int32_t* const first = not_finite.ptr<int32_t>() + row;
  int32_t known = __atomic_load_n(first, __ATOMIC_RELAXED);
  while ((known == 0 || wanted < known) &&
         !__atomic_compare_exchange_n(first, &known, wanted, /*weak=*/true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
}

}  // namespace kvcore
