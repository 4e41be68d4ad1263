// Pieces of one allocation, each at a multiple of kAlign bytes. Kernels include this: everything is
// inlined, no symbol is left.
#pragma once

#include <stdint.h>

namespace kvcore {

inline constexpr int64_t kAlign = 64;  // a cache line, the widest vector register

constexpr int64_t AlignUp(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// Hands out the pieces in order. With a null base it only measures: build the struct of pieces once
// from a null base to know its size, then once for each piece of memory.
class Carver {
 public:
  // REQUIRES: base is null or a multiple of kAlign.
  inline __attribute__((always_inline)) explicit Carver(void* base)
      : base_(static_cast<char*>(base)) {}
  // `count` numbers of T; null when measuring.
  template <typename T>
  inline __attribute__((always_inline)) T* Take(int64_t count) {
    char* const piece = base_ == nullptr ? nullptr : base_ + bytes_;
    bytes_ += AlignUp(count * static_cast<int64_t>(sizeof(T)));
    return reinterpret_cast<T*>(piece);
  }
  inline __attribute__((always_inline)) int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
};

}  // namespace kvcore
