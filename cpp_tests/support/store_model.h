// A store with owned tensors, and what it must hold kept in the stupidest way: per sequence and
// lane a plain list of tokens. Every change goes to the store first; when that throws, the model
// stays as it was.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "store/batch_plan.h"
#include "store/kv_store.h"
#include "support/cache_tensors.h"
#include "support/injected_throw.h"

namespace kvcore {

// Slots to drop, [sequence][lane][k] with lane = layer * kv_heads + head.
using DropLists = std::vector<std::vector<std::vector<int32_t>>>;

class ModelledStore {
 public:
  struct Token {
    int32_t position;
    uint32_t stamp;     // stands for the token's keys, values and queries in every lane
    uint32_t note = 0;  // what was last written into the slot's planes; 0 = nothing
    bool operator==(const Token&) const = default;
  };
  struct Sequence {
    int64_t seq_len = 0;
    // Tokens since a slot was dropped or overwritten: what Truncate may take.
    int64_t undoable = 0;
    std::vector<std::vector<Token>> lanes;
    std::vector<int32_t> replace;  // per lane, if the shape replaces; < 0 = the next is appended
    std::vector<uint32_t> states;  // per lane, if the shape has states: what is in it; 0 = none
    std::vector<uint32_t> ring;    // stamp of the query in each place; 0 = never written
  };

  explicit ModelledStore(const CacheShape& shape);  // float32

  SeqId Create();
  void Release(SeqId seq);
  // Extend, then append_kv of new tokens in every layer.
  void Append(const std::vector<SeqId>& seqs, const std::vector<int64_t>& counts);
  void Truncate(SeqId seq, int64_t count);
  std::vector<SeqId> Fork(SeqId parent, int64_t count, bool copy);
  void Adopt(SeqId parent, SeqId child);
  int64_t Evict(const std::vector<SeqId>& seqs, const DropLists& lists);
  // What operations write: the slot that a lane's next token overwrites, and numbers into the
  // planes of every live slot of a sequence.
  void Elect(SeqId seq, int64_t lane, int32_t slot);
  void WritePlanes(SeqId seq);
  void ForgetReplace(SeqId seq);
  // A state, with a number in it, for every lane of at least `full` slots.
  void TakeStates(const std::vector<SeqId>& seqs, int64_t full);

  // "" when the store's tensors hold exactly what the model says, else the first difference.
  std::string Difference(SeqId seq) const;
  std::string Difference() const;  // all sequences and the number of them

  const CacheShape& shape() const { return shape_; }
  int64_t num_lanes() const { return shape_.layers * shape_.kv_heads; }
  const std::map<SeqId, Sequence>& sequences() const { return sequences_; }

  CacheTensors tensors;
  KvStore store;
  Failures failures;  // of the store in each of the changes above

 private:
  Lane LaneOf(SeqId seq, int64_t lane) const {
    return {store.view(), store.Row(seq) * num_lanes() + lane};
  }
  uint32_t* StateOf(SeqId seq, int64_t lane) const;  // null if it has none
  bool SameSlot(SeqId seq, int64_t lane, int64_t slot, const Token& token) const;
  std::string RingDifference(SeqId seq) const;

  const OpTable& ops_;
  CacheShape shape_;
  std::map<SeqId, Sequence> sequences_;
  uint32_t next_stamp_ = 1;
  std::vector<float> key_, value_, query_;  // inputs of append_kv
};

}  // namespace kvcore
