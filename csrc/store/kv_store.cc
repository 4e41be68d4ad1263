#include "store/kv_store.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/check.h"

namespace kvcore {
namespace {

constexpr int64_t kMaxLen = std::numeric_limits<int32_t>::max();

const KvCacheView& Checked(const KvCacheView& view) {
  view.Check();
  return view;
}

// Blocks that `count` more slots in every lane take. REQUIRES: lens[lane] + count < 2^31, which
// keeps the sums in 32 bits and the loop in vector registers.
int64_t NewBlocks(const int32_t* lens, int64_t num_lanes, int32_t count) {
  constexpr int32_t kRound = kBlockSlots - 1;
  int64_t blocks = 0;
  for (int64_t lane = 0; lane < num_lanes; ++lane) {
    const uint32_t end = static_cast<uint32_t>(lens[lane]) + static_cast<uint32_t>(count) + kRound;
    const uint32_t begin = static_cast<uint32_t>(lens[lane]) + kRound;
    blocks += end / kBlockSlots - begin / kBlockSlots;
  }
  return blocks;
}

}  // namespace

KvStore::KvStore(const KvCacheView& view)
    : view_(Checked(view)),
      ops_(&GetOps(view.key_blocks.device)),
      pool_(view.num_blocks()),
      open_may_be_shared_(view.num_rows(), 0),
      last_replaced_(view.num_rows(), 0),
      num_lanes_(view.num_layers() * view.num_kv_heads()) {
  free_rows_.resize(view_.num_rows());
  for (int64_t i = 0; i < view_.num_rows(); ++i) free_rows_[i] = view_.num_rows() - 1 - i;
  row_of_.reserve(view_.num_rows());
  std::fill_n(view_.lane_len.ptr<int32_t>(), view_.lane_len.numel(), 0);
  std::fill_n(view_.seq_len.ptr<int32_t>(), view_.seq_len.numel(), 0);
  for (int64_t row = 0; row < view_.num_rows(); ++row) ForgetReplace(row);
  if (!view_.not_finite.empty())
    std::fill_n(view_.not_finite.ptr<int32_t>(), view_.not_finite.numel(), 0);
}

SeqId KvStore::Create() {
  if (free_rows_.empty()) {
    throw OutOfBlocks("Create: all " + std::to_string(view_.num_rows()) + " rows are taken");
  }
  row_of_.emplace(next_seq_, free_rows_.back());
  free_rows_.pop_back();
  return next_seq_++;
}

void KvStore::Release(SeqId seq) {
  FreeRow(Row(seq));
  row_of_.erase(seq);
}

bool KvStore::IsLive(SeqId seq) const { return row_of_.contains(seq); }

// ---- growing

struct KvStore::ExtendPlan {
  std::vector<int32_t> rows;
  std::vector<int64_t> new_blocks;  // per sequence, copies not included
  std::vector<int32_t*> shared;     // entries of open blocks with other owners
  int64_t needed = 0;
};

KvStore::ExtendPlan KvStore::PlanExtend(const std::vector<SeqId>& seqs,
                                        const std::vector<int64_t>& counts) const {
  KV_CHECK(counts.size() == seqs.size())
      << "counts: expected one for each of " << seqs.size() << " seqs, got " << counts.size();
  ExtendPlan plan;
  plan.rows = Rows(seqs);
  plan.new_blocks.resize(seqs.size());
  const int64_t lane_capacity = std::min(view_.max_blocks() * kBlockSlots, kMaxLen);
  for (size_t i = 0; i < seqs.size(); ++i) {
    const int64_t row = plan.rows[i], count = counts[i];
    KV_CHECK(count >= 0) << "counts[" << i << "]: expected >= 0, got " << count;
    if (count == 0) continue;
    KV_CHECK(count <= kMaxLen - RowSeqLen(row))
        << "counts[" << i << "]: sequence " << seqs[i] << " has " << RowSeqLen(row)
        << " tokens, expected at most " << kMaxLen << " in all, got " << count << " more";
    if (num_lanes_ == 0) continue;
    const int32_t* lens = &LaneLen(row, 0);
    const bool replaces = count == 1 && Replaces(row);
    int64_t longest = 0;  // of the lanes that grow
    for (int64_t lane = 0; lane < num_lanes_; ++lane) {
      if (!replaces || view_.Replaced(row * num_lanes_ + lane) < 0)
        longest = std::max<int64_t>(longest, lens[lane]);
    }
    KV_CHECK(count <= lane_capacity - longest)
        << "counts[" << i << "]: a lane of sequence " << seqs[i] << " holds " << longest
        << " slots, expected at most " << lane_capacity << " in all, got " << count << " more";
    if (!replaces) plan.new_blocks[i] = NewBlocks(lens, num_lanes_, static_cast<int32_t>(count));
    if (replaces || open_may_be_shared_[row]) {
      for (int64_t lane = 0; lane < num_lanes_; ++lane) {
        const int32_t slot = replaces ? view_.Replaced(row * num_lanes_ + lane) : -1;
        const int64_t first = slot >= 0 ? slot : lens[lane];  // slot that is written into
        if (slot < 0 && lens[lane] % kBlockSlots == 0) {
          plan.new_blocks[i] += replaces;
          continue;
        }
        int32_t* entry = Table(row, lane) + first / kBlockSlots;
        if (pool_.ref_count(*entry) > 1) plan.shared.push_back(entry);
      }
    }
    plan.needed += plan.new_blocks[i];
  }
  plan.needed += BlocksToUnshare(plan.shared);
  return plan;
}

int64_t KvStore::BlocksToExtend(const std::vector<SeqId>& seqs,
                                const std::vector<int64_t>& counts) const {
  return PlanExtend(seqs, counts).needed;
}

void KvStore::Extend(const std::vector<SeqId>& seqs, const std::vector<int64_t>& counts,
                     Stream stream) {
  const ExtendPlan plan = PlanExtend(seqs, counts);
  NeedBlocks("Extend", plan.needed);
  Unshare(plan.shared, stream);
  for (size_t i = 0; i < seqs.size(); ++i) {
    if (counts[i] == 0) continue;
    const int64_t row = plan.rows[i];
    const auto count = static_cast<int32_t>(counts[i]);
    RowSeqLen(row) += count;
    open_may_be_shared_[row] = 0;
    if (num_lanes_ == 0) continue;
    int32_t* lens = &LaneLen(row, 0);
    last_replaced_[row] = 0;
    if (count == 1 && Replaces(row)) {
      for (int64_t lane = 0; lane < num_lanes_; ++lane) {
        if (view_.Replaced(row * num_lanes_ + lane) >= 0) {
          ++last_replaced_[row];
          continue;
        }
        if (lens[lane] % kBlockSlots == 0)
          Table(row, lane)[lens[lane] / kBlockSlots] = pool_.Allocate();
        ++lens[lane];
      }
      continue;
    }
    ForgetReplace(row);
    if (plan.new_blocks[i] > 0) {
      for (int64_t lane = 0; lane < num_lanes_; ++lane) {
        int32_t* table = Table(row, lane);
        const int64_t end = BlocksFor(int64_t{lens[lane]} + count);
        for (int64_t b = BlocksFor(lens[lane]); b < end; ++b) table[b] = pool_.Allocate();
      }
    }
    for (int64_t lane = 0; lane < num_lanes_; ++lane) lens[lane] += count;
  }
}

// ---- shrinking

void KvStore::Truncate(SeqId seq, int64_t count) {
  const int64_t row = Row(seq);
  KV_CHECK(count >= 0) << "count: expected >= 0, got " << count;
  KV_CHECK(count == 0 || !last_replaced_[row])
      << "count: the newest token of sequence " << seq << " has replaced another, got " << count;
  KV_CHECK(count <= RowSeqLen(row))
      << "count: sequence " << seq << " has " << RowSeqLen(row) << " tokens, got " << count;
  for (int64_t lane = 0; lane < num_lanes_; ++lane) {
    KV_CHECK(count <= LaneLen(row, lane))
        << "count: lane " << lane << " of sequence " << seq << " holds " << LaneLen(row, lane)
        << " slots, got " << count;
  }
  for (int64_t lane = 0; lane < num_lanes_; ++lane) {
    ShrinkLane(row, lane, LaneLen(row, lane) - count);
  }
  RowSeqLen(row) -= static_cast<int32_t>(count);
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
      const int64_t num = counts[list_id], len = LaneLen(rows[i], lane);
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
        int32_t* entry = Table(rows[i], lane) + block;
        if (pool_.ref_count(*entry) > 1) shared.push_back(entry);
      }
      total += num;
    }
  }
  if (total == 0) return 0;
  NeedBlocks("Evict", BlocksToUnshare(shared));

  Unshare(shared, stream);
  ops_->evict_slots(view_, {IdsView(rows), drop, drop_count}, stream);
  for (size_t i = 0; i < seqs.size(); ++i) {
    for (int64_t lane = 0; lane < num_lanes_; ++lane) {
      const int32_t num = counts[static_cast<int64_t>(i) * num_lanes_ + lane];
      if (num > 0) ShrinkLane(rows[i], lane, LaneLen(rows[i], lane) - num);
    }
    ForgetReplace(rows[i]);  // slots have moved
  }
  return total;
}

void KvStore::ShrinkLane(int64_t row, int64_t lane, int64_t len) {
  int32_t* table = Table(row, lane);
  int32_t& lane_len = LaneLen(row, lane);
  for (int64_t b = BlocksFor(len); b < BlocksFor(lane_len); ++b) pool_.Release(table[b]);
  lane_len = static_cast<int32_t>(len);
  if (len % kBlockSlots != 0 && pool_.ref_count(table[len / kBlockSlots]) > 1) {
    open_may_be_shared_[row] = 1;
  }
}

void KvStore::FreeRow(int64_t row) {
  for (int64_t lane = 0; lane < num_lanes_; ++lane) ShrinkLane(row, lane, 0);
  RowSeqLen(row) = 0;
  open_may_be_shared_[row] = 0;
  last_replaced_[row] = 0;
  ForgetReplace(row);
  ForgetNotFinite(row, 0);
  free_rows_.push_back(row);
}

// ---- looking

int64_t KvStore::Row(SeqId seq) const {
  const auto found = row_of_.find(seq);
  KV_CHECK(found != row_of_.end()) << "seq: expected a live sequence, got " << seq;
  return found->second;
}

std::vector<SeqId> KvStore::Sequences() const {
  std::vector<SeqId> seqs;
  for (const auto& [seq, row] : row_of_) seqs.push_back(seq);
  return seqs;
}

std::vector<int32_t> KvStore::Rows(const std::vector<SeqId>& seqs) const {
  std::vector<int32_t> rows(seqs.size());
  std::vector<uint8_t> seen(view_.num_rows(), 0);
  for (size_t i = 0; i < seqs.size(); ++i) {
    rows[i] = static_cast<int32_t>(Row(seqs[i]));
    KV_CHECK(!seen[rows[i]]) << "seqs: expected each sequence once, got " << seqs[i]
                             << " again at index " << i;
    seen[rows[i]] = 1;
  }
  return rows;
}

int64_t KvStore::SeqLen(SeqId seq) const { return RowSeqLen(Row(seq)); }

int64_t KvStore::MaxLaneLen(SeqId seq) const {
  const int64_t row = Row(seq);
  int64_t longest = 0;
  for (int64_t lane = 0; lane < num_lanes_; ++lane) {
    longest = std::max<int64_t>(longest, LaneLen(row, lane));
  }
  return longest;
}

int64_t KvStore::TotalSlots(SeqId seq) const {
  const int64_t row = Row(seq);
  int64_t slots = 0;
  for (int64_t lane = 0; lane < num_lanes_; ++lane) slots += LaneLen(row, lane);
  return slots;
}

int64_t KvStore::NumBlocks(SeqId seq) const {
  const int64_t row = Row(seq);
  int64_t blocks = 0;
  for (int64_t lane = 0; lane < num_lanes_; ++lane) blocks += BlocksFor(LaneLen(row, lane));
  return blocks;
}

int32_t* KvStore::Table(int64_t row, int64_t lane) const {
  return view_.block_table.ptr<int32_t>() + (row * num_lanes_ + lane) * view_.max_blocks();
}

int32_t& KvStore::LaneLen(int64_t row, int64_t lane) const {
  return view_.lane_len.ptr<int32_t>()[row * num_lanes_ + lane];
}

int32_t& KvStore::RowSeqLen(int64_t row) const { return view_.seq_len.ptr<int32_t>()[row]; }

}  // namespace kvcore
