#include "ops/copy_blocks.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/parallel.h"
#include "cpu/cpu_ops.h"

namespace kvcore {
namespace {

constexpr int64_t kMinRangeBytes = 128 * 1024;

// One piece of every block of one tensor.
struct Pieces {
  char* data;
  int64_t bytes;
};

// Starts the page walks and the first reads of the next block while this one is copied: blocks lie
// anywhere, so the hardware cannot guess them.
void Announce(const Pieces& p, int64_t src, int64_t dst) {
  constexpr int64_t kLead = 1024, kLine = 64;
  for (int64_t b = 0; b < std::min(kLead, p.bytes); b += kLine)
    __builtin_prefetch(p.data + src * p.bytes + b);
  __builtin_prefetch(p.data + dst * p.bytes, 1);
}

void CheckParams(const KvCacheView& view, const CopyBlocksParams& p) {
  view.Check();
  Dims dims;
  MatchTensor({"count"}).DType(DType::kI32).Contiguous().Check(p.src, "src", &dims);
  MatchTensor({"count"}).DType(DType::kI32).Contiguous().Check(p.dst, "dst", &dims);
  const int64_t count = p.src.shape[0], blocks = view.num_blocks();
  std::vector<bool> written(static_cast<size_t>(blocks));
  for (int64_t i = 0; i < count; ++i) {
    const int32_t src = p.src.ptr<int32_t>()[i], dst = p.dst.ptr<int32_t>()[i];
    KV_CHECK(src >= 0 && src < blocks)
        << "src[" << i << "]: expected a block in [0, " << blocks << "), got " << src;
    KV_CHECK(dst >= 0 && dst < blocks)
        << "dst[" << i << "]: expected a block in [0, " << blocks << "), got " << dst;
    KV_CHECK(!written[static_cast<size_t>(dst)])
        << "dst[" << i << "]: block " << dst << " appears twice";
    written[static_cast<size_t>(dst)] = true;
  }
  for (int64_t i = 0; i < count; ++i)
    KV_CHECK(!written[static_cast<size_t>(p.src.ptr<int32_t>()[i])])
        << "src[" << i << "]: block " << p.src.ptr<int32_t>()[i] << " is also in dst";
}

}  // namespace

void CopyBlocksCpu(const KvCacheView& view, const CopyBlocksParams& p, Stream) {
  CheckParams(view, p);
  // What a block holds: keys and values, which are large, then positions and planes.
  constexpr int kLarge = 2;
  std::array<Pieces, kLarge + 1 + SideTensors::kMax> pieces;
  int count = 0;
  for (const TensorView* t : {&view.key_blocks, &view.value_blocks, &view.position})
    pieces[count++] = {t->ptr<char>(), t->stride[0] * DTypeBytes(t->dtype)};
  for (const SideTensor& plane : view.planes)
    if (!plane.empty())
      pieces[count++] = {plane.tensor.ptr<char>(),
                         plane.tensor.stride[0] * DTypeBytes(plane.tensor.dtype)};
  const int64_t grain = std::max<int64_t>(1, kMinRangeBytes / pieces[0].bytes);
  ParallelFor(p.src.shape[0], grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t src = p.src.ptr<int32_t>()[i], dst = p.dst.ptr<int32_t>()[i];
      if (i + 1 < end)
        for (int j = 0; j < kLarge; ++j)
          Announce(pieces[j], p.src.ptr<int32_t>()[i + 1], p.dst.ptr<int32_t>()[i + 1]);
      for (int j = 0; j < count; ++j)
        std::memcpy(pieces[j].data + dst * pieces[j].bytes, pieces[j].data + src * pieces[j].bytes,
                    static_cast<size_t>(pieces[j].bytes));
    }
  });
}

}  // namespace kvcore
