// Turns a torch.Tensor argument into a TensorView, without linking torch and without copying.
//
//   m.def("f", [](TensorArg<"query"> query, OptionalTensorArg<"lse"> lse) { ... });
//
// Both are TensorViews; None gives an empty view where the argument is optional. The name goes into
// the errors: TypeError for what is no torch.Tensor, ValueError for a tensor whose memory cannot be
// read as it stands (meta, fake, sparse, quantised, lazily conjugated or negated, neither on CPU
// nor on CUDA, a type that no operation takes, more than 6 dims). requires_grad does not matter.
//
// A view is valid as long as the tensor lives and keeps its storage; during a call the interpreter
// holds the arguments, so releasing the GIL is safe.
// Cost: 0.1 us a tensor through DLPack's C exchange table (torch >= 2.10), 0.4 us by attributes.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

#include "base/tensor_view.h"

namespace kvcore {

// REQUIRES: the GIL. Throws pybind11::type_error or Error, naming `name`.
TensorView ViewOfTensor(PyObject* object, const char* name);

// Whether tensors may be read through DLPack; false reads attributes, as with a torch that lacks
// the table. Default: true unless KVCORE_NO_DLPACK is set to anything but 0. For tests.
bool UsesDlpack();
void SetUsesDlpack(bool enabled);

template <size_t N>
struct ArgName {
  char text[N];
  constexpr ArgName(const char (&name)[N]) {  // NOLINT(runtime/explicit): a literal is the name
    for (size_t i = 0; i < N; ++i) text[i] = name[i];
  }
};

template <ArgName kName>
struct TensorArg : TensorView {};
template <ArgName kName>
struct OptionalTensorArg : TensorView {};

}  // namespace kvcore

namespace pybind11::detail {

template <kvcore::ArgName kName>
struct type_caster<kvcore::TensorArg<kName>> {
  PYBIND11_TYPE_CASTER(kvcore::TensorArg<kName>, const_name("torch.Tensor"));
  bool load(handle source, bool) {
    static_cast<kvcore::TensorView&>(value) = kvcore::ViewOfTensor(source.ptr(), kName.text);
    return true;
  }
};

template <kvcore::ArgName kName>
struct type_caster<kvcore::OptionalTensorArg<kName>> {
  PYBIND11_TYPE_CASTER(kvcore::OptionalTensorArg<kName>, const_name("torch.Tensor | None"));
  bool load(handle source, bool) {
    if (source.is_none()) return true;
    static_cast<kvcore::TensorView&>(value) = kvcore::ViewOfTensor(source.ptr(), kName.text);
    return true;
  }
};

}  // namespace pybind11::detail
