// Drop lists equal a full sort by (score, position), ties and infinities included.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "cpu/cpu_ops.h"
#include "support/lane_fixture.h"
#include "support/select_oracle.h"

namespace kvcore {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int32_t kUntouched = -77;

// Two rows of the cache in reversed order, every lane of its own length.
class SelectSlotsTest : public testing::Test {
 protected:
  static constexpr int64_t kLayers = 2, kHeads = 3, kSlots = 90;

  SelectSlotsTest()
      : cache_(Shape(), {0, 1, 15, 16, 17, 80, 33, 2, 5, 64, 9, 31, 3, 3, 3, 3, 3, 3}, 11),
        rows_(OwnedTensor::I32({2, 0})),
        score_(DType::kF32, {2, kLayers, kHeads, kSlots}),
        keep_(DType::kI32, {2, kLayers, kHeads}),
        drop_(DType::kI32, {2, kLayers, kHeads, 80}),
        drop_count_(keep_) {
    score_.Fill(std::nan(""));  // past the live slots nothing may be read
    keep_.Fill(100);
    drop_.Fill(kUntouched);
    drop_count_.Fill(kUntouched);
  }

  static LaneShape Shape() {
    LaneShape s;
    s.rows = 3;
    s.layers = kLayers;
    s.kv_heads = kHeads;
    s.q_heads = kHeads;
    s.head_dim = 8;
    return s;
  }

  int64_t Row(int64_t i) const { return static_cast<int64_t>(rows_.Get({i})); }

  template <typename Fn>
  void SetScores(Fn&& f) {
    ForLanes([&](int64_t i, int64_t layer, int64_t head, int64_t len) {
      for (int64_t slot = 0; slot < len; ++slot) score_.Set({i, layer, head, slot}, f(slot));
    });
  }

  template <typename Fn>
  void ForLanes(Fn&& f) {
    for (int64_t i = 0; i < rows_.numel(); ++i)
      for (int64_t layer = 0; layer < kLayers; ++layer)
        for (int64_t head = 0; head < kHeads; ++head)
          f(i, layer, head, cache_.Len(Row(i), layer, head));
  }

  void Run() {
    SelectSlotsParams p;
    p.rows = rows_.view();
    p.score = score_.view();
    p.keep = keep_.view();
    p.drop = drop_.view();
    p.drop_count = drop_count_.view();
    SelectSlotsCpu(cache_.view(), p, 0);
  }

  void ExpectOracle() {
    ForLanes([&](int64_t i, int64_t layer, int64_t head, int64_t len) {
      std::vector<double> score;
      std::vector<int64_t> position;
      for (int64_t slot = 0; slot < len; ++slot) {
        score.push_back(score_.Get({i, layer, head, slot}));
        position.push_back(cache_.Position(Row(i), layer, head, slot));
      }
      const auto want =
          SelectOracle(score, position, static_cast<int64_t>(keep_.Get({i, layer, head})));
      ASSERT_EQ(drop_count_.Get({i, layer, head}), static_cast<double>(want.size()));
      for (size_t d = 0; d < want.size(); ++d)
        ASSERT_EQ(drop_.Get({i, layer, head, static_cast<int64_t>(d)}),
                  static_cast<double>(want[d]))
            << "row " << Row(i) << " layer " << layer << " head " << head;
      for (int64_t d = static_cast<int64_t>(want.size()); d < 80; ++d)
        ASSERT_EQ(drop_.Get({i, layer, head, d}), kUntouched);
    });
  }

  std::string ErrorOf() {
    const OwnedTensor drop = drop_, count = drop_count_;
    try {
      Run();
    } catch (const Error& e) {
      EXPECT_TRUE(SameBytes(drop, drop_) && SameBytes(count, drop_count_)) << "changed something";
      return e.what();
    }
    return "no error";
  }

  LaneFixture cache_;
  OwnedTensor rows_, score_, keep_, drop_, drop_count_;
};

TEST_F(SelectSlotsTest, DropsTheLowestScoresForEveryKeep) {
  std::mt19937_64 rng(1);
  std::normal_distribution<double> normal;
  for (int keep : {0, 1, 2, 3, 8, 15, 16, 17, 63, 64, 79, 80, 81}) {
    SetScores([&](int64_t) { return normal(rng); });
    keep_.Fill(keep);
    drop_.Fill(kUntouched);
    Run();
    ExpectOracle();
  }
}

TEST_F(SelectSlotsTest, KeepMayDifferPerLane) {
  std::mt19937_64 rng(2);
  SetScores([&](int64_t) { return static_cast<double>(rng() % 1000); });
  ForLanes([&](int64_t i, int64_t layer, int64_t head, int64_t) {
    keep_.Set({i, layer, head}, static_cast<double>(rng() % 20));
  });
  Run();
  ExpectOracle();
}

TEST_F(SelectSlotsTest, EqualScoresDropTheOlderPosition) {
  std::mt19937_64 rng(3);
  for (int distinct : {1, 2, 5}) {
    SetScores([&](int64_t) { return static_cast<double>(rng() % distinct) - 1; });
    keep_.Fill(7);
    drop_.Fill(kUntouched);
    Run();
    ExpectOracle();
  }
}

TEST_F(SelectSlotsTest, NegativeAndPositiveZeroAreEqual) {
  SetScores([](int64_t slot) { return slot % 2 == 0 ? 0.0 : -0.0; });
  keep_.Fill(4);
  Run();
  ExpectOracle();
}

TEST_F(SelectSlotsTest, InfinitiesAreScoresLikeOthers) {
  SetScores([](int64_t slot) { return slot % 3 == 0 ? kInf : slot % 3 == 1 ? -kInf : -1e30; });
  for (int keep : {2, 10, 40}) {
    keep_.Fill(keep);
    drop_.Fill(kUntouched);
    Run();
    ExpectOracle();
  }
}

TEST_F(SelectSlotsTest, NanIsAnErrorThatNamesTheLane) {
  SetScores([](int64_t) { return 1.0; });
  score_.Set({1, 1, 0, 32}, std::nan(""));  // row 0, layer 1, head 0 has 16 slots: not live
  Run();
  score_.Set({1, 1, 0, 15}, std::nan(""));
  EXPECT_NE(ErrorOf().find("row 0, layer 1, kv head 0"), std::string::npos) << ErrorOf();
}

TEST_F(SelectSlotsTest, RefusesWhatDoesNotFit) {
  SetScores([](int64_t) { return 1.0; });
  keep_.Set({1, 0, 1}, -1);
  EXPECT_NE(ErrorOf().find("keep: expected >= 0, got -1"), std::string::npos) << ErrorOf();
  keep_.Fill(0);
  drop_ = OwnedTensor(DType::kI32, {2, kLayers, kHeads, 79});
  EXPECT_NE(ErrorOf().find("drop: expected room for 80"), std::string::npos) << ErrorOf();
  keep_.Fill(1);
  Run();
  rows_ = OwnedTensor::I32({3, 0});
  EXPECT_NE(ErrorOf().find("rows[0]"), std::string::npos) << ErrorOf();
  rows_ = OwnedTensor::I32({-1, 0});
  EXPECT_NE(ErrorOf().find("rows[0]"), std::string::npos) << ErrorOf();
}

TEST_F(SelectSlotsTest, AcceptsNoRows) {
  rows_ = OwnedTensor::I32({});
  score_ = OwnedTensor(DType::kF32, {0, kLayers, kHeads, 0});
  keep_ = OwnedTensor(DType::kI32, {0, kLayers, kHeads});
  drop_ = OwnedTensor(DType::kI32, {0, kLayers, kHeads, 0});
  drop_count_ = keep_;
  Run();
}

}  // namespace
}  // namespace kvcore
