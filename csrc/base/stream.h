// A CUDA stream handle as an integer, so that nothing here needs CUDA headers. 0 on CPU.
#pragma once

#include <cstdint>

namespace kvcore {
using Stream = int64_t;
}
