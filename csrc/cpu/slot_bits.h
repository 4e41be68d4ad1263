// Moving numbers of any type: only their width matters.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace kvcore {

// Calls f<T>() with the unsigned integer T as wide as the type's numbers.
template <typename F>
void WithBits(DType dtype, F&& f) {
  switch (DTypeBytes(dtype)) {
    case 1:
      return f.template operator()<uint8_t>();
    case 2:
      return f.template operator()<uint16_t>();
    case 4:
      return f.template operator()<uint32_t>();
    default:
      return f.template operator()<uint64_t>();
  }
}

}  // namespace kvcore
