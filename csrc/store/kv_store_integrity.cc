#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "store/kv_store.h"

namespace kvcore {

void KvStore::CheckIntegrity() const {
  std::vector<int32_t> references(pool_.num_blocks(), 0);
  std::vector<uint8_t> used(view_.num_rows(), 0);
  std::vector<int32_t> states = free_states_;
  for (const auto& [seq, row] : row_of_) {
    KV_ICHECK(row >= 0 && row < view_.num_rows() && !used[row])
        << "sequence " << seq << " has row " << row << ", out of range or taken";
    used[row] = 1;
    for (int64_t lane = 0; lane < num_lanes_; ++lane) {
      if (!view_.state_of.empty() && StateOf(row, lane) >= 0) states.push_back(StateOf(row, lane));
      const int64_t len = LaneAt(row, lane).len;
      KV_ICHECK(len >= 0 && len <= RowSeqLen(row) && BlocksFor(len) <= view_.max_blocks())
          << "lane " << lane << " of sequence " << seq << " has length " << len << " of "
          << RowSeqLen(row) << " tokens and room for " << view_.max_blocks() << " blocks";
      KV_ICHECK(undoable_[row] >= 0 && undoable_[row] <= len)
          << "lane " << lane << " of sequence " << seq << " has length " << len << ", and "
          << undoable_[row] << " tokens can be undone";
      const int32_t* table = LaneAt(row, lane).table;
      for (int64_t b = 0; b < BlocksFor(len); ++b) {
        KV_ICHECK(table[b] >= 0 && table[b] < pool_.num_blocks())
            << "lane " << lane << " of sequence " << seq << ": entry " << b << " is " << table[b];
        ++references[table[b]];
      }
      KV_ICHECK(len % kBlockSlots == 0 || open_may_be_shared_[row] ||
                pool_.ref_count(table[len / kBlockSlots]) == 1)
          << "lane " << lane << " of sequence " << seq << " has a shared open block";
    }
  }
  for (const int64_t row : free_rows_) {
    KV_ICHECK(row >= 0 && row < view_.num_rows() && !used[row])
        << "free row " << row << " is out of range or taken";
    used[row] = 1;
    KV_ICHECK(RowSeqLen(row) == 0 && undoable_[row] == 0 && !open_may_be_shared_[row])
        << "free row " << row << " has tokens";
    for (const SideTensor& state : view_.row_states) {
      if (state.empty() || state.start.empty()) continue;
      const int64_t bytes = DTypeBytes(state.tensor.dtype), count = state.tensor.stride[0];
      const char* at = state.tensor.ptr<char>() + row * count * bytes;
      for (int64_t i = 0; i < count; ++i) {
        KV_ICHECK(std::memcmp(at + i * bytes, state.start.data, bytes) == 0)
            << "free row " << row << " has something in " << state.name;
      }
    }
    for (int64_t lane = 0; lane < num_lanes_; ++lane) {
      KV_ICHECK(view_.state_of.empty() || StateOf(row, lane) < 0)
          << "free row " << row << " has a state in lane " << lane;
      KV_ICHECK(LaneAt(row, lane).len == 0) << "free row " << row << " has slots in lane " << lane;
    }
  }
  KV_ICHECK(NumSequences() + FreeRows() == view_.num_rows())
      << NumSequences() << " sequences and " << FreeRows() << " free rows of " << view_.num_rows();
  std::sort(states.begin(), states.end());
  KV_ICHECK(static_cast<int64_t>(states.size()) == view_.num_states())
      << states.size() << " lane states are free or some lane's, of " << view_.num_states();
  for (size_t i = 0; i < states.size(); ++i) {
    KV_ICHECK(states[i] == static_cast<int32_t>(i)) << "lane state " << i << " is lost";
  }
  pool_.CheckIntegrity(references);
}

}  // namespace kvcore
