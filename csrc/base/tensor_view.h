// A non-owning view of a strided tensor. Copying it copies the description, never the data.
#pragma once

#include <cstdint>
#include <string>

#include "base/check.h"
#include "base/dtype.h"

namespace kvcore {

enum class Device : int8_t { kCpu, kCuda };

struct TensorView {
  static constexpr int kMaxDims = 6;

  void* data = nullptr;
  DType dtype = DType::kF32;
  Device device = Device::kCpu;
  int ndim = 0;
  int64_t shape[kMaxDims] = {};
  int64_t stride[kMaxDims] = {};  // in elements

  bool empty() const { return data == nullptr; }  // "not given": optional fields
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= shape[i];
    return n;
  }
  bool contiguous() const {
    int64_t expected = 1;
    for (int i = ndim - 1; i >= 0; --i) {
      if (shape[i] != 1 && stride[i] != expected) return false;
      expected *= shape[i];
    }
    return true;
  }
  // REQUIRES: T is as wide as dtype (callers dispatch on dtype first).
  template <typename T>
  T* ptr() const {
    return static_cast<T*>(data);
  }
  std::string ShapeString() const {
    std::string s = "[";
    for (int i = 0; i < ndim; ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
    return s + "]";
  }
};

// Describes a contiguous array that the caller owns.
inline TensorView MakeView(void* data, DType dtype, std::initializer_list<int64_t> shape,
                           Device device = Device::kCpu) {
  KV_ICHECK(shape.size() <= TensorView::kMaxDims) << shape.size() << " dims";
  TensorView v;
  v.data = data;
  v.dtype = dtype;
  v.device = device;
  v.ndim = static_cast<int>(shape.size());
  int i = 0;
  for (int64_t n : shape) v.shape[i++] = n;
  int64_t step = 1;
  for (i = v.ndim - 1; i >= 0; --i) {
    v.stride[i] = step;
    step *= v.shape[i];
  }
  return v;
}

}  // namespace kvcore
