#include "ops/op_table.h"

#include "cpu/cpu_ops.h"

namespace kvcore {

const OpTable& GetCudaOps();  // cuda/op_table.cu, or cuda/no_cuda.cc in a CPU build

const OpTable& GetOps(Device device) {
  static constexpr OpTable kCpuOps = {
      .append_kv = AppendKvCpu,
      .attend = AttendCpu,
      .build_rkv_state = BuildRkvStateCpu,
      .score_rkv = ScoreRkvCpu,
      .score_keys = ScoreKeysCpu,
      .score_tova = ScoreTovaCpu,
      .score_random = ScoreRandomCpu,
      .select_slots = SelectSlotsCpu,
      .evict_slots = EvictSlotsCpu,
      .copy_blocks = CopyBlocksCpu,
      .linear = LinearCpu,
      .sample_tokens = SampleTokensCpu,
  };
  return device == Device::kCuda ? GetCudaOps() : kCpuOps;
}

}  // namespace kvcore
