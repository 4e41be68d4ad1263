#pragma once

#include "ops/batch.h"
#include "ops/kv_cache_view.h"

namespace kvcore {

// Writes the keys and values of new tokens of one layer into the newest slots of their lanes, and
// the tokens' positions into the position plane. Token i of sequence s goes to slot
// lane_len - count(s) + i and has position seq_len - count(s) + i. A single token goes to its
// lane's `replace` slot instead when there is one; lane_state then keeps the key that was there.
// With a query ring, also stores the last min(window, count) queries of each sequence.
// A key, value or stored query with a number that is not finite is stored as NaN throughout, so
// that nothing computed from it is finite; the token's position, and that of any such query given,
// enters not_finite.
struct AppendKvParams {
  TensorView key;    // T [tokens, kv_heads, head_dim], last dim dense, other strides free
  TensorView value;  // T [tokens, kv_heads, head_dim]
  TensorView query;  // T [tokens, q_heads, head_dim]; required exactly when the view has a ring
  RaggedBatch batch;
  int64_t layer = 0;
};

}  // namespace kvcore
