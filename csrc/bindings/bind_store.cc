// KvStore for Python.
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/tensor_caster.h"
#include "store/batch_plan.h"

namespace py = pybind11;

namespace kvcore {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Seqs = std::vector<SeqId>;
using Counts = std::vector<int64_t>;

BoundStore MakeStore(const py::object& key_blocks, const py::object& value_blocks,
                     const py::object& position, const py::object& block_table,
                     const py::object& lane_len, const py::object& seq_len,
                     const py::object& query_ring, int64_t head_dim, const py::object& replace,
                     const py::object& lane_state, int64_t state_slots,
                     const py::object& attention_stats, const py::object& stats_start,
                     const py::object& not_finite, const py::object& state_of) {
  KvCacheView view;
  view.key_blocks = ViewOfTensor(key_blocks.ptr(), "key_blocks");
  view.value_blocks = ViewOfTensor(value_blocks.ptr(), "value_blocks");
  view.position = ViewOfTensor(position.ptr(), "position");
  view.block_table = ViewOfTensor(block_table.ptr(), "block_table");
  view.lane_len = ViewOfTensor(lane_len.ptr(), "lane_len");
  view.seq_len = ViewOfTensor(seq_len.ptr(), "seq_len");
  if (!query_ring.is_none()) view.query_ring = ViewOfTensor(query_ring.ptr(), "query_ring");
  if (!replace.is_none()) view.replace = ViewOfTensor(replace.ptr(), "replace");
  if (!lane_state.is_none()) view.lane_state = ViewOfTensor(lane_state.ptr(), "lane_state");
  if (!state_of.is_none()) view.state_of = ViewOfTensor(state_of.ptr(), "state_of");
  if (!attention_stats.is_none()) {
    view.attention_stats = ViewOfTensor(attention_stats.ptr(), "attention_stats");
    view.stats_start = ViewOfTensor(stats_start.ptr(), "stats_start");
  }
  if (!not_finite.is_none()) view.not_finite = ViewOfTensor(not_finite.ptr(), "not_finite");
  view.state_slots = state_slots;
  view.head_dim = head_dim;
  return {{key_blocks, value_blocks, position, block_table, lane_len, seq_len, query_ring, replace,
           lane_state, attention_stats, stats_start, not_finite, state_of},
          KvStore(view)};
}

std::vector<int64_t> Rows(const BoundStore& s, const Seqs& seqs) {
  std::vector<int64_t> rows;
  rows.reserve(seqs.size());
  for (SeqId seq : seqs) rows.push_back(s.store.Row(seq));
  return rows;
}

}  // namespace

void BindStore(py::module_& m) {
  py::class_<BoundStore>(m, "KvStore")
      .def(py::init(&MakeStore), py::arg("key_blocks"), py::arg("value_blocks"),
           py::arg("position"), py::arg("block_table"), py::arg("lane_len"), py::arg("seq_len"),
           py::arg("query_ring") = py::none(), py::arg("head_dim"), py::arg("replace") = py::none(),
           py::arg("lane_state") = py::none(), py::arg("state_slots") = 0,
           py::arg("attention_stats") = py::none(), py::arg("stats_start") = py::none(),
           py::arg("not_finite") = py::none(), py::arg("state_of") = py::none())
      .def("create", [](BoundStore& s) { return s.store.Create(); })
      .def(
          "release", [](BoundStore& s, SeqId seq) { s.store.Release(seq); }, py::arg("seq"))
      .def(
          "is_live", [](const BoundStore& s, SeqId seq) { return s.store.IsLive(seq); },
          py::arg("seq"))
      .def(
          "extend",
          [](BoundStore& s, const Seqs& seqs, const Counts& counts, Stream stream) {
            s.store.Extend(seqs, counts, stream);
          },
          py::arg("seqs"), py::arg("counts"), py::arg("stream") = 0, NoGil())
      .def(
          "blocks_to_extend",
          [](const BoundStore& s, const Seqs& seqs, const Counts& counts) {
            return s.store.BlocksToExtend(seqs, counts);
          },
          py::arg("seqs"), py::arg("counts"), NoGil())
      .def(
          "truncate", [](BoundStore& s, SeqId seq, int64_t count) { s.store.Truncate(seq, count); },
          py::arg("seq"), py::arg("count"), NoGil())
      .def(
          "undoable", [](const BoundStore& s, SeqId seq) { return s.store.Undoable(seq); },
          py::arg("seq"))
      .def(
          "forget_replace", [](BoundStore& s, SeqId seq) { s.store.ForgetReplace(seq); },
          py::arg("seq"))
      .def(
          "take_states",
          [](BoundStore& s, const Seqs& seqs, const TensorArg<"full">& full) {
            s.store.TakeStates(seqs, full);
          },
          py::arg("seqs"), py::arg("full"), NoGil())
      .def(
          "num_states", [](const BoundStore& s, SeqId seq) { return s.store.NumStates(seq); },
          py::arg("seq"))
      .def("free_states", [](const BoundStore& s) { return s.store.FreeStates(); })
      .def(
          "fork",
          [](BoundStore& s, SeqId parent, int64_t count, bool copy, Stream stream) {
            return s.store.Fork(parent, count, copy, stream);
          },
          py::arg("parent"), py::arg("count"), py::arg("copy"), py::arg("stream") = 0, NoGil())
      .def(
          "blocks_to_fork",
          [](const BoundStore& s, SeqId parent, int64_t count, bool copy) {
            return s.store.BlocksToFork(parent, count, copy);
          },
          py::arg("parent"), py::arg("count"), py::arg("copy"), NoGil())
      .def(
          "adopt", [](BoundStore& s, SeqId parent, SeqId child) { s.store.Adopt(parent, child); },
          py::arg("parent"), py::arg("child"), NoGil())
      .def(
          "evict",
          [](BoundStore& s, const Seqs& seqs, const TensorArg<"drop">& drop,
             const TensorArg<"drop_count">& drop_count,
             Stream stream) { return s.store.Evict(seqs, drop, drop_count, stream); },
          py::arg("seqs"), py::arg("drop"), py::arg("drop_count"), py::arg("stream") = 0, NoGil())
      .def(
          "num_replaced", [](const BoundStore& s, SeqId seq) { return s.store.NumReplaced(seq); },
          py::arg("seq"))
      .def(
          "row", [](const BoundStore& s, SeqId seq) { return s.store.Row(seq); }, py::arg("seq"))
      .def("rows", &Rows, py::arg("seqs"))
      .def(
          "seq_len", [](const BoundStore& s, SeqId seq) { return s.store.SeqLen(seq); },
          py::arg("seq"))
      .def(
          "max_lane_len", [](const BoundStore& s, SeqId seq) { return s.store.MaxLaneLen(seq); },
          py::arg("seq"))
      .def(
          "total_slots", [](const BoundStore& s, SeqId seq) { return s.store.TotalSlots(seq); },
          py::arg("seq"))
      .def(
          "num_blocks", [](const BoundStore& s, SeqId seq) { return s.store.NumBlocks(seq); },
          py::arg("seq"))
      .def("free_blocks", [](const BoundStore& s) { return s.store.FreeBlocks(); })
      .def("free_rows", [](const BoundStore& s) { return s.store.FreeRows(); })
      .def("num_sequences", [](const BoundStore& s) { return s.store.NumSequences(); })
      .def("sequences", [](const BoundStore& s) { return s.store.Sequences(); })
      .def(
          "check_integrity", [](const BoundStore& s) { s.store.CheckIntegrity(); }, NoGil())
      .def(
          "fill_batch",
          [](const BoundStore& s, const Seqs& seqs, const Counts& counts,
             const TensorArg<"rows">& rows, const TensorArg<"cu_tokens">& cu_tokens,
             const TensorArg<"positions">& positions) {
            FillBatch(s.store, seqs, counts, rows, cu_tokens, positions);
          },
          py::arg("seqs"), py::arg("counts"), py::arg("rows"), py::arg("cu_tokens"),
          py::arg("positions"));
}

}  // namespace kvcore
