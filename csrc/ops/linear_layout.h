// How the weights of a linear layer are packed.
#pragma once

#include <cstdint>

namespace kvcore {

// Outputs lie in panels of this many: [panels, inputs, 16]. Missing outputs of the last are zero.
inline constexpr int64_t kLinearPanel = 16;

}  // namespace kvcore
