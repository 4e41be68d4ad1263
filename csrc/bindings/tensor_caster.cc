#include "bindings/tensor_caster.h"

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "bindings/dlpack.h"

namespace py = pybind11;

namespace kvcore {
namespace {

bool& DlpackFlag() {
  static bool enabled = [] {
    const char* value = std::getenv("KVCORE_NO_DLPACK");
    return value == nullptr || *value == '\0' || std::strcmp(value, "0") == 0;
  }();
  return enabled;
}

// Objects of torch and interned attribute names, fetched once. Never freed: the interpreter may be
// gone before static destructors run.
struct Torch {
  PyObject* tensor_type;
  PyObject* is_neg;  // the unbound method
  std::vector<std::pair<PyObject*, DType>> dtypes;
  PyObject *data_ptr, *shape, *stride, *dtype, *device, *is_cpu, *is_cuda;
};

const Torch& GetTorch() {
  static const Torch* torch = [] {
    py::module_ module = py::module_::import("torch");
    auto get = [&](const char* name) { return py::object(module.attr(name)).release().ptr(); };
    auto name = [](const char* text) { return PyUnicode_InternFromString(text); };
    auto* t = new Torch;
    t->tensor_type = get("Tensor");
    t->is_neg = py::object(module.attr("Tensor").attr("is_neg")).release().ptr();
    t->dtypes = {{get("float32"), DType::kF32}, {get("bfloat16"), DType::kBF16},
                 {get("float16"), DType::kF16}, {get("int32"), DType::kI32},
                 {get("int64"), DType::kI64},   {get("uint8"), DType::kU8},
                 {get("float64"), DType::kF64}, {get("bool"), DType::kBool}};
    t->data_ptr = name("data_ptr");
    t->shape = name("shape");
    t->stride = name("stride");
    t->dtype = name("dtype");
    t->device = name("device");
    t->is_cpu = name("is_cpu");
    t->is_cuda = name("is_cuda");
    return t;
  }();
  return *torch;
}

std::string TypeName(PyObject* object) { return Py_TYPE(object)->tp_name; }

// The DLPack function of `type`, null if it has none of our major version.
dlpack::TensorFromPyObject FindExchangeFunction(PyTypeObject* type) {
  py::object capsule = py::reinterpret_steal<py::object>(
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), dlpack::kAttribute));
  if (!capsule) {
    PyErr_Clear();
    return nullptr;
  }
  auto* api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsuleName)
          ? PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName)
          : nullptr);
  if (api == nullptr || api->major != dlpack::kMajorVersion) return nullptr;
  return api->tensor_from_py_object;
}

struct TypeEntry {
  PyTypeObject* type;
  bool is_tensor;
  dlpack::TensorFromPyObject read;
};

// What is known of the object's type. Each type is looked up once; the cache keeps the types alive,
// so an address never comes back as another type. Programs that make types without end fall out of
// the cache and stay correct.
TypeEntry Lookup(PyTypeObject* type) {
  constexpr size_t kMaxTypes = 64;
  static std::vector<TypeEntry>* cache = new std::vector<TypeEntry>;
  for (const TypeEntry& entry : *cache)
    if (entry.type == type) return entry;
  TypeEntry entry{type, false, nullptr};
  entry.is_tensor =
      PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(GetTorch().tensor_type)) != 0;
  if (entry.is_tensor) {
    entry.read = FindExchangeFunction(type);
    if (cache->size() < kMaxTypes) {
      Py_INCREF(type);
      cache->push_back(entry);
    }
  }
  return entry;
}

// The pending Python exception as text.
std::string TakePythonError() {
  py::error_already_set error;
  std::string text = error.what();
  const size_t end = text.find('\n');
  return end == std::string::npos ? text : text.substr(0, end);
}

py::object Owned(PyObject* object, const char* name) {
  if (object == nullptr)
    throw Error(std::string(name) + ": unreadable tensor: " + TakePythonError());
  return py::reinterpret_steal<py::object>(object);
}

py::object Attribute(PyObject* object, PyObject* attribute, const char* name) {
  return Owned(PyObject_GetAttr(object, attribute), name);
}

py::object Call(PyObject* object, PyObject* method, const char* name) {
  return Owned(PyObject_CallMethodNoArgs(object, method), name);
}

[[noreturn]] void RefuseDType(PyObject* object, const char* name) {
  const std::string dtype = py::str(Attribute(object, GetTorch().dtype, name));
  throw Error(std::string(name) +
              ": expected dtype float32, bfloat16, float16, float64, int32, int64, uint8 or bool, "
              "got " +
              dtype);
}

[[noreturn]] void RefuseDevice(PyObject* object, const char* name) {
  const std::string device = py::str(Attribute(object, GetTorch().device, name));
  throw Error(std::string(name) + ": expected a tensor on cpu or cuda, got device " + device);
}

void SetShape(TensorView* view, int64_t ndim, const char* name) {
  KV_CHECK(ndim <= TensorView::kMaxDims)
      << name << ": expected at most " << TensorView::kMaxDims << " dims, got " << ndim;
  view->ndim = static_cast<int>(ndim);
}

// The memory of a lazily negated view, such as z.conj().imag, holds the numbers with the other
// sign, and DLPack's table hands it out as it is. Conjugated views are complex, a type that is
// refused.
void RefuseLazyNegation(PyObject* object, const char* name) {
  PyObject* const arguments[] = {object};
  const py::object negated =
      Owned(PyObject_Vectorcall(GetTorch().is_neg, arguments, 1, nullptr), name);
  KV_CHECK(negated.ptr() != Py_True) << name << ": a lazily negated view; call resolve_neg() first";
}

bool IsFloating(DType t) {
  return t == DType::kF32 || t == DType::kBF16 || t == DType::kF16 || t == DType::kF64;
}

TensorView ReadByExchange(PyObject* object, dlpack::TensorFromPyObject read, const char* name) {
  dlpack::Tensor t{};
  // A failure is final. The attributes of a meta tensor look like those of one at address 0.
  if (read(object, &t) != 0)
    throw Error(std::string(name) + ": unreadable tensor: " + TakePythonError());
  TensorView view;
  switch (t.device_type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:  // pinned host memory
      view.device = Device::kCpu;
      break;
    case dlpack::kCuda:
      view.device = Device::kCuda;
      break;
    default:
      RefuseDevice(object, name);
  }
  const int kind = t.dtype.lanes == 1 ? t.dtype.code * 256 + t.dtype.bits : -1;
  switch (kind) {
    case dlpack::kFloat * 256 + 32:
      view.dtype = DType::kF32;
      break;
    case dlpack::kBfloat * 256 + 16:
      view.dtype = DType::kBF16;
      break;
    case dlpack::kInt * 256 + 32:
      view.dtype = DType::kI32;
      break;
    case dlpack::kInt * 256 + 64:
      view.dtype = DType::kI64;
      break;
    case dlpack::kUInt * 256 + 8:
      view.dtype = DType::kU8;
      break;
    case dlpack::kFloat * 256 + 16:
      view.dtype = DType::kF16;
      break;
    case dlpack::kFloat * 256 + 64:
      view.dtype = DType::kF64;
      break;
    case dlpack::kBool * 256 + 8:
      view.dtype = DType::kBool;
      break;
    default:
      RefuseDType(object, name);
  }
  SetShape(&view, t.ndim, name);
  int64_t dense = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    view.shape[i] = t.shape[i];
    view.stride[i] = t.strides != nullptr ? t.strides[i] : dense;
    dense *= t.shape[i];
  }
  view.data = t.data == nullptr ? nullptr : static_cast<char*>(t.data) + t.byte_offset;
  return view;
}

void ReadSizes(const py::object& sizes, int64_t* out, const char* name) {
  const Py_ssize_t n = PyTuple_GET_SIZE(sizes.ptr());  // torch.Size is a tuple
  for (Py_ssize_t i = 0; i < n; ++i) {
    out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes.ptr(), i));
    if (out[i] == -1 && PyErr_Occurred())  // a symbolic size of a tensor being traced
      throw Error(std::string(name) + ": unreadable tensor: " + TakePythonError());
  }
}

// Sparse and other layouts without strides raise from stride() or data_ptr().
TensorView ReadByAttributes(PyObject* object, const char* name) {
  const Torch& torch = GetTorch();
  TensorView view;
  if (Attribute(object, torch.is_cpu, name).ptr() == Py_True)
    view.device = Device::kCpu;
  else if (Attribute(object, torch.is_cuda, name).ptr() == Py_True)
    view.device = Device::kCuda;
  else
    RefuseDevice(object, name);
  const py::object dtype = Attribute(object, torch.dtype, name);
  bool known = false;
  for (const auto& [torch_dtype, our_dtype] : torch.dtypes) {
    if (torch_dtype != dtype.ptr()) continue;
    view.dtype = our_dtype;
    known = true;
    break;
  }
  if (!known) RefuseDType(object, name);
  const py::object shape = Attribute(object, torch.shape, name);
  const py::object stride = Call(object, torch.stride, name);
  KV_CHECK(PyTuple_Check(shape.ptr()) && PyTuple_Check(stride.ptr()) &&
           PyTuple_GET_SIZE(shape.ptr()) == PyTuple_GET_SIZE(stride.ptr()))
      << name << ": unreadable tensor: shape and stride do not fit together";
  SetShape(&view, PyTuple_GET_SIZE(shape.ptr()), name);
  ReadSizes(shape, view.shape, name);
  ReadSizes(stride, view.stride, name);
  const py::object address = Call(object, torch.data_ptr, name);
  view.data = PyLong_AsVoidPtr(address.ptr());
  if (view.data == nullptr && PyErr_Occurred())
    throw Error(std::string(name) + ": unreadable tensor: " + TakePythonError());
  return view;
}

}  // namespace

bool UsesDlpack() { return DlpackFlag(); }
void SetUsesDlpack(bool enabled) { DlpackFlag() = enabled; }

TensorView ViewOfTensor(PyObject* object, const char* name) {
  const TypeEntry entry = Lookup(Py_TYPE(object));
  if (!entry.is_tensor)
    throw py::type_error(std::string(name) + ": expected torch.Tensor, got " + TypeName(object));
  const bool exchange = entry.read != nullptr && DlpackFlag();
  const TensorView view =
      exchange ? ReadByExchange(object, entry.read, name) : ReadByAttributes(object, name);
  if (IsFloating(view.dtype)) RefuseLazyNegation(object, name);
  KV_CHECK(view.data != nullptr || view.numel() == 0)
      << name << ": a tensor of shape " << view.ShapeString()
      << " without memory (fake, or a wrapper without storage of its own)";
  return view;
}

}  // namespace kvcore
