#include "ops/copy_blocks.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/parallel.h"
#include "cpu/cpu_ops.h"

namespace kvcore {
namespace {

constexpr int64_t kMinRangeBytes = 128 * 1024;

// Starts the page walks and the first reads of the next block while this one is copied: blocks lie
// anywhere, so the hardware cannot guess them.
void Announce(char* plane, int64_t src, int64_t dst, int64_t block_bytes) {
  constexpr int64_t kLead = 1024, kLine = 64;
  for (int64_t b = 0; b < std::min(kLead, block_bytes); b += kLine)
    __builtin_prefetch(plane + src * block_bytes + b);
  __builtin_prefetch(plane + dst * block_bytes, 1);
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
  const int64_t block_bytes = BlockElements(view.head_dim) * DTypeBytes(view.dtype());
  const int64_t grain = std::max<int64_t>(1, kMinRangeBytes / block_bytes);
  ParallelFor(p.src.shape[0], grain, [&](int64_t begin, int64_t end, int) {
    char* const key = view.key_blocks.ptr<char>();
    char* const value = view.value_blocks.ptr<char>();
    int32_t* const position = view.position.ptr<int32_t>();
    float* const stats = view.attention_stats.ptr<float>();  // null without
    const int64_t block_stats = view.stats_channels() * kBlockSlots;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t src = p.src.ptr<int32_t>()[i], dst = p.dst.ptr<int32_t>()[i];
      if (i + 1 < end) {
        const int64_t next_src = p.src.ptr<int32_t>()[i + 1],
                      next_dst = p.dst.ptr<int32_t>()[i + 1];
        for (char* plane : {key, value}) Announce(plane, next_src, next_dst, block_bytes);
      }
      std::memcpy(key + dst * block_bytes, key + src * block_bytes,
                  static_cast<size_t>(block_bytes));
      std::memcpy(value + dst * block_bytes, value + src * block_bytes,
                  static_cast<size_t>(block_bytes));
      std::memcpy(position + dst * kBlockSlots, position + src * kBlockSlots,
                  kBlockSlots * sizeof(int32_t));
      if (stats != nullptr)
        std::memcpy(stats + dst * block_stats, stats + src * block_stats,
                    static_cast<size_t>(block_stats) * sizeof(float));
    }
  });
}

}  // namespace kvcore
