#include "store/batch_plan.h"

#include <limits>

#include "base/check.h"
#include "base/tensor_match.h"

namespace kvcore {

void FillBatch(const KvStore& store, const std::vector<SeqId>& seqs,
               const std::vector<int64_t>& counts, const TensorView& rows,
               const TensorView& cu_tokens, const TensorView& positions) {
  const auto num_seqs = static_cast<int64_t>(seqs.size());
  KV_CHECK(counts.size() == seqs.size())
      << "counts: expected one for each of " << num_seqs << " seqs, got " << counts.size();
  std::vector<uint8_t> seen(store.view().num_rows(), 0);
  int64_t num_tokens = 0;
  for (int64_t i = 0; i < num_seqs; ++i) {
    const int64_t row = store.Row(seqs[i]);
    KV_CHECK(!seen[row]) << "seqs: expected each sequence once, got " << seqs[i]
                         << " again at index " << i;
    seen[row] = 1;
    KV_CHECK(counts[i] >= 0 && counts[i] <= store.SeqLen(seqs[i]))
        << "counts[" << i << "]: expected 0 to " << store.SeqLen(seqs[i]) << ", got " << counts[i];
    num_tokens += counts[i];
  }
  KV_CHECK(num_tokens <= std::numeric_limits<int32_t>::max())
      << "counts: expected a sum below 2^31, got " << num_tokens;
  Dims dims;
  dims.Bind("seqs", num_seqs);
  dims.Bind("seqs + 1", num_seqs + 1);
  dims.Bind("tokens", num_tokens);
  MatchTensor({"seqs"}).DType(DType::kI32).Contiguous().Check(rows, "rows", &dims);
  MatchTensor({"seqs + 1"}).DType(DType::kI32).Contiguous().Check(cu_tokens, "cu_tokens", &dims);
  MatchTensor({"tokens"}).DType(DType::kI64).Contiguous().Check(positions, "positions", &dims);

  int32_t* cu = cu_tokens.ptr<int32_t>();
  int64_t* position = positions.ptr<int64_t>();
  cu[0] = 0;
  for (int64_t i = 0; i < num_seqs; ++i) {
    rows.ptr<int32_t>()[i] = static_cast<int32_t>(store.Row(seqs[i]));
    cu[i + 1] = cu[i] + static_cast<int32_t>(counts[i]);
    const int64_t len = store.SeqLen(seqs[i]);
    for (int64_t p = len - counts[i]; p < len; ++p) *position++ = p;
  }
}

}  // namespace kvcore
