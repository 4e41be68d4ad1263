// What the files of this directory share: the store as Python holds it, and one function per group
// of bindings, called by module.cc. Names, signatures and meaning for Python: kvcore/_C.pyi.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "store/kv_store.h"

namespace kvcore {

// A KvStore that keeps its tensors alive. Not thread-safe: one thread at a time per store, though
// the GIL is released while an operation runs.
struct BoundStore {
  std::vector<pybind11::object> tensors;  // declared first: outlives the store
  KvStore store;
};

void BindStore(pybind11::module_& m);
void BindOps(pybind11::module_& m);
void BindDetect(pybind11::module_& m);

}  // namespace kvcore
