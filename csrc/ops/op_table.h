// One table of operations per back end. Every function checks its Params against the view (Error)
// before it writes, takes zero-size batches, and allocates nothing on the device.
#pragma once

#include "base/stream.h"
#include "ops/append_kv.h"
#include "ops/attend.h"
#include "ops/build_rkv_state.h"
#include "ops/copy_blocks.h"
#include "ops/evict_slots.h"
#include "ops/linear.h"
#include "ops/sample_tokens.h"
#include "ops/score_keys.h"
#include "ops/score_random.h"
#include "ops/score_rkv.h"
#include "ops/score_tova.h"
#include "ops/select_slots.h"

namespace kvcore {

struct OpTable {
  void (*append_kv)(const KvCacheView&, const AppendKvParams&, Stream);
  void (*attend)(const KvCacheView&, const AttendParams&, Stream);
  void (*build_rkv_state)(const KvCacheView&, const BuildRkvStateParams&, Stream);
  void (*score_rkv)(const KvCacheView&, const ScoreRkvParams&, Stream);
  void (*score_keys)(const KvCacheView&, const ScoreKeysParams&, Stream);
  void (*score_tova)(const KvCacheView&, const ScoreTovaParams&, Stream);
  void (*score_random)(const KvCacheView&, const ScoreRandomParams&, Stream);
  void (*select_slots)(const KvCacheView&, const SelectSlotsParams&, Stream);
  void (*evict_slots)(const KvCacheView&, const EvictSlotsParams&, Stream);
  void (*copy_blocks)(const KvCacheView&, const CopyBlocksParams&, Stream);
  void (*linear)(const LinearParams&, Stream);
  void (*sample_tokens)(const SampleTokensParams&, Stream);
};

// Throws Error when the device's back end was not built.
const OpTable& GetOps(Device device);

}  // namespace kvcore
