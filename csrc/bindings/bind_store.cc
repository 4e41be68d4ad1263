// KvStore for Python.
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
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

// (name, tensor, what new places begin with or None).
using Side = std::tuple<std::string, py::object, py::object>;

BoundStore MakeStore(const py::object& key_blocks, const py::object& value_blocks,
                     const py::object& position, const py::object& block_table,
                     const py::object& lane_len, const py::object& seq_len,
                     const py::object& query_ring, int64_t head_dim,
                     const std::vector<Side>& planes, const std::vector<Side>& row_states,
                     const py::object& lane_state, const py::object& state_of,
                     int64_t state_slots) {
  KvCacheView view;
  std::vector<py::object> kept;
  const auto view_of = [&kept](const py::object& tensor, const char* name) {
    if (tensor.is_none()) return TensorView();
    kept.push_back(tensor);
    return ViewOfTensor(tensor.ptr(), name);
  };
  const auto add = [&view_of](const std::string& name, const py::object& tensor,
                              const py::object& start, SideTensors* to) {
    const TensorView given = view_of(tensor, name.c_str());
    to->Set(name, given, view_of(start, (name + " start").c_str()));
  };
  const auto needed = [](const py::object& tensor, const char* name) {
    return ViewOfTensor(tensor.ptr(), name);  // refuses None by name
  };
  view.key_blocks = needed(key_blocks, "key_blocks");
  view.value_blocks = needed(value_blocks, "value_blocks");
  view.position = needed(position, "position");
  view.block_table = needed(block_table, "block_table");
  view.lane_len = needed(lane_len, "lane_len");
  view.seq_len = needed(seq_len, "seq_len");
  kept = {key_blocks, value_blocks, position, block_table, lane_len, seq_len};
  add("query_ring", query_ring, py::none(), &view.row_states);
  for (const auto& [name, tensor, start] : planes) add(name, tensor, start, &view.planes);
  for (const auto& [name, tensor, start] : row_states) add(name, tensor, start, &view.row_states);
  view.lane_state = view_of(lane_state, "lane_state");
  view.state_of = view_of(state_of, "state_of");
  view.state_slots = state_slots;
  view.head_dim = head_dim;
  return {std::move(kept), KvStore(view)};
}

std::vector<int64_t> Rows(const BoundStore& s, const Seqs& seqs) {
  std::vector<int64_t> rows;
  rows.reserve(seqs.size());
  for (SeqId seq : seqs) rows.push_back(s.store.Row(seq));
  return rows;
}

}  // namespace

void BindStore(py::module_& m) {
  m.attr("BLOCK_SLOTS") = kBlockSlots;
  m.attr("NO_REPLACE") = kNoReplace;
  m.attr("NOT_FINITE") = kNotFinite;
  py::class_<BoundStore>(m, "KvStore")
      .def(py::init(&MakeStore), py::arg("key_blocks"), py::arg("value_blocks"),
           py::arg("position"), py::arg("block_table"), py::arg("lane_len"), py::arg("seq_len"),
           py::arg("query_ring") = py::none(), py::arg("head_dim"), py::arg("planes") = py::tuple(),
           py::arg("row_states") = py::tuple(), py::arg("lane_state") = py::none(),
           py::arg("state_of") = py::none(), py::arg("state_slots") = 0)
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
          "elect",
          [](BoundStore& s, const Seqs& seqs, const TensorArg<"slots">& slots) {
            s.store.Elect(seqs, slots);
          },
          py::arg("seqs"), py::arg("slots"), NoGil())
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
