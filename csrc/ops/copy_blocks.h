#pragma once

#include "ops/kv_cache_view.h"

namespace kvcore {

// Copies whole blocks, keys, values and planes: block dst[i] becomes equal to block src[i].
// REQUIRES: no id occurs twice in dst, none in both.
struct CopyBlocksParams {
  TensorView src;  // i32 [count]
  TensorView dst;  // i32 [count]
};

}  // namespace kvcore
