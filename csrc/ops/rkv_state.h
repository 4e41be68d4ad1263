// What the fused R-KV pass keeps of a lane between tokens, so that no n x n matrix is needed.
//
// With u_r the key of slot r over (its norm + 1e-8) and S[r, j] = u_r . u_j (0 on the diagonal):
// p(r) is the newest slot j with S[r, j] > threshold, the oldest slot when there is none (r is then
// "alone"), and v_r = S[r, p(r)]. The redundancy of R-KV needs, per slot j,
//   n c_j = sum_r S[r, j] - sum over r with p(r) = j of v_r,
// and its importance needs the last `window` queries' weights. A new key changes all of them by its
// own products with the lane's keys, a dropped key by its. Source: exact; the definition is that of
// score_rkv. With mix = 1 only what importance needs is kept: position, weights, order.
#pragma once

#include <cstdint>

#include "base/align.h"

namespace kvcore {

// Offsets in bytes from the start of a lane's state; pieces are [capacity] unless noted.
struct RkvStateLayout {
  int64_t capacity;       // slots, a multiple of 64
  int64_t elected_rank;   // i32, one: place of the elected slot in `order`
  int64_t column;         // f64: n c_j
  int64_t weight_sum;     // f64 [window]: of a row of `weight`, over the slots that are no longer
                          // protected
  int64_t inverse_norm;   // f32; 0 past the lane's end
  int64_t pointer;        // i32: p(r); ~p(r) if r is alone
  int64_t pointer_value;  // f32: v_r
  int64_t position;       // i32; INT32_MAX past the lane's end
  int64_t weight;         // f32 [window][capacity]: exp(logit - a maximum), row = position % window
  int64_t order;          // i32: live slots by ascending position
  int64_t similar;       // bits [capacity][capacity]: row r marks slots older than r, similar to it
  int64_t replaced_key;  // T [head_dim]: the key that append_kv overwrote last
  int64_t bytes;

  constexpr RkvStateLayout(int64_t slots, int64_t window, int64_t head_dim)
      : capacity(AlignUp(slots)) {
    int64_t at = 0;
    const auto take = [&at](int64_t size) {
      const int64_t begin = at;
      at += AlignUp(size);
      return begin;
    };
    elected_rank = take(4);
    column = take(8 * capacity);
    weight_sum = take(8 * window);
    inverse_norm = take(4 * capacity);
    pointer = take(4 * capacity);
    pointer_value = take(4 * capacity);
    position = take(4 * capacity);
    weight = take(4 * window * capacity);
    order = take(4 * capacity);
    similar = take(capacity * capacity / 8);
    replaced_key = take(4 * head_dim);
    bytes = at;
  }
};

// How a policy reads the state; the same numbers in every call of a lane's life.
struct RkvSettings {
  int64_t protect = 128;   // newest slots, never elected; >= window
  int64_t kernel = 7;      // odd
  float mix = 0.1f;        // lambda in [0, 1]
  float threshold = 0.5f;  // in [0, 1]
};

}  // namespace kvcore
