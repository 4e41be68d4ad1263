// Elected slots, and the states of the lanes that have one.
#include <algorithm>
#include <cstring>
#include <functional>
#include <string>

#include "base/check.h"
#include "store/kv_store.h"

namespace kvcore {

bool KvStore::Replaces(int64_t row) const {
  const TensorView& replace = view_.row_state(kReplace);
  if (replace.empty()) return false;
  const int32_t* slots = replace.ptr<int32_t>() + row * num_lanes_;
  return std::any_of(slots, slots + num_lanes_, [](int32_t slot) { return slot >= 0; });
}

void KvStore::ForgetReplace(SeqId seq) { ForgetRow(Row(seq)); }

void KvStore::ForgetRow(int64_t row) {
  if (view_.row_state(kReplace).empty()) return;
  for (int64_t lane = 0; lane < num_lanes_; ++lane) LaneAt(row, lane).SetReplaced(kNoReplace);
  if (view_.state_of.empty()) return;
  for (int64_t lane = 0; lane < num_lanes_; ++lane) {
    int32_t& state = StateOf(row, lane);
    if (state < 0) continue;
    free_states_.push_back(state);  // no allocation: there is room for all
    std::push_heap(free_states_.begin(), free_states_.end(), std::greater<>());
    state = -1;
  }
}

void KvStore::Elect(const std::vector<SeqId>& seqs, const TensorView& slots) {
  KV_CHECK(!view_.row_state(kReplace).empty()) << "replace: the cache overwrites no slots";
  KV_CHECK(view_.state_of.empty()) << "replace: with lane states attention elects";
  const std::vector<int32_t> rows = Rows(seqs);
  Dims dims;
  dims.Bind("seqs", static_cast<int64_t>(seqs.size()));
  dims.Bind("layers", view_.num_layers());
  dims.Bind("kv_heads", view_.num_kv_heads());
  MatchTensor({"seqs", "layers", "kv_heads"})
      .DType(DType::kI32)
      .Contiguous()
      .Check(slots, "slots", &dims);
  const auto elected = [&](size_t i, int64_t lane) {
    return slots.ptr<int32_t>()[static_cast<int64_t>(i) * num_lanes_ + lane];
  };
  for (size_t i = 0; i < rows.size(); ++i) {
    for (int64_t l = 0; l < num_lanes_; ++l) {
      const Lane lane = LaneAt(rows[i], l);
      KV_CHECK(elected(i, l) >= kNoReplace && elected(i, l) < lane.len)
          << "slots: expected a slot below lane_len " << lane.len << ", or " << kNoReplace
          << " to append, in " << lane.Name() << ", got " << elected(i, l);
    }
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    for (int64_t l = 0; l < num_lanes_; ++l) LaneAt(rows[i], l).SetReplaced(elected(i, l));
  }
}

void KvStore::DecideToAppend(int64_t row) {
  if (!decided_.empty()) std::fill_n(decided_.begin() + row * num_lanes_, num_lanes_, kNoReplace);
}

void KvStore::CheckAppend(const RaggedBatch& batch, int64_t layer) const {
  const TensorView &rows = batch.rows, &cu_tokens = batch.cu_tokens;
  for (const TensorView* ids : {&rows, &cu_tokens}) {
    if (ids->dtype != DType::kI32 || ids->ndim != 1 || !ids->contiguous()) return;
  }
  const int64_t heads = view_.num_kv_heads();
  if (decided_.empty() || layer < 0 || layer >= view_.num_layers() ||
      cu_tokens.shape[0] != rows.shape[0] + 1) {
    return;
  }
  const int32_t* cu = cu_tokens.ptr<int32_t>();
  for (int64_t s = 0; s < rows.shape[0]; ++s) {
    const int64_t row = rows.ptr<int32_t>()[s];
    if (int64_t{cu[s + 1]} - cu[s] != 1 || row < 0 || row >= view_.num_rows()) continue;
    for (int64_t head = 0; head < heads; ++head) {
      const Lane lane(view_, row, layer, head);
      KV_CHECK(std::max(lane.Replaced(), kNoReplace) == std::max(decided_[lane.id], kNoReplace))
          << "replace: expected " << decided_[lane.id] << " in " << lane.Name()
          << ", as extend found it (negative: append), got " << lane.Replaced();
    }
  }
}

// ---- states

void KvStore::TakeStates(const std::vector<SeqId>& seqs, const TensorView& full) {
  KV_CHECK(!view_.state_of.empty()) << "take_states: the cache keeps no pool of lane states";
  const std::vector<int32_t> rows = Rows(seqs);
  Dims dims;
  dims.Bind("layers", view_.num_layers());
  dims.Bind("kv_heads", view_.num_kv_heads());
  MatchTensor({"layers", "kv_heads"}).DType(DType::kI32).Contiguous().Check(full, "full", &dims);
  const int32_t* limits = full.ptr<int32_t>();
  const auto lacks = [&](int64_t row, int64_t lane) {
    return LaneAt(row, lane).len >= limits[lane] && StateOf(row, lane) < 0;
  };
  int64_t needed = 0;
  for (const int64_t row : rows) {
    for (int64_t lane = 0; lane < num_lanes_; ++lane) needed += lacks(row, lane);
  }
  if (needed > FreeStates()) {
    throw OutOfBlocks("TakeStates: needs " + std::to_string(needed) + " lane states, " +
                      std::to_string(FreeStates()) + " of " + std::to_string(view_.num_states()) +
                      " are free");
  }
  for (const int64_t row : rows) {
    for (int64_t lane = 0; lane < num_lanes_; ++lane) {
      if (lacks(row, lane)) StateOf(row, lane) = TakeState();
    }
  }
}

int32_t KvStore::TakeState() {
  std::pop_heap(free_states_.begin(), free_states_.end(), std::greater<>());
  const int32_t state = free_states_.back();
  free_states_.pop_back();
  return state;
}

int64_t KvStore::NumStates(SeqId seq) const {
  const int64_t row = Row(seq);
  if (view_.state_of.empty()) return 0;
  int64_t states = 0;
  for (int64_t lane = 0; lane < num_lanes_; ++lane) states += StateOf(row, lane) >= 0;
  return states;
}

int64_t KvStore::NumElectedStates(int64_t row) const {
  int64_t states = 0;
  for (int64_t lane = 0; lane < num_lanes_; ++lane) {
    states += StateOf(row, lane) >= 0 && LaneAt(row, lane).Replaced() >= 0;
  }
  return states;
}

void KvStore::CopyStates(int64_t from_row, int64_t to_row) {
  for (int64_t lane = 0; lane < num_lanes_; ++lane) {
    if (StateOf(from_row, lane) < 0 || LaneAt(from_row, lane).Replaced() < 0) continue;
    StateOf(to_row, lane) = TakeState();
    std::memcpy(LaneAt(to_row, lane).State(), LaneAt(from_row, lane).State(),
                view_.StateLayout().bytes);
  }
}

int32_t& KvStore::StateOf(int64_t row, int64_t lane) const {
  return view_.state_of.ptr<int32_t>()[row * num_lanes_ + lane];
}

}  // namespace kvcore
