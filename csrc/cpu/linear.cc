// Linear layers over packed weights: panels of outputs are split over the threads, and every thread
// takes all rows through its panels, so that each weight is read from memory once.
#include "ops/linear.h"

#include <algorithm>

#include "base/parallel.h"
#include "base/tensor_match.h"
#include "cpu/cpu_ops.h"
#include "cpu/linear_kernels.h"

namespace kvcore {

void LinearCpu(const LinearParams& p, Stream) {
  Dims dims;
  MatchTensor({"rows", "inputs"}).DType(DType::kF32).InnerContiguous().Check(p.x, "x", &dims);
  MatchTensor({"panels", "inputs", "16"}).Contiguous().Check(p.weight, "weight", &dims);
  KV_CHECK(p.weight.dtype == DType::kF32 || p.weight.dtype == DType::kBF16)
      << "weight: expected dtype float32 or bfloat16, got " << DTypeName(p.weight.dtype);
  if (!p.bias.empty())
    MatchTensor({"panels", "16"}).DType(DType::kF32).Contiguous().Check(p.bias, "bias", &dims);
  MatchTensor({"rows", "outputs"})
      .DType(DType::kF32)
      .InnerContiguous()
      .Disjoint()
      .Check(p.out, "out", &dims);
  const int64_t rows = dims["rows"], inputs = dims["inputs"], outputs = dims["outputs"];
  const int64_t group = p.gated ? 2 : 1, panels = dims["panels"] / group;
  KV_CHECK(panels * group == dims["panels"])
      << "weight: expected an even number of panels (gated), got " << p.weight.ShapeString();
  KV_CHECK(outputs > (panels - 1) * kLinearPanel && outputs <= panels * kLinearPanel)
      << "out: expected outputs that fill " << panels << " panels of 16, got " << outputs;
  if (rows == 0 || outputs == 0) return;

  const LinearKernels& kernels = KV_ISA_TABLE(kLinearKernels);
  const int64_t panel_bytes = inputs * kLinearPanel * DTypeBytes(p.weight.dtype);
  const int threads = NumThreads();
  // Two panels at a time, which is what the kernel takes side by side: of a plain layer two panels
  // of outputs, of a gated one the gate and the up of one.
  const int64_t pairs = (dims["panels"] + 1) / 2, pair_outputs = 2 / group * kLinearPanel;
  const int64_t grain = std::max<int64_t>(1, pairs / (4 * threads));
  ParallelFor(pairs, grain, threads, [&](int64_t begin, int64_t end, int) {
    LinearRunArgs a;
    a.x = p.x.ptr<float>();
    a.weight = p.weight.ptr<char>() + 2 * begin * panel_bytes;
    a.bias = p.bias.empty() ? nullptr : p.bias.ptr<float>() + 2 * begin * kLinearPanel;
    a.out = p.out.ptr<float>() + begin * pair_outputs;
    a.rows = rows;
    a.inputs = inputs;
    a.panels = std::min(2 * end, dims["panels"]) - 2 * begin;
    a.columns = std::min(end * pair_outputs, outputs) - begin * pair_outputs;
    a.x_stride = p.x.stride[0];
    a.out_stride = p.out.stride[0];
    a.is_bf16 = p.weight.dtype == DType::kBF16;
    a.gated = p.gated;
    kernels.run(a);
  });
}

}  // namespace kvcore
