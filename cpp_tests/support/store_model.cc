#include "support/store_model.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <sstream>

namespace kvcore {
namespace {

enum Plane { kKey = 0, kValue = 1, kQuery = 2 };

// 24 bits, exact in float, different for neighbours in every argument.
float Number(uint32_t stamp, Plane plane, int64_t lane_or_head, int64_t dim) {
  const uint32_t word = stamp * 2654435761u +
                        static_cast<uint32_t>(plane * 100003 + lane_or_head * 1009 + dim) * 40503u;
  return static_cast<float>(word >> 8);
}

void Forget(ModelledStore::Sequence* s) {
  s->replace.assign(s->replace.size(), -1);
  s->states.assign(s->states.size(), 0);
}

}  // namespace

StoreTensors::StoreTensors(const StoreShape& s)
    : key_blocks(DType::kF32, {s.blocks, BlockElements(s.head_dim)}),
      position(DType::kI32, {s.blocks, kBlockSlots}),
      block_table(DType::kI32, {s.rows, s.layers, s.kv_heads, s.max_blocks}),
      lane_len(DType::kI32, {s.rows, s.layers, s.kv_heads}),
      seq_len(DType::kI32, {s.rows}),
      head_dim_(s.head_dim) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  key_blocks.Fill(nan);
  value_blocks = key_blocks;
  position.Fill(std::numeric_limits<int32_t>::min());
  block_table.Fill(kUnusedTableEntry);
  lane_len.Fill(77);
  seq_len.Fill(77);
  if (s.window > 0) {
    query_ring = OwnedTensor(DType::kF32, {s.rows, s.layers, s.q_heads, s.window, s.head_dim});
    query_ring.Fill(nan);
  }
  if (s.replaces) {
    replace = OwnedTensor(DType::kI32, {s.rows, s.layers, s.kv_heads});
    replace.Fill(kUnusedTableEntry);
  }
  if (s.states > 0) {
    const RkvStateLayout layout(s.max_blocks * kBlockSlots, s.window, s.head_dim);
    lane_state = OwnedTensor(DType::kU8, {s.states, layout.bytes});
    state_of = OwnedTensor(DType::kI32, {s.rows, s.layers, s.kv_heads});
    state_of.Fill(kUnusedTableEntry);
  }
  if (s.stats_channels > 0) {
    attention_stats = OwnedTensor(DType::kF32, {s.blocks, s.stats_channels, kBlockSlots});
    attention_stats.Fill(nan);
    stats_start = OwnedTensor(DType::kF32, {s.stats_channels});
    for (int64_t c = 0; c < s.stats_channels; ++c) stats_start.Set({c}, static_cast<double>(c));
  }
}

KvCacheView StoreTensors::view() const {
  KvCacheView v;
  v.key_blocks = key_blocks.view();
  v.value_blocks = value_blocks.view();
  v.position = position.view();
  v.block_table = block_table.view();
  v.lane_len = lane_len.view();
  v.seq_len = seq_len.view();
  if (query_ring.view().ndim > 0) v.query_ring = query_ring.view();
  if (replace.view().ndim > 0) v.replace = replace.view();
  if (attention_stats.view().ndim > 0) {
    v.attention_stats = attention_stats.view();
    v.stats_start = stats_start.view();
  }
  if (state_of.view().ndim > 0) {
    v.lane_state = lane_state.view();
    v.state_of = state_of.view();
    v.state_slots = v.max_blocks() * kBlockSlots;
  }
  v.head_dim = head_dim_;
  return v;
}

std::vector<const OwnedTensor*> StoreTensors::All() const {
  return {&key_blocks, &value_blocks, &position, &block_table,     &lane_len,  &seq_len,
          &query_ring, &replace,      &state_of, &attention_stats, &lane_state};
}

std::vector<uint8_t> StoreTensors::Snapshot() const {
  std::vector<uint8_t> bytes;
  SnapshotInto(&bytes);
  return bytes;
}

void StoreTensors::SnapshotInto(std::vector<uint8_t>* bytes) const {
  bytes->clear();
  for (const OwnedTensor* t : All())
    bytes->insert(bytes->end(), t->bytes().begin(), t->bytes().end());
}

bool StoreTensors::Equals(const std::vector<uint8_t>& snapshot) const {
  size_t at = 0;
  for (const OwnedTensor* t : All()) {
    const size_t size = t->bytes().size();
    if (at + size > snapshot.size()) return false;
    if (size > 0 && std::memcmp(snapshot.data() + at, t->bytes().data(), size) != 0) return false;
    at += size;
  }
  return at == snapshot.size();
}

ModelledStore::ModelledStore(const StoreShape& shape)
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
  return reinterpret_cast<uint32_t*>(store.view().State(store.Row(seq) * num_lanes() + lane));
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

void ModelledStore::Attend(SeqId seq) {
  const int32_t* tables = tensors.block_table.view().ptr<int32_t>();
  float* stats = tensors.attention_stats.view().ptr<float>();
  for (int64_t l = 0; l < num_lanes(); ++l) {
    auto& lane = sequences_.at(seq).lanes[l];
    for (size_t slot = 0; slot < lane.size(); ++slot) {
      const auto more = static_cast<float>(next_stamp_++ % 64);
      lane[slot].attention += more;
      const int64_t block = tables[(store.Row(seq) * num_lanes() + l) * shape_.max_blocks +
                                   static_cast<int64_t>(slot) / kBlockSlots];
      for (int64_t c = 0; c < shape_.stats_channels; ++c) {
        stats[(block * shape_.stats_channels + c) * kBlockSlots + slot % kBlockSlots] += more;
      }
    }
  }
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
  const KvCacheView& view = store.view();
  const int64_t row = store.Row(seq), dims = shape_.head_dim;
  const float* keys = view.key_blocks.ptr<float>();
  const float* values = view.value_blocks.ptr<float>();
  const int32_t* positions = view.position.ptr<int32_t>();
  for (int64_t l = 0; l < num_lanes(); ++l) {
    const auto& lane = s.lanes[l];
    const int64_t lane_id = row * num_lanes() + l, len = view.lane_len.ptr<int32_t>()[lane_id];
    if (len != static_cast<int64_t>(lane.size())) {
      return differs("lane ", l, " has length ", len, ", expected ", lane.size());
    }
    if (shape_.replaces && view.Replaced(lane_id) != s.replace[l]) {
      return differs("lane ", l, " replaces ", view.Replaced(lane_id), ", expected ", s.replace[l]);
    }
    if (shape_.states > 0) {
      const uint32_t* state = StateOf(seq, l);
      if ((state != nullptr ? *state : 0) != s.states[l]) return differs("the state of lane ", l);
    }
    const int32_t* table = view.block_table.ptr<int32_t>() + lane_id * shape_.max_blocks;
    for (int64_t slot = 0; slot < len; ++slot) {
      const int64_t block = table[slot / kBlockSlots], at = slot % kBlockSlots;
      const int32_t position = positions[block * kBlockSlots + at];
      bool same = position == lane[slot].position;
      const float* key = keys + block * BlockElements(dims);
      const float* value = values + block * BlockElements(dims);
      for (int64_t d = 0; d < dims; ++d) {
        same &= key[CpuKeyOffset(at, d)] == Number(lane[slot].stamp, kKey, l, d);
        same &= value[RowMajorOffset(at, d, dims)] == Number(lane[slot].stamp, kValue, l, d);
      }
      for (int64_t c = 0; c < shape_.stats_channels; ++c) {
        const int64_t stat = (block * shape_.stats_channels + c) * kBlockSlots + at;
        same &=
            view.attention_stats.ptr<float>()[stat] == static_cast<float>(c) + lane[slot].attention;
      }
      if (!same) {
        return differs("lane ", l, " slot ", slot, " in block ", block, ": position ", position,
                       ", expected ", lane[slot].position, " with its keys and values");
      }
    }
  }
  for (int64_t i = 0; i < shape_.window * shape_.layers * shape_.q_heads; ++i) {
    const int64_t place = i % shape_.window, head = i / shape_.window;  // layer * q_heads + head
    if (s.ring[place] == 0) continue;
    const float* query = view.query_ring.ptr<float>() + row * view.query_ring.stride[0] + i * dims;
    for (int64_t d = 0; d < dims; ++d) {
      if (query[d] != Number(s.ring[place], kQuery, head, d)) {
        return differs("query head ", head, " ring place ", place);
      }
    }
  }
  return "";
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
