// What the row state `replace` says of a lane besides a slot. Negative: its next token is appended.
#pragma once

#include <stdint.h>

namespace kvcore {

inline constexpr int32_t kNoReplace = -1;  // nothing is elected; a kept state has to be built anew
inline constexpr int32_t kNotFinite = -2;  // nothing can be: keys or queries are not finite

}  // namespace kvcore
