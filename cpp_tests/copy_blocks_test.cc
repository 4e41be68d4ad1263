#include "ops/copy_blocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "cpu/cpu_ops.h"
#include "support/lane_fixture.h"

namespace kvcore {
namespace {

void Copy(const LaneFixture& cache, const std::vector<int32_t>& src,
          const std::vector<int32_t>& dst) {
  const OwnedTensor s = OwnedTensor::I32(src), d = OwnedTensor::I32(dst);
  CopyBlocksCpu(cache.view(), {s.view(), d.view()}, 0);
}

std::vector<uint8_t> BlockBytes(const OwnedTensor& t, int64_t block) {
  const auto size = static_cast<int64_t>(t.bytes().size()) / t.view().shape[0];
  return {t.bytes().begin() + block * size, t.bytes().begin() + (block + 1) * size};
}

class CopyBlocks : public testing::TestWithParam<DType> {
 protected:
  LaneShape Shape() const {
    LaneShape s;
    s.dtype = GetParam();
    s.rows = 4;
    s.kv_heads = 3;
    s.head_dim = 40;
    s.window = 0;
    s.spare_blocks = 90;
    return s;
  }
};

TEST_P(CopyBlocks, DestinationsEqualSourcesAndNothingElseChanges) {
  LaneFixture cache(Shape(), std::vector<int32_t>(12, 50), 61);
  const LaneFixture before = cache;
  std::vector<int32_t> ids(static_cast<size_t>(cache.key_blocks.view().shape[0]));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(62));
  // One source may feed several destinations: a fork of many candidates.
  const std::vector<int32_t> dst(ids.begin(), ids.begin() + 60);
  std::vector<int32_t> src;
  for (size_t i = 0; i < dst.size(); ++i) src.push_back(ids[60 + i / 3]);
  Copy(cache, src, dst);
  std::vector<int64_t> source(ids.size());
  std::iota(source.begin(), source.end(), 0);
  for (size_t i = 0; i < dst.size(); ++i) source[static_cast<size_t>(dst[i])] = src[i];
  for (int64_t b = 0; b < static_cast<int64_t>(ids.size()); ++b) {
    const int64_t from = source[static_cast<size_t>(b)];
    EXPECT_EQ(BlockBytes(cache.key_blocks, b), BlockBytes(before.key_blocks, from)) << b;
    EXPECT_EQ(BlockBytes(cache.value_blocks, b), BlockBytes(before.value_blocks, from)) << b;
    EXPECT_EQ(BlockBytes(cache.position, b), BlockBytes(before.position, from)) << b;
  }
  EXPECT_TRUE(SameBytes(cache.block_table, before.block_table));
}

TEST_P(CopyBlocks, NothingToCopyIsLegal) {
  LaneFixture cache(Shape(), std::vector<int32_t>(12, 50), 63);
  const LaneFixture before = cache;
  Copy(cache, {}, {});
  EXPECT_TRUE(SameBytes(cache.key_blocks, before.key_blocks));
}

TEST_P(CopyBlocks, BadIdsAreNamedAndNothingChanges) {
  LaneFixture cache(Shape(), std::vector<int32_t>(12, 50), 64);
  const LaneFixture before = cache;
  const auto last = static_cast<int32_t>(cache.key_blocks.view().shape[0] - 1);
  const auto error = [&](const std::vector<int32_t>& src,
                         const std::vector<int32_t>& dst) -> std::string {
    try {
      Copy(cache, src, dst);
    } catch (const Error& e) {
      EXPECT_TRUE(SameBytes(cache.key_blocks, before.key_blocks));
      const std::string text = e.what();
      return text.substr(0, text.find(':'));
    }
    return "none";
  };
  EXPECT_EQ(error({0, last + 1}, {1, 2}), "src[1]");
  EXPECT_EQ(error({0, -1}, {1, 2}), "src[1]");
  EXPECT_EQ(error({0, 3}, {1, kUnusedTableEntry}), "dst[1]");
  EXPECT_EQ(error({0, 3}, {1, 1}), "dst[1]");
  EXPECT_EQ(error({0, 1}, {1, 2}), "src[1]");
  EXPECT_EQ(error({0, 1}, {2}), "dst");
}

INSTANTIATE_TEST_SUITE_P(Types, CopyBlocks,
                         testing::Values(DType::kF32, DType::kBF16, DType::kF16));

}  // namespace
}  // namespace kvcore
