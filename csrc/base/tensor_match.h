// Checks the shape, type and layout of an operation's tensors, with named sizes shared between
// them.
//
//   Dims dims;
//   MatchTensor({"tokens", "q_heads", "head_dim"}).DType(kF32).InnerContiguous()
//       .Check(p.query, "query", &dims);
//   MatchTensor({"tokens", "q_heads", "head_dim"}).Check(p.out, "out", &dims);   // same sizes
//
// A name binds at its first use and must agree afterwards; a decimal name ("16") is a fixed size;
// "_" matches anything. Throws Error naming the tensor, the expectation and what came.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/tensor_view.h"

namespace kvcore {

class Dims {
 public:
  // Binds `name` or compares with its bound value; true if they agree.
  bool Bind(const std::string& name, int64_t size) {
    for (auto& [known, value] : sizes_)
      if (known == name) return value == size;
    sizes_.emplace_back(name, size);
    return true;
  }
  // REQUIRES: name is bound.
  int64_t operator[](const std::string& name) const {
    for (auto& [known, value] : sizes_)
      if (known == name) return value;
    throw InternalError("internal: unbound dimension " + name);
  }

 private:
  std::vector<std::pair<std::string, int64_t>> sizes_;
};

class MatchTensor {
 public:
  MatchTensor(std::initializer_list<const char*> dims) : dims_(dims.begin(), dims.end()) {}

  MatchTensor& DType(kvcore::DType t) {
    dtypes_ = {t};
    return *this;
  }
  // float32, bfloat16 or float16.
  MatchTensor& Floating() {
    dtypes_ = {kvcore::DType::kF32, kvcore::DType::kBF16, kvcore::DType::kF16};
    return *this;
  }
  MatchTensor& Contiguous() {
    contiguous_ = true;
    return *this;
  }
  // Only the last dimension must be dense; the others may have any stride.
  MatchTensor& InnerContiguous() {
    inner_ = true;
    return *this;
  }
  // No two elements share memory, as those of an expanded tensor do: for outputs with free strides.
  MatchTensor& Disjoint() {
    disjoint_ = true;
    return *this;
  }
  MatchTensor& On(Device device) {
    device_ = device;
    return *this;
  }

  void Check(const TensorView& t, const char* name, Dims* dims) const {
    KV_CHECK(t.ndim == static_cast<int>(dims_.size()))
        << name << ": expected " << Expected(*dims) << ", got " << t.ShapeString();
    KV_CHECK(t.data != nullptr || t.numel() == 0) << name << ": no data";
    KV_CHECK(t.device == device_) << name << ": on the wrong device";
    if (!dtypes_.empty()) {
      bool known = false;
      for (auto d : dtypes_) known |= d == t.dtype;
      KV_CHECK(known) << name << ": expected dtype " << DTypeList() << ", got "
                      << DTypeName(t.dtype);
    }
    for (int i = 0; i < t.ndim; ++i) {
      const std::string& dim = dims_[i];
      if (dim == "_") continue;
      const bool number = dim[0] >= '0' && dim[0] <= '9';
      const bool ok = number ? std::atoll(dim.c_str()) == t.shape[i] : dims->Bind(dim, t.shape[i]);
      KV_CHECK(ok) << name << ": expected " << Expected(*dims) << ", got " << t.ShapeString();
    }
    KV_CHECK(!contiguous_ || t.contiguous()) << name << ": expected a contiguous tensor";
    KV_CHECK(!inner_ || t.ndim == 0 || t.stride[t.ndim - 1] == 1 || t.shape[t.ndim - 1] <= 1)
        << name << ": expected a dense last dimension";
    KV_CHECK(!disjoint_ || IsDisjoint(t))
        << name << ": expected a tensor whose elements share no memory, got shape "
        << t.ShapeString() << " with strides " << StrideString(t);
  }

 private:
  // Every dimension steps over all that the dimensions with smaller steps reach.
  static bool IsDisjoint(const TensorView& t) {
    if (t.numel() == 0) return true;
    std::vector<std::pair<int64_t, int64_t>> steps;  // stride, size
    for (int i = 0; i < t.ndim; ++i)
      if (t.shape[i] > 1) steps.emplace_back(std::abs(t.stride[i]), t.shape[i]);
    std::sort(steps.begin(), steps.end());
    int64_t reach = 0;
    for (const auto& [stride, size] : steps) {
      if (stride <= reach) return false;
      reach += stride * (size - 1);
    }
    return true;
  }
  static std::string StrideString(const TensorView& t) {
    std::string s = "[";
    for (int i = 0; i < t.ndim; ++i) s += (i ? ", " : "") + std::to_string(t.stride[i]);
    return s + "]";
  }
  std::string Expected(const Dims& dims) const {
    std::string s = "[";
    for (size_t i = 0; i < dims_.size(); ++i) {
      s += (i ? ", " : "") + dims_[i];
      try {
        s.append("=").append(std::to_string(dims[dims_[i]]));
      } catch (const InternalError&) {  // not bound yet: the bare name says enough
      }
    }
    return s + "]";
  }
  std::string DTypeList() const {
    std::string s;
    for (auto d : dtypes_) s += (s.empty() ? "" : " or ") + std::string(DTypeName(d));
    return s;
  }

  std::vector<std::string> dims_;
  std::vector<kvcore::DType> dtypes_;
  bool contiguous_ = false, inner_ = false, disjoint_ = false;
  Device device_ = Device::kCpu;
};

}  // namespace kvcore
