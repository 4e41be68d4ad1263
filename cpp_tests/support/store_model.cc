#include "support/store_model.h"

#include <algorithm>
#include <sstream>

namespace kvcore {
namespace {

enum What { kKey = 0, kValue = 1, kQuery = 2 };

// 24 bits, exact in float, different for neighbours in every argument.
float Number(uint32_t stamp, What what, int64_t lane_or_head, int64_t dim) {
  const uint32_t word = stamp * 2654435761u +
                        static_cast<uint32_t>(what * 100003 + lane_or_head * 1009 + dim) * 40503u;
  return static_cast<float>(word >> 8);
}

// What a plane holds after a note, exact in every type; its start value without.
double Noted(uint32_t note, int64_t channel) {
  return static_cast<double>(note == 0 ? channel : (note + channel) % 128);
}

void Forget(ModelledStore::Sequence* s) {
  s->replace.assign(s->replace.size(), -1);
  s->states.assign(s->states.size(), 0);
}

}  // namespace

ModelledStore::ModelledStore(const CacheShape& shape)
    : tensors(shape),
      store(tensors.view(), &ThrowingOps()),
      ops_(GetOps(Device::kCpu)),
      shape_(shape) {}

SeqId ModelledStore::Create() {
  const SeqId seq = [&] {
    const ArmedFailures armed(failures);
    return store.Create();
  }();
  Sequence& s = sequences_[seq];
  s.lanes.resize(num_lanes());
  if (shape_.replaces) s.replace.assign(num_lanes(), -1);
  if (shape_.states > 0) s.states.assign(num_lanes(), 0);
  s.ring.assign(shape_.window, 0);
  return seq;
}

void ModelledStore::Release(SeqId seq) {
  {
    const ArmedFailures armed(failures);
    store.Release(seq);
  }
  sequences_.erase(seq);
}

void ModelledStore::Append(const std::vector<SeqId>& seqs, const std::vector<int64_t>& counts) {
  {
    const ArmedFailures armed(failures);
    store.Extend(seqs, counts);
  }
  const auto num_seqs = static_cast<int64_t>(seqs.size());
  std::vector<uint32_t> stamps;
  for (int64_t i = 0; i < num_seqs; ++i) {
    Sequence& s = sequences_.at(seqs[i]);
    bool replaced = false;
    for (int64_t k = 0; k < counts[i]; ++k) {
      const Token token = {static_cast<int32_t>(s.seq_len++), next_stamp_++};
      stamps.push_back(token.stamp);
      for (int64_t l = 0; l < num_lanes(); ++l) {
        const bool overwrites = shape_.replaces && counts[i] == 1 && s.replace[l] >= 0;
        if (overwrites) s.lanes[l][s.replace[l]] = token;
        if (!overwrites) s.lanes[l].push_back(token);
        replaced |= overwrites;
      }
      if (shape_.window > 0) s.ring[token.position % shape_.window] = token.stamp;
    }
    s.undoable = replaced ? 0 : s.undoable + counts[i];
    if (counts[i] > 0 && !replaced) Forget(&s);
  }

  const auto num_tokens = static_cast<int64_t>(stamps.size());
  std::vector<int32_t> rows(num_seqs), cu_tokens(num_seqs + 1);
  std::vector<int64_t> positions(num_tokens);
  AppendKvParams p;
  p.batch.rows = MakeView(rows.data(), DType::kI32, {num_seqs});
  p.batch.cu_tokens = MakeView(cu_tokens.data(), DType::kI32, {num_seqs + 1});
  FillBatch(store, seqs, counts, p.batch.rows, p.batch.cu_tokens,
            MakeView(positions.data(), DType::kI64, {num_tokens}));
  const int64_t dims = shape_.head_dim;
  key_.resize(num_tokens * shape_.kv_heads * dims);
  value_.resize(key_.size());
  query_.resize(num_tokens * shape_.q_heads * dims);
  p.key = MakeView(key_.data(), DType::kF32, {num_tokens, shape_.kv_heads, dims});
  p.value = MakeView(value_.data(), DType::kF32, {num_tokens, shape_.kv_heads, dims});
  if (shape_.window > 0) {
    p.query = MakeView(query_.data(), DType::kF32, {num_tokens, shape_.q_heads, dims});
  }
  for (p.layer = 0; p.layer < shape_.layers; ++p.layer) {
    for (int64_t t = 0; t < num_tokens; ++t) {
      for (int64_t h = 0; h < shape_.kv_heads; ++h) {
        for (int64_t d = 0; d < dims; ++d) {
          const int64_t lane = p.layer * shape_.kv_heads + h;
          key_[(t * shape_.kv_heads + h) * dims + d] = Number(stamps[t], kKey, lane, d);
          value_[(t * shape_.kv_heads + h) * dims + d] = Number(stamps[t], kValue, lane, d);
        }
      }
      for (int64_t h = 0; h < shape_.q_heads; ++h) {
        for (int64_t d = 0; d < dims; ++d) {
          query_[(t * shape_.q_heads + h) * dims + d] =
              Number(stamps[t], kQuery, p.layer * shape_.q_heads + h, d);
        }
      }
    }
    store.CheckAppend(p.batch, p.layer);
    ops_.append_kv(store.view(), p, 0);
  }
}

void ModelledStore::Truncate(SeqId seq, int64_t count) {
  {
    const ArmedFailures armed(failures);
    store.Truncate(seq, count);
  }
  Sequence& s = sequences_.at(seq);
  for (auto& lane : s.lanes) lane.resize(lane.size() - count);
  s.seq_len -= count;
  s.undoable -= count;
  if (count > 0) Forget(&s);
}

std::vector<SeqId> ModelledStore::Fork(SeqId parent, int64_t count, bool copy) {
  const std::vector<SeqId> children = [&] {
    const ArmedFailures armed(failures);
    return store.Fork(parent, count, copy);
  }();
  for (const SeqId child : children) {
    Sequence& s = sequences_[child] = sequences_.at(parent);
    for (size_t l = 0; l < s.states.size(); ++l) {
      if (s.replace[l] < 0) s.states[l] = 0;
    }
  }
  return children;
}

void ModelledStore::Adopt(SeqId parent, SeqId child) {
  {
    const ArmedFailures armed(failures);
    store.Adopt(parent, child);
  }
  sequences_.at(parent) = sequences_.at(child);
  sequences_.erase(child);
}

int64_t ModelledStore::Evict(const std::vector<SeqId>& seqs, const DropLists& lists) {
  const auto num_seqs = static_cast<int64_t>(seqs.size());
  size_t max_drop = 0;
  for (const auto& lanes : lists) {
    for (const auto& list : lanes) max_drop = std::max(max_drop, list.size());
  }
  const auto width = static_cast<int64_t>(max_drop);
  OwnedTensor drop(DType::kI32, {num_seqs, shape_.layers, shape_.kv_heads, width});
  OwnedTensor drop_count(DType::kI32, {num_seqs, shape_.layers, shape_.kv_heads});
  drop.Fill(kUnusedTableEntry);
  for (int64_t i = 0; i < num_seqs; ++i) {
    for (int64_t lane = 0; lane < num_lanes(); ++lane) {
      const auto& list = lists[i][lane];
      const int64_t at = i * num_lanes() + lane;
      drop_count.SetAt(at, static_cast<double>(list.size()));
      for (size_t k = 0; k < list.size(); ++k) drop.SetAt(at * width + k, list[k]);
    }
  }
  const int64_t dropped = [&] {
    const ArmedFailures armed(failures);
    return store.Evict(seqs, drop.view(), drop_count.view());
  }();

  for (int64_t i = 0; i < num_seqs; ++i) {
    Sequence& s = sequences_.at(seqs[i]);
    for (int64_t l = 0; l < num_lanes(); ++l) {
      auto& lane = s.lanes[l];
      std::vector<bool> gone(lane.size(), false);
      for (const int32_t slot : lists[i][l]) gone[slot] = true;
      const size_t kept = lane.size() - lists[i][l].size();
      for (size_t hole = 0, from = kept; hole < kept; ++hole) {
        if (!gone[hole]) continue;
        while (gone[from]) ++from;
        lane[hole] = lane[from++];
      }
      lane.resize(kept);
      if (lists[i][l].empty()) continue;
      s.undoable = 0;
      Forget(&s);
    }
  }
  return dropped;
}

void ModelledStore::Elect(SeqId seq, int64_t lane, int32_t slot) {
  sequences_.at(seq).replace[lane] = slot;
  tensors.replace.SetAt(store.Row(seq) * num_lanes() + lane, slot);
}

void ModelledStore::ForgetReplace(SeqId seq) {
  store.ForgetReplace(seq);
  Forget(&sequences_.at(seq));
}

uint32_t* ModelledStore::StateOf(SeqId seq, int64_t lane) const {
  return reinterpret_cast<uint32_t*>(LaneOf(seq, lane).State());
}

void ModelledStore::TakeStates(const std::vector<SeqId>& seqs, int64_t full) {
  OwnedTensor limit(DType::kI32, {shape_.layers, shape_.kv_heads});
  limit.Fill(static_cast<double>(full));
  {
    const ArmedFailures armed(failures);
    store.TakeStates(seqs, limit.view());
  }
  for (const SeqId seq : seqs) {
    Sequence& s = sequences_.at(seq);
    for (int64_t l = 0; l < num_lanes(); ++l) {
      if (static_cast<int64_t>(s.lanes[l].size()) < full || s.states[l] != 0) continue;
      s.states[l] = next_stamp_++;
      if (uint32_t* state = StateOf(seq, l)) *state = s.states[l];
    }
  }
}

void ModelledStore::WritePlanes(SeqId seq) {
  for (int64_t l = 0; l < num_lanes(); ++l) {
    auto& tokens = sequences_.at(seq).lanes[l];
    const Lane lane = LaneOf(seq, l);
    for (size_t slot = 0; slot < tokens.size(); ++slot) {
      tokens[slot].note = next_stamp_++;
      for (size_t p = 0; p < tensors.planes.size(); ++p)
        for (int64_t c = 0; c < shape_.planes[p].channels; ++c)
          tensors.planes[p].Set({lane.Block(slot), c, static_cast<int64_t>(slot) % kBlockSlots},
                                Noted(tokens[slot].note, c));
    }
  }
}

bool ModelledStore::SameSlot(SeqId seq, int64_t l, int64_t slot, const Token& token) const {
  const Lane lane = LaneOf(seq, l);
  const int64_t block = lane.Block(slot), at = slot % kBlockSlots, dims = shape_.head_dim;
  const float* key = store.view().key_blocks.ptr<float>() + block * BlockElements(dims);
  const float* value = store.view().value_blocks.ptr<float>() + block * BlockElements(dims);
  bool same = lane.Position(slot) == token.position;
  for (int64_t d = 0; d < dims; ++d) {
    same &= key[CpuKeyOffset(at, d)] == Number(token.stamp, kKey, l, d);
    same &= value[RowMajorOffset(at, d, dims)] == Number(token.stamp, kValue, l, d);
  }
  for (size_t p = 0; p < tensors.planes.size(); ++p)
    for (int64_t c = 0; c < shape_.planes[p].channels; ++c)
      same &= tensors.planes[p].Get({block, c, at}) == Noted(token.note, c);
  return same;
}

std::string ModelledStore::RingDifference(SeqId seq) const {
  const Sequence& s = sequences_.at(seq);
  const KvCacheView& view = store.view();
  for (int64_t head = 0; head < shape_.layers * shape_.q_heads; ++head) {
    const char* ring = view.Ring(store.Row(seq), head / shape_.q_heads, head % shape_.q_heads);
    for (int64_t i = 0; i < shape_.window * shape_.head_dim; ++i) {
      const uint32_t stamp = s.ring[i / shape_.head_dim];
      if (stamp != 0 && reinterpret_cast<const float*>(ring)[i] !=
                            Number(stamp, kQuery, head, i % shape_.head_dim))
        return "query head " + std::to_string(head) + " ring place " +
               std::to_string(i / shape_.head_dim);
    }
  }
  return "";
}

std::string ModelledStore::Difference(SeqId seq) const {
  const Sequence& s = sequences_.at(seq);
  const auto differs = [seq](const auto&... what) {
    std::ostringstream out;
    out << "sequence " << seq << ": ";
    (out << ... << what);
    return out.str();
  };
  if (!store.IsLive(seq)) return differs("not live");
  if (store.SeqLen(seq) != s.seq_len) return differs("seq_len ", store.SeqLen(seq));
  if (store.Undoable(seq) != s.undoable) return differs("undoable ", store.Undoable(seq));
  for (int64_t l = 0; l < num_lanes(); ++l) {
    const auto& tokens = s.lanes[l];
    const Lane lane = LaneOf(seq, l);
    if (lane.len != static_cast<int64_t>(tokens.size())) {
      return differs("lane ", l, " has length ", lane.len, ", expected ", tokens.size());
    }
    if (shape_.replaces && lane.Replaced() != s.replace[l]) {
      return differs("lane ", l, " replaces ", lane.Replaced(), ", expected ", s.replace[l]);
    }
    if (shape_.states > 0) {
      const uint32_t* state = StateOf(seq, l);
      if ((state != nullptr ? *state : 0) != s.states[l]) return differs("the state of lane ", l);
    }
    for (int64_t slot = 0; slot < lane.len; ++slot) {
      if (!SameSlot(seq, l, slot, tokens[slot])) {
        return differs("lane ", l, " slot ", slot, " in block ", lane.Block(slot), ": position ",
                       lane.Position(slot), ", expected ", tokens[slot].position,
                       " with its keys, values and planes");
      }
    }
  }
  const std::string ring = RingDifference(seq);
  return ring.empty() ? "" : differs(ring);
}

std::string ModelledStore::Difference() const {
  if (store.NumSequences() != static_cast<int64_t>(sequences_.size())) {
    return "the number of sequences differs";
  }
  for (const auto& [seq, unused] : sequences_) {
    std::string difference = Difference(seq);
    if (!difference.empty()) return difference;
  }
  return "";
}

}  // namespace kvcore
