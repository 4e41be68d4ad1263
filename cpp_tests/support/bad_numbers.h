// Numbers that are not finite, as bits of each storage type: quiet and signalling NaNs whose
// payload lies high, low or everywhere, and both infinities.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "support/owned_tensor.h"

namespace kvcore {

// A NaN with a payload and an infinity are enough for sanitizers: which memory is read does not
// depend on the payload, and they take far longer.
inline std::vector<uint32_t> BadBits(DType dtype) {
#if defined(__SANITIZE_ADDRESS__)
  switch (dtype) {
    case DType::kBF16:
      return {0x7fc1, 0xff80};
    case DType::kF16:
      return {0x7e01, 0xfc00};
    default:
      return {0x7fc001ff, 0xff800000};
  }
#endif
  switch (dtype) {
    case DType::kBF16:
      return {0x7fc0, 0x7fc1, 0xffff, 0x7f81, 0x7fd5, 0x7f80, 0xff80};
    case DType::kF16:
      return {0x7e00, 0x7e01, 0xffff, 0x7c01, 0x7e55, 0x7c00, 0xfc00};
    default:
      return {0x7fc00000, 0x7fc00001, 0xffffffff, 0x7f800001,
              0x7fc00155, 0x7fc001ff, 0x7f800000, 0xff800000};
  }
}

// Writes bits over the number at a storage offset in elements.
inline void SetBits(const OwnedTensor& tensor, int64_t offset, uint32_t bits) {
  if (DTypeBytes(tensor.view().dtype) == 4)
    tensor.view().ptr<uint32_t>()[offset] = bits;
  else
    tensor.view().ptr<uint16_t>()[offset] = static_cast<uint16_t>(bits);
}

}  // namespace kvcore
