#include "ops/lane.h"

#include "base/check.h"

namespace kvcore {

std::string Lane::Name() const {
  return "row " + std::to_string(row()) + ", layer " + std::to_string(layer()) + ", kv head " +
         std::to_string(head());
}

void Lane::Check(int64_t min_len) const {
  KV_CHECK(len >= min_len) << "lane_len: expected at least " << min_len << " slots in " << Name()
                           << ", got " << len;
  KV_CHECK(len >= 0 && BlocksFor(len) <= view.max_blocks())
      << "lane_len: expected at most " << view.max_blocks() * kBlockSlots << " slots in " << Name()
      << ", for which its table has room, got " << len;
  const auto num_blocks = static_cast<uint64_t>(view.num_blocks());
  for (int64_t b = 0; b < BlocksFor(len); ++b)
    KV_CHECK(static_cast<uint64_t>(static_cast<int64_t>(table[b])) < num_blocks)
        << "block_table: entry " << b << " of " << Name() << ": expected a block in [0, "
        << num_blocks << "), got " << table[b];
}

void Lane::CheckState() const {
  KV_CHECK(State() != nullptr) << "state_of: expected a state of [0, " << view.num_states()
                               << ") in " << Name() << " with " << len << " slots, of which "
                               << Replaced() << " is elected, got "
                               << view.state_of.ptr<int32_t>()[id];
}

}  // namespace kvcore
