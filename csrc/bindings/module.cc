// kvcore._C: exceptions, settings of the process, and the other files' bindings.
#include <exception>
#include <string>

#include "base/check.h"
#include "base/parallel.h"
#include "bindings/bindings.h"
#include "bindings/tensor_caster.h"
#include "cpu/isa.h"

namespace py = pybind11;

namespace kvcore {
namespace {

// Error becomes ValueError; OutOfBlocks and InternalError have Python classes of their own.
void BindErrors(py::module_& m) {
  py::register_local_exception<OutOfBlocks>(m, "OutOfBlocks", PyExc_RuntimeError);
  py::register_local_exception<InternalError>(m, "InternalError", PyExc_RuntimeError);
  py::register_local_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const Error& e) {
      py::set_error(PyExc_ValueError, e.what());
    }
  });
}

Isa IsaByName(const std::string& name) {
  for (Isa isa : {Isa::kBase, Isa::kV3, Isa::kV4, Isa::kV4Bf16})
    if (name == IsaName(isa)) return isa;
  throw Error("name: expected base, v3, v4 or bf16, got '" + name + "'");
}

// What a tensor argument looks like to the core: for tests and for finding out why one is refused.
py::tuple DescribeTensor(const TensorArg<"tensor">& tensor) {
  py::tuple shape(tensor.ndim), stride(tensor.ndim);
  for (int i = 0; i < tensor.ndim; ++i) {
    shape[i] = tensor.shape[i];
    stride[i] = tensor.stride[i];
  }
  return py::make_tuple(reinterpret_cast<uintptr_t>(tensor.data),
                        tensor.device == Device::kCuda ? "cuda" : "cpu", DTypeName(tensor.dtype),
                        shape, stride);
}

void BindProcess(py::module_& m) {
  m.def("set_num_threads", &SetNumThreads, py::arg("n"));
  m.def("num_threads", &NumThreads);
  m.def("parallel_backend", &ParallelBackend);
  m.def("isa", [] { return IsaName(ActiveIsa()); });
  m.def(
      "isa_supported", [](const std::string& name) { return IsaSupported(IsaByName(name)); },
      py::arg("name"));
  m.def("set_isa", [](const std::string& name) { SetIsa(IsaByName(name)); }, py::arg("name"));
  m.def("cuda_built", [] { return false; });
  m.def("version", [] { return KVCORE_VERSION; });
  m.def("describe_tensor", &DescribeTensor, py::arg("tensor"));
  m.def("uses_dlpack", &UsesDlpack);
  m.def("set_uses_dlpack", &SetUsesDlpack, py::arg("enabled"));
}

}  // namespace
}  // namespace kvcore

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ core of kvcore; see _C.pyi.";
  kvcore::BindErrors(m);
  kvcore::BindProcess(m);
  kvcore::BindStore(m);
  kvcore::BindOps(m);
  kvcore::BindDetect(m);
}
