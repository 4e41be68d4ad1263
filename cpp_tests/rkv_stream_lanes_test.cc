// The fused R-KV pass over lanes of several chunks, for groups of more than one row block, on odd
// numbers of threads: it equals direct recomputation in double, and its bits are those of one
// thread.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <tuple>

#include "support/isa_levels.h"
#include "support/rkv_stream.h"

namespace kvcore {
namespace {

struct LaneShape {
  int64_t slots, group, head_dim;
  int threads;
};
constexpr LaneShape kShapes[] = {
    {192, 12, 40, 3}, {192, 64, 16, 5}, {640, 9, 32, 5}, {640, 16, 64, 3}, {641, 12, 16, 5}};

class RkvStreamLanesTest : public testing::TestWithParam<std::tuple<Isa, DType, LaneShape>> {
 protected:
  RkvStreamLanesTest() : isa_(std::get<0>(GetParam())), threads_(NumThreads()) {}
  ~RkvStreamLanesTest() override { SetNumThreads(threads_); }

 private:
  WithIsa isa_;
  int threads_;
};

INSTANTIATE_TEST_SUITE_P(All, RkvStreamLanesTest,
                         testing::Combine(testing::ValuesIn(SupportedIsas()),
                                          testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                                          testing::ValuesIn(kShapes)),
                         [](const auto& info) {
                           const LaneShape& shape = std::get<2>(info.param);
                           return std::string(IsaName(std::get<0>(info.param))) + "_" +
                                  DTypeName(std::get<1>(info.param)) + "_" +
                                  std::to_string(shape.slots) + "slots_" +
                                  std::to_string(shape.group) + "heads_" +
                                  std::to_string(shape.threads) + "threads";
                         });

TEST_P(RkvStreamLanesTest, EqualsDirectRecomputationAndTheBitsOfOneThread) {
  const LaneShape& lane = std::get<2>(GetParam());
  RkvStreamShape shape;
  shape.dtype = std::get<1>(GetParam());
  shape.kv_heads = 3;
  shape.group = lane.group;
  shape.head_dim = lane.head_dim;
  shape.slots = lane.slots;
  RkvStream stream(shape, "rope", 7), alone(shape, "rope", 7);
  const auto feed = [&](int64_t count) {
    SetNumThreads(lane.threads);
    stream.Feed(count);
    SetNumThreads(1);
    alone.Feed(count);
  };
  feed(lane.slots - 10);
  for (int64_t t = 0; t < 60; ++t) {
    if (t == 40) stream.Fork();
    feed(t == 30 ? 5 : 1);  // a chunk on the way
    const TensorView a = stream.last_out().view(), b = alone.last_out().view();
    ASSERT_EQ(a.numel(), b.numel());
    ASSERT_EQ(std::memcmp(a.data, b.data, static_cast<size_t>(a.numel() * DTypeBytes(a.dtype))), 0)
        << "token " << t;
    if (stream.Len() < lane.slots) continue;
    for (int64_t h = 0; h < shape.kv_heads; ++h) {
      ASSERT_EQ(stream.Elected(h), alone.Elected(h)) << "token " << t << " head " << h;
      if (t % 16 == 11 && h == t / 16 % shape.kv_heads) {
        ASSERT_EQ(stream.Differs(h, 1e-6), "") << "token " << t << " head " << h;
      }
    }
  }
  stream.CheckIntegrity();
}

}  // namespace
}  // namespace kvcore
