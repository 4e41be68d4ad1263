// The CUDA back end of a build that has none.
#include "base/check.h"
#include "ops/op_table.h"

namespace kvcore {

const OpTable& GetCudaOps() {
  throw Error("device: this build has no CUDA kernels; use device='cpu'");
}

}  // namespace kvcore
