// What attend.cc and the kernels compiled per instruction set agree on.
#pragma once

#include <stdint.h>

#include "cpu/isa.h"
#include "cpu/rkv_lane.h"

namespace kvcore {

// Query rows of one tile: row r is query head r % group of token r / group, in the order in which
// the sequence brings them.
inline constexpr int kAttendTileRows = 64;
// Rows that an observer may bring besides.
inline constexpr int kAttendExtraRows = 2;
// Floats between the query rows in scratch: fixed, so that one pointer and constant offsets reach
// all of them, and no multiple of a page, so that they share the cache's sets evenly.
inline constexpr int kAttendQueryStride = 256 + 16;
// A row's softmax is taken over each split of this many slots on its own; these are put together in
// order. Where splits begin depends on the slot alone, so results depend on nothing else.
inline constexpr int64_t kAttendSplit = 1024;
// Rows of a tile whose splits threads may share.
inline constexpr int kAttendSharedRows = 16;

// One tile: consecutive query rows that read one lane. Strides in elements; the innermost dimension
// of query and out is dense. Slots past the row's limit are never used, whatever they hold.
struct AttendTile {
  const void* key_blocks;     // T, block b at b * 16 * head_dim
  const void* value_blocks;   // T
  const int32_t* table;       // block ids of the lane
  const int32_t* next_table;  // block ids that the thread reads after this tile: a hint
  int64_t next_blocks;        // entries in use; 0 = none
  int64_t head_dim;
  const void* query;  // T, row r at (r / group) * query_token + (r % group) * query_head
  int64_t query_token, query_head;
  void* out;  // T
  int64_t out_token, out_head;
  float* lse;  // f32 or null
  int64_t lse_token, lse_head;
  int64_t group;      // query heads per kv head
  int64_t first_row;  // rows [first_row, first_row + num_rows) are computed
  int64_t num_rows;   // <= kAttendTileRows
  int64_t limit;      // token t sees slots [0, limit + t)
  float scale;
  float* scratch;    // AttendTileScratchFloats, 64-byte aligned
  int64_t* bad_row;  // out: the first row whose result is not finite; left alone if there is none

  // A lane of several splits may be shared by threads: one call for each of them leaves its part in
  // `partials`, then one with split = num_splits makes the result, with the same bits as one call
  // for all. Null: one call for all.
  float* partials;  // [num_splits][AttendPartialFloats]; REQUIRES: num_rows <= kAttendSharedRows
  int64_t split, num_splits;

  // What observers need. R-KV's tile is all rows of a single token.
  float* kept;  // [kRkvKeptRows or kAttendTileRows][kept_stride], 64-byte aligned
  int64_t kept_stride;
  float* stats;            // slot of block b, channel c at (b * stats_channels + c) * 16
  int64_t stats_channels;  // 1 or at least 3 * group
  const RkvLane* rkv;
  const void* replaced_key;  // T [head_dim]
  int32_t position;          // of the token
  int32_t* elected;          // in: the slot that holds it; out: the next one or why there is none
};
// Per slot: largest logit, products with the new and with the replaced key.
inline constexpr int kRkvKeptRows = 3;

// Accumulators (padded rows), a maximum and a sum per row.
constexpr int64_t AttendStateFloats(int64_t rows, int64_t head_dim) {
  return rows * (head_dim + 16) + 2 * rows;
}
constexpr int64_t AttendPartialFloats(int64_t head_dim) {
  return AttendStateFloats(kAttendSharedRows, head_dim);
}
// Queries (padded rows), scores of a row block, a rescaling factor per row, and the state of all
// splits so far and of one.
constexpr int64_t AttendTileScratchFloats(int64_t head_dim) {
  return (kAttendTileRows + kAttendExtraRows) * kAttendQueryStride +
         (8 + kAttendExtraRows + 1) * (128 + 16) + kAttendTileRows +
         2 * AttendStateFloats(kAttendTileRows, head_dim);
}

struct AttendKernelsOfTypes {
  void (*f32)(const AttendTile& tile);
  void (*bf16)(const AttendTile& tile);
  void (*f16)(const AttendTile& tile);
};
struct AttendKernels {
  AttendKernelsOfTypes plain, rkv, ring, stats;  // by observer; ring is R-KV's with mix = 1
  // y[i] = exp(x[i]) for x <= 80 as the softmax computes it: relative error below 2e-7, exactly 0
  // under -87. For tests. n is a multiple of 16.
  void (*exp)(const float* x, float* y, int64_t n);
};

KV_DECLARE_ISA_TABLE(AttendKernels, kAttendKernels)

}  // namespace kvcore
