#include "store/kv_store.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

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

KvStore::KvStore(const KvCacheView& view, const OpTable* ops)
    : view_(Checked(view)),
      ops_(ops != nullptr ? ops : &GetOps(view.key_blocks.device)),
      pool_(view.num_blocks()),
      open_may_be_shared_(view.num_rows(), 0),
      undoable_(view.num_rows(), 0),
      last_replaced_(view.num_rows(), 0),
      num_lanes_(view.num_layers() * view.num_kv_heads()) {
  if (!view_.row_state(kReplace).empty())
    decided_.assign(view_.num_rows() * num_lanes_, kNoReplace);
  free_rows_.resize(view_.num_rows());
  for (int64_t i = 0; i < view_.num_rows(); ++i) free_rows_[i] = view_.num_rows() - 1 - i;
  row_of_.reserve(view_.num_rows());
  std::fill_n(view_.lane_len.ptr<int32_t>(), view_.lane_len.numel(), 0);
  std::fill_n(view_.seq_len.ptr<int32_t>(), view_.seq_len.numel(), 0);
  if (!view_.state_of.empty()) {
    std::fill_n(view_.state_of.ptr<int32_t>(), view_.state_of.numel(), -1);
    free_states_.resize(view_.num_states());
    std::iota(free_states_.begin(), free_states_.end(), 0);
  }
  for (int64_t row = 0; row < view_.num_rows(); ++row) BeginRow(row);
}

SeqId KvStore::Create() {
  if (free_rows_.empty()) {
    throw OutOfBlocks("Create: all " + std::to_string(view_.num_rows()) + " rows are taken");
  }
  row_of_.emplace(next_seq_, free_rows_.back());
  BeginRow(free_rows_.back());  // whatever somebody wrote while the row was free
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
  std::vector<int32_t*> shared;     // entries that get a copy of their block, as it is written
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
    const int32_t* lens = &LaneAt(row, 0).len;
    const bool replaces = count == 1 && Replaces(row);
    int64_t longest = 0;  // of the lanes that grow
    for (int64_t l = 0; l < num_lanes_; ++l) {
      const int32_t slot = replaces ? LaneAt(row, l).Replaced() : kNoReplace;
      if (slot < 0) longest = std::max<int64_t>(longest, lens[l]);
      KV_CHECK(slot < lens[l] || slot < 0) << "replace: expected a slot below lane_len " << lens[l]
                                           << " in " << LaneAt(row, l).Name() << ", got " << slot;
    }
    KV_CHECK(count <= lane_capacity - longest)
        << "counts[" << i << "]: a lane of sequence " << seqs[i] << " holds " << longest
        << " slots, expected at most " << lane_capacity << " in all, got " << count << " more";
    if (!replaces) plan.new_blocks[i] = NewBlocks(lens, num_lanes_, static_cast<int32_t>(count));
    if (replaces || open_may_be_shared_[row]) {
      for (int64_t l = 0; l < num_lanes_; ++l) {
        const Lane lane = LaneAt(row, l);
        const int32_t slot = replaces ? lane.Replaced() : kNoReplace;
        const int64_t first = slot >= 0 ? slot : lane.len;  // slot that is written into
        if (slot < 0 && lane.len % kBlockSlots == 0) {
          plan.new_blocks[i] += replaces;
          continue;
        }
        int32_t* entry = lane.table + first / kBlockSlots;
        if (pool_.ref_count(*entry) > 1) plan.shared.push_back(entry);
      }
    }
    plan.needed += plan.new_blocks[i];
  }
  KeepShared(&plan.shared);
  plan.needed += static_cast<int64_t>(plan.shared.size());
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
  ReservedBlocks fresh(&pool_, static_cast<int64_t>(plan.shared.size()));
  CopyShared(plan.shared, fresh, stream);

  fresh.Swap(plan.shared);
  for (size_t i = 0; i < seqs.size(); ++i) {
    if (counts[i] == 0) continue;
    const int64_t row = plan.rows[i];
    const auto count = static_cast<int32_t>(counts[i]);
    RowSeqLen(row) += count;
    undoable_[row] += count;
    if (num_lanes_ == 0) continue;
    last_replaced_[row] = 0;
    if (count == 1 && Replaces(row)) {
      undoable_[row] = 0;
      for (int64_t l = 0; l < num_lanes_; ++l) {
        const Lane lane = LaneAt(row, l);
        decided_[lane.id] = lane.Replaced();
        if (lane.Replaced() >= 0) {
          ++last_replaced_[row];
          continue;
        }
        if (lane.len % kBlockSlots == 0) lane.table[lane.len / kBlockSlots] = pool_.Allocate();
        ++lane.len;
      }
      continue;
    }
    ForgetRow(row);
    DecideToAppend(row);
    open_may_be_shared_[row] = 0;
    if (plan.new_blocks[i] > 0) {
      for (int64_t l = 0; l < num_lanes_; ++l) {
        const Lane lane = LaneAt(row, l);
        const int64_t end = BlocksFor(int64_t{lane.len} + count);
        for (int64_t b = BlocksFor(lane.len); b < end; ++b) lane.table[b] = pool_.Allocate();
      }
    }
    int32_t* lens = &LaneAt(row, 0).len;
    for (int64_t l = 0; l < num_lanes_; ++l) lens[l] += count;
  }
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
    longest = std::max<int64_t>(longest, LaneAt(row, lane).len);
  }
  return longest;
}

int64_t KvStore::TotalSlots(SeqId seq) const {
  const int64_t row = Row(seq);
  int64_t slots = 0;
  for (int64_t lane = 0; lane < num_lanes_; ++lane) slots += LaneAt(row, lane).len;
  return slots;
}

int64_t KvStore::NumBlocks(SeqId seq) const {
  const int64_t row = Row(seq);
  int64_t blocks = 0;
  for (int64_t lane = 0; lane < num_lanes_; ++lane) blocks += BlocksFor(LaneAt(row, lane).len);
  return blocks;
}

int32_t& KvStore::RowSeqLen(int64_t row) const { return view_.seq_len.ptr<int32_t>()[row]; }

}  // namespace kvcore
