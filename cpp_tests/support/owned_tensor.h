// A tensor with storage of its own.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <new>
#include <random>
#include <vector>

#include "base/align.h"
#include "base/tensor_view.h"

namespace kvcore {

// A tensor that owns its numbers, at a multiple of kAlign; contiguous unless strides are given.
// Copyable.
class OwnedTensor {
 public:
  template <typename T>
  struct Aligned {
    using value_type = T;
    Aligned() = default;
    template <typename U>
    Aligned(const Aligned<U>&) {}  // NOLINT(runtime/explicit): allocators convert
    T* allocate(size_t n) {
      return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(kAlign)));
    }
    void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(kAlign)); }
    bool operator==(const Aligned&) const = default;
  };
  using Bytes = std::vector<uint8_t, Aligned<uint8_t>>;

  OwnedTensor() = default;
  // Zeroes.
  OwnedTensor(DType dtype, std::initializer_list<int64_t> shape);
  // As above with explicit strides (elements); storage just holds the last element.
  OwnedTensor(DType dtype, std::initializer_list<int64_t> shape,
              std::initializer_list<int64_t> stride);
  static OwnedTensor I32(const std::vector<int32_t>& values);  // one dimension

  TensorView view() const;
  int64_t numel() const { return layout_.numel(); }
  double Get(std::initializer_list<int64_t> index) const;
  void Set(std::initializer_list<int64_t> index, double value);  // rounds to dtype
  double At(int64_t offset) const;                               // storage offset in elements
  void SetAt(int64_t offset, double value);
  void FillNormal(std::mt19937_64& rng, double scale = 1.0);
  void Fill(double value);  // every storage element, also those that no index reaches
  const Bytes& bytes() const { return bytes_; }

 private:
  int64_t Offset(std::initializer_list<int64_t> index) const;

  TensorView layout_;
  Bytes bytes_;
};

// Same storage, bit for bit.
bool SameBytes(const OwnedTensor& a, const OwnedTensor& b);

}  // namespace kvcore
