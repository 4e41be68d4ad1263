// Sequences over the lanes of one engine: the only writer of block tables, lengths and reference
// counts. Data moves through the operations of the engine's back end.
//
// Handles (SeqId) are never reused, so a stale one is an Error and not somebody else's sequence.
// Every method either completes or throws leaving all as it was, whatever throws: an argument, an
// allocation, or an operation (which throws, if at all, before it writes). What may throw comes
// first and touches only blocks that nobody holds; tables, lengths and counts change after it.
// Not thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/stream.h"
#include "ops/lane.h"
#include "ops/op_table.h"
#include "store/block_pool.h"

namespace kvcore {

using SeqId = int64_t;

class KvStore {
 public:
  // The tensors of `view` stay owned by the caller and must outlive the store; the store zeroes the
  // lengths. `ops` moves the data, by default the operations of the view's device; it must outlive
  // the store. Throws Error if the view is inconsistent.
  explicit KvStore(const KvCacheView& view, const OpTable* ops = nullptr);

  // An empty sequence. Throws OutOfBlocks when all rows are taken.
  SeqId Create();
  // Frees the row and drops its references.
  void Release(SeqId seq);
  bool IsLive(SeqId seq) const;

  // Makes room for counts[i] more tokens in every lane of seqs[i] and counts them in lane_len and
  // seq_len; append_kv then fills the slots. A lane with a `replace` slot does not grow by a single
  // token, which overwrites that slot; more tokens at once are appended, and the slot is forgotten.
  // A shared block that is written into is copied first. All sequences or none: throws OutOfBlocks
  // if the pool lacks blocks, Error if a lane would outgrow its table or if a slot that is to be
  // overwritten is not below lane_len.
  void Extend(const std::vector<SeqId>& seqs, const std::vector<int64_t>& counts,
              Stream stream = 0);
  // Blocks that Extend would take from the pool.
  int64_t BlocksToExtend(const std::vector<SeqId>& seqs, const std::vector<int64_t>& counts) const;
  // Forgets the newest `count` slots of every lane, undoing Extends whose forward did not happen,
  // and with them the `replace` slots of the row, if there are any. Throws Error for more than
  // Undoable.
  void Truncate(SeqId seq, int64_t count);
  // Tokens that the sequence was extended by since an Extend overwrote a slot of it or an Evict
  // dropped one: what Truncate may take. Forks inherit it.
  int64_t Undoable(SeqId seq) const { return undoable_[Row(seq)]; }
  // The next token of every lane is appended, whatever was elected; its states are given back.
  void ForgetReplace(SeqId seq);
  // Names the slots that the next single token of each lane overwrites: slots i32 [seqs, layers,
  // kv_heads], below lane_len, or kNoReplace to append. For caches without lane states; with them
  // attention elects. Throws Error naming row, layer and kv head.
  void Elect(const std::vector<SeqId>& seqs, const TensorView& slots);

  // Gives a state to every lane of seqs that holds at least full[layer, kv_head] slots, i32
  // [layers, kv_heads], and has none. A lane gives it back when its row is released or forgets
  // `replace`. States that were used least lately stay untouched: the lowest free id goes first.
  // REQUIRES: a view with state_of (Error). Throws OutOfBlocks if there are too few.
  void TakeStates(const std::vector<SeqId>& seqs, const TensorView& full);
  int64_t NumStates(SeqId seq) const;  // that its lanes have
  int64_t FreeStates() const { return static_cast<int64_t>(free_states_.size()); }

  // Makes `count` copies of `parent` that can be extended and evicted independently. copy = false
  // shares full blocks and copies the open one; copy = true copies all live blocks (for sequences
  // that evict: compaction rewrites slots in place). With planes blocks are always copied: later
  // tokens may write to any slot of them. Row states are copied in both, and lane states of lanes
  // with replace >= 0. Throws OutOfBlocks if blocks,
  // rows or states do not suffice. Source: KV-Rescue, appendix C.
  std::vector<SeqId> Fork(SeqId parent, int64_t count, bool copy, Stream stream = 0);
  int64_t BlocksToFork(SeqId parent, int64_t count, bool copy) const;
  // `parent` becomes what `child` is; the child's handle dies. Nothing is copied.
  void Adopt(SeqId parent, SeqId child);

  // Drops the named slots of every lane of seqs: drop i32 [seqs, layers, kv_heads, max_drop]
  // ascending, drop_count i32 [seqs, layers, kv_heads]. Holes are filled from the tail, trailing
  // empty blocks are freed. Shared blocks are copied before they are rewritten, so others never
  // notice. Sequences that dropped something forget their `replace`: slots have moved. Returns
  // slots dropped.
  int64_t Evict(const std::vector<SeqId>& seqs, const TensorView& drop,
                const TensorView& drop_count, Stream stream = 0);

  // Compares `replace` with what the last Extend of every row that brings one token has decided for
  // its lanes of `layer`: a slot that was elected or forgotten in between would be written without
  // having been reserved. Throws Error naming row, layer and kv head. What does not fit the view is
  // left to the checks of append_kv.
  void CheckAppend(const RaggedBatch& batch, int64_t layer) const;

  // Slots that the last Extend of the sequence overwrites; it cannot be undone if there are any.
  int64_t NumReplaced(SeqId seq) const { return last_replaced_[Row(seq)]; }
  int64_t Row(SeqId seq) const;         // index into the view's tensors
  int64_t SeqLen(SeqId seq) const;      // tokens ever appended
  int64_t MaxLaneLen(SeqId seq) const;  // longest lane, slots
  int64_t TotalSlots(SeqId seq) const;  // live slots summed over lanes
  int64_t NumBlocks(SeqId seq) const;   // table entries in use, shared ones included
  int64_t FreeBlocks() const { return pool_.num_free(); }
  int64_t FreeRows() const { return static_cast<int64_t>(free_rows_.size()); }
  int64_t NumSequences() const { return static_cast<int64_t>(row_of_.size()); }
  std::vector<SeqId> Sequences() const;  // live ones, in no particular order
  const KvCacheView& view() const { return view_; }

  // Every table entry in use is referenced as often as counted, lengths fit their blocks, rows are
  // used once, an open block with other owners is known to be one, what can be undone is in the
  // lanes, and free rows hold nothing. Throws InternalError. Cost: a walk over all tables.
  void CheckIntegrity() const;

 private:
  struct ExtendPlan;

  Lane LaneAt(int64_t row, int64_t lane) const {  // lane = layer * kv_heads + head
    return {view_, row * num_lanes_ + lane};
  }
  int32_t& RowSeqLen(int64_t row) const;

  std::vector<int32_t> Rows(const std::vector<SeqId>& seqs) const;  // Error if stale or repeated
  ExtendPlan PlanExtend(const std::vector<SeqId>& seqs, const std::vector<int64_t>& counts) const;
  void NeedBlocks(const char* method, int64_t needed) const;
  // Of table entries that are about to be written, keeps those that need a block of their own
  // first: all but the last when all owners of a block write, else all that are not the only owner.
  void KeepShared(std::vector<int32_t*>* entries) const;
  // Copies the blocks that `entries` name to `fresh`, one each, in order. Changes no table.
  void CopyShared(const std::vector<int32_t*>& entries, const ReservedBlocks& fresh,
                  Stream stream) const;
  void CopyBlocks(const std::vector<int32_t>& src, const std::vector<int32_t>& dst,
                  Stream stream) const;
  void CopyRow(const TensorView& tensor, int64_t from_row, int64_t to_row) const;
  bool CopiesForks(bool copy) const { return copy || view_.planes.begin() != view_.planes.end(); }
  bool Replaces(int64_t row) const;  // a lane has a slot for its next single token to overwrite
  void BeginRow(int64_t row);        // `replace` and the row states with a start value
  void ForgetRow(int64_t row);       // ForgetReplace of a row
  void ForgetNotFinite(int64_t row, int64_t len) const;  // what was found at positions >= len
  void DecideToAppend(int64_t row);
  int32_t& StateOf(int64_t row, int64_t lane) const;  // REQUIRES: the view has state_of
  int32_t TakeState();                                // REQUIRES: one is free
  int64_t NumElectedStates(int64_t row) const;        // of lanes with replace >= 0
  void CopyStates(int64_t from_row, int64_t to_row);  // of lanes with replace >= 0
  void ShrinkLane(int64_t row, int64_t lane_id, int64_t len);
  void FreeRow(int64_t row);

  KvCacheView view_;
  const OpTable* ops_;
  BlockPool pool_;
  std::vector<int64_t> free_rows_;
  std::vector<int32_t> free_states_;  // a heap: the lowest id is on top
  std::unordered_map<SeqId, int64_t> row_of_;
  // Per row: some lane's open (partly filled) block may have other owners. Only shrinking a row
  // that shares full blocks brings this about, so Extend need not look at tables otherwise. An
  // Extend that appends to every lane ends it, one that overwrites slots does not.
  std::vector<uint8_t> open_may_be_shared_;
  std::vector<int32_t> undoable_;       // per row, tokens
  std::vector<int32_t> last_replaced_;  // per row: slots that the last Extend overwrites
  // Per lane of every row, if the view has `replace`: slot that the last Extend overwrites,
  // kNoReplace when it has appended.
  std::vector<int32_t> decided_;
  SeqId next_seq_ = 0;
  int64_t num_lanes_ = 0;  // lanes of one row
};

}  // namespace kvcore
