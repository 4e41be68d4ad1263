// The CPU back end's operations. Contracts: ops/<op>.h. The stream is ignored: every call has
// finished when it returns.
#pragma once

#include "base/stream.h"
#include "ops/op_table.h"
#include "ops/score_random.h"

namespace kvcore {

void AppendKvCpu(const KvCacheView& view, const AppendKvParams& p, Stream stream);
void AttendCpu(const KvCacheView& view, const AttendParams& p, Stream stream);
void BuildRkvStateCpu(const KvCacheView& view, const BuildRkvStateParams& p, Stream stream);
void ScoreRkvCpu(const KvCacheView& view, const ScoreRkvParams& p, Stream stream);
void ScoreKeysCpu(const KvCacheView& view, const ScoreKeysParams& p, Stream stream);
void ScoreTovaCpu(const KvCacheView& view, const ScoreTovaParams& p, Stream stream);
void ScoreRandomCpu(const KvCacheView& view, const ScoreRandomParams& p, Stream stream);
void SelectSlotsCpu(const KvCacheView& view, const SelectSlotsParams& p, Stream stream);
void EvictSlotsCpu(const KvCacheView& view, const EvictSlotsParams& p, Stream stream);
void CopyBlocksCpu(const KvCacheView& view, const CopyBlocksParams& p, Stream stream);
void LinearCpu(const LinearParams& p, Stream stream);
void SampleTokensCpu(const SampleTokensParams& p, Stream stream);

}  // namespace kvcore
