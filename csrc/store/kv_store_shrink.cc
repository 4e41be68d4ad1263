// Undoing, evicting and releasing.
#include <algorithm>
#include <string>

#include "base/check.h"
#include "store/kv_store.h"

namespace kvcore {

void KvStore::Truncate(SeqId seq, int64_t count) {
  const int64_t row = Row(seq);
  KV_CHECK(count >= 0) << "count: expected >= 0, got " << count;
  KV_CHECK(count <= RowSeqLen(row))
      << "count: sequence " << seq << " has " << RowSeqLen(row) << " tokens, got " << count;
  for (int64_t lane = 0; lane < num_lanes_; ++lane) {
    const int32_t len = LaneAt(row, lane).len;
    KV_CHECK(count <= len) << "count: lane " << lane << " of sequence " << seq << " holds " << len
                           << " slots, got " << count;
  }
  KV_CHECK(count <= undoable_[row])
      << "count: sequence " << seq << " has " << undoable_[row]
      << " tokens that were appended since a slot of it was overwritten or dropped, got " << count;
  if (count == 0) return;
  for (int64_t lane = 0; lane < num_lanes_; ++lane) {
    ShrinkLane(row, lane, LaneAt(row, lane).len - count);
  }
  RowSeqLen(row) -= static_cast<int32_t>(count);
  undoable_[row] -= static_cast<int32_t>(count);
  ForgetRow(row);
  ForgetNotFinite(row, RowSeqLen(row));
}

int64_t KvStore::Evict(const std::vector<SeqId>& seqs, const TensorView& drop,
                       const TensorView& drop_count, Stream stream) {
  std::vector<int32_t> rows = Rows(seqs);
  Dims dims;
  dims.Bind("seqs", static_cast<int64_t>(seqs.size()));
  dims.Bind("layers", view_.num_layers());
  dims.Bind("kv_heads", view_.num_kv_heads());
  MatchTensor({"seqs", "layers", "kv_heads", "max_drop"})
      .DType(DType::kI32)
      .Contiguous()
      .Check(drop, "drop", &dims);
  MatchTensor({"seqs", "layers", "kv_heads"})
      .DType(DType::kI32)
      .Contiguous()
      .Check(drop_count, "drop_count", &dims);
  const int64_t max_drop = dims["max_drop"];
  const int32_t* counts = drop_count.ptr<int32_t>();

  std::vector<int32_t*> shared;  // entries of blocks with other owners that a move writes into
  int64_t total = 0;
  for (size_t i = 0; i < seqs.size(); ++i) {
    for (int64_t lane = 0; lane < num_lanes_; ++lane) {
      const int64_t list_id = static_cast<int64_t>(i) * num_lanes_ + lane;
      const int64_t num = counts[list_id], len = LaneAt(rows[i], lane).len;
      KV_CHECK(num >= 0 && num <= std::min(len, max_drop))
          << "drop_count: lane " << lane << " of sequence " << seqs[i] << ": expected 0 to "
          << std::min(len, max_drop) << " (length " << len << ", max_drop " << max_drop << "), got "
          << num;
      if (num == 0) continue;
      const int32_t* slots = drop.ptr<int32_t>() + list_id * max_drop;
      const int64_t kept = len - num;
      int64_t previous = -1, previous_block = -1;
      for (int64_t k = 0; k < num; ++k) {
        const int64_t slot = slots[k];
        KV_CHECK(slot > previous && slot < len)
            << "drop: lane " << lane << " of sequence " << seqs[i]
            << ": expected ascending slots below " << len << ", got " << slot << " at index " << k
            << (k > 0 ? " after " + std::to_string(previous) : "");
        previous = slot;
        const int64_t block = slot / kBlockSlots;
        if (slot >= kept || block == previous_block) continue;
        previous_block = block;
        int32_t* entry = LaneAt(rows[i], lane).table + block;
        if (pool_.ref_count(*entry) > 1) shared.push_back(entry);
      }
      total += num;
    }
  }
  if (total == 0) return 0;
  KeepShared(&shared);
  NeedBlocks("Evict", static_cast<int64_t>(shared.size()));
  ReservedBlocks fresh(&pool_, static_cast<int64_t>(shared.size()));
  CopyShared(shared, fresh, stream);

  fresh.Swap(shared);  // the operation goes by the tables
  try {
    ops_->evict_slots(
        view_,
        {MakeView(rows.data(), DType::kI32, {static_cast<int64_t>(rows.size())}), drop, drop_count},
        stream);
  } catch (...) {
    fresh.Swap(shared);
    throw;
  }
  for (size_t i = 0; i < seqs.size(); ++i) {
    const int32_t* mine = counts + static_cast<int64_t>(i) * num_lanes_;
    if (std::all_of(mine, mine + num_lanes_, [](int32_t num) { return num == 0; })) continue;
    for (int64_t lane = 0; lane < num_lanes_; ++lane) {
      if (mine[lane] > 0) ShrinkLane(rows[i], lane, LaneAt(rows[i], lane).len - mine[lane]);
    }
    undoable_[rows[i]] = 0;
    ForgetRow(rows[i]);
  }
  return total;
}

void KvStore::ShrinkLane(int64_t row, int64_t lane_id, int64_t len) {
  const Lane lane = LaneAt(row, lane_id);
  for (int64_t b = BlocksFor(len); b < BlocksFor(lane.len); ++b) pool_.Release(lane.table[b]);
  lane.len = static_cast<int32_t>(len);
  if (len % kBlockSlots != 0 && pool_.ref_count(lane.table[len / kBlockSlots]) > 1) {
    open_may_be_shared_[row] = 1;
  }
}

void KvStore::FreeRow(int64_t row) {
  for (int64_t lane = 0; lane < num_lanes_; ++lane) ShrinkLane(row, lane, 0);
  RowSeqLen(row) = 0;
  open_may_be_shared_[row] = 0;
  undoable_[row] = 0;
  last_replaced_[row] = 0;
  DecideToAppend(row);
  BeginRow(row);
  free_rows_.push_back(row);
}

}  // namespace kvcore
