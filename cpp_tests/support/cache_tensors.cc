#include "support/cache_tensors.h"

#include <cstring>
#include <limits>

namespace kvcore {
namespace {

constexpr double kGarbage = 77;

}  // namespace

CacheTensors::CacheTensors(const CacheShape& s)
    : key_blocks(s.dtype, {s.blocks, BlockElements(s.head_dim)}),
      position(DType::kI32, {s.blocks, kBlockSlots}),
      block_table(DType::kI32, {s.rows, s.layers, s.kv_heads, s.max_blocks}),
      lane_len(DType::kI32, {s.rows, s.layers, s.kv_heads}),
      seq_len(DType::kI32, {s.rows}),
      shape_(s) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  key_blocks.Fill(nan);
  value_blocks = key_blocks;
  position.Fill(std::numeric_limits<int32_t>::min());
  block_table.Fill(kUnusedTableEntry);
  lane_len.Fill(kGarbage);
  seq_len.Fill(kGarbage);
  if (s.window > 0) {
    query_ring = OwnedTensor(s.dtype, {s.rows, s.layers, s.q_heads, s.window, s.head_dim});
    query_ring.Fill(nan);
  }
  if (s.replaces) {
    replace = lane_len;
    replace.Fill(kUnusedTableEntry);
  }
  if (s.notes_not_finite) not_finite = seq_len;
  if (s.states > 0) {
    if (shape_.state_slots == 0) shape_.state_slots = s.max_blocks * kBlockSlots;
    const RkvStateLayout layout(shape_.state_slots, s.window, s.head_dim);
    lane_state = OwnedTensor(DType::kU8, {s.states, layout.bytes});
    state_of = lane_len;
    state_of.Fill(kUnusedTableEntry);
  }
  for (const PlaneShape& p : s.planes) {
    planes.emplace_back(p.dtype, std::initializer_list<int64_t>{s.blocks, p.channels, kBlockSlots});
    planes.back().Fill(IsFloat(p.dtype) ? nan : kGarbage);
    starts.emplace_back(p.dtype, std::initializer_list<int64_t>{p.channels});
    for (int64_t c = 0; c < p.channels; ++c) starts.back().SetAt(c, static_cast<double>(c));
  }
}

KvCacheView CacheTensors::view() const {
  KvCacheView v;
  v.key_blocks = key_blocks.view();
  v.value_blocks = value_blocks.view();
  v.position = position.view();
  v.block_table = block_table.view();
  v.lane_len = lane_len.view();
  v.seq_len = seq_len.view();
  if (shape_.window > 0) v.row_states.Set("query_ring", query_ring.view());
  if (shape_.replaces) v.row_states.Set("replace", replace.view());
  if (shape_.notes_not_finite) v.row_states.Set("not_finite", not_finite.view());
  for (size_t i = 0; i < planes.size(); ++i)
    v.planes.Set(shape_.planes[i].name, planes[i].view(), starts[i].view());
  if (shape_.states > 0) {
    v.lane_state = lane_state.view();
    v.state_of = state_of.view();
    v.state_slots = shape_.state_slots;
  }
  v.head_dim = shape_.head_dim;
  return v;
}

std::vector<const OwnedTensor*> CacheTensors::All() const {
  std::vector<const OwnedTensor*> all = {&key_blocks, &value_blocks, &position,   &block_table,
                                         &lane_len,   &seq_len,      &query_ring, &replace,
                                         &not_finite, &lane_state,   &state_of};
  for (const OwnedTensor& plane : planes) all.push_back(&plane);
  return all;
}

std::vector<uint8_t> CacheTensors::Snapshot() const {
  std::vector<uint8_t> bytes;
  SnapshotInto(&bytes);
  return bytes;
}

void CacheTensors::SnapshotInto(std::vector<uint8_t>* bytes) const {
  bytes->clear();
  for (const OwnedTensor* t : All())
    bytes->insert(bytes->end(), t->bytes().begin(), t->bytes().end());
}

bool CacheTensors::Equals(const std::vector<uint8_t>& snapshot) const {
  size_t at = 0;
  for (const OwnedTensor* t : All()) {
    const size_t size = t->bytes().size();
    if (at + size > snapshot.size()) return false;
    if (size > 0 && std::memcmp(snapshot.data() + at, t->bytes().data(), size) != 0) return false;
    at += size;
  }
  return at == snapshot.size();
}

}  // namespace kvcore
