// Planes and row states: whatever their type and number of channels, they begin as declared, move
// with what they belong to and are copied with it.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "cpu/cpu_ops.h"
#include "store/kv_store.h"
#include "support/lane_fixture.h"

namespace kvcore {
namespace {

// Numbers of 1, 2, 4 and 8 bytes side by side.
const std::vector<PlaneShape> kPlanes = {{"wide", DType::kF32, 5},
                                         {"half", DType::kBF16, 1},
                                         {"byte", DType::kU8, 3},
                                         {"count", DType::kI32, 2},
                                         {"long", DType::kI64, 1}};

LaneShape Shape(DType dtype) {
  return {.dtype = dtype,
          .rows = 3,
          .layers = 2,
          .kv_heads = 2,
          .q_heads = 2,
          .head_dim = 24,
          .max_blocks = 6,
          .spare_blocks = 100,
          .planes = kPlanes};
}

class Planes : public testing::TestWithParam<DType> {};

// f(plane, channel) for every number of a slot.
template <typename F>
void ForEachNumber(F&& f) {
  for (size_t p = 0; p < kPlanes.size(); ++p)
    for (int64_t c = 0; c < kPlanes[p].channels; ++c) f(p, c);
}

TEST_P(Planes, AnAppendedSlotBeginsAsDeclaredAndNoOtherChanges) {
  LaneFixture cache(Shape(GetParam()), std::vector<int32_t>(12, 31), 1);
  cache.Extend(2, 3);  // slots 31 to 33: the last of a block and two of the next
  const LaneFixture before = cache;
  const OwnedTensor row = OwnedTensor::I32({2}), cu = OwnedTensor::I32({0, 3});
  const OwnedTensor key(GetParam(), {3, 2, 24});
  AppendKvParams p;
  p.key = p.value = key.view();
  p.batch = {row.view(), cu.view()};
  p.layer = 1;
  AppendKvCpu(cache.view(), p, 0);
  LaneFixture want = before;
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t slot = 31; slot < 34; ++slot)
      ForEachNumber([&](size_t plane, int64_t c) {
        want.planes[plane].Set({want.Block(2, 1, h, slot), c, slot % kBlockSlots},
                               static_cast<double>(c));
      });
  for (size_t plane = 0; plane < kPlanes.size(); ++plane)
    EXPECT_TRUE(SameBytes(cache.planes[plane], want.planes[plane])) << kPlanes[plane].name;
}

TEST_P(Planes, AnOverwrittenSlotBeginsAgain) {
  CacheTensors tensors({.dtype = GetParam(), .window = 0, .replaces = true, .planes = kPlanes});
  KvStore store(tensors.view());
  const SeqId seq = store.Create();
  store.Extend({seq}, {20});
  for (size_t plane = 0; plane < kPlanes.size(); ++plane) tensors.planes[plane].Fill(9);
  OwnedTensor slots(DType::kI32, {1, 2, 2});
  slots.Fill(17);
  store.Elect({seq}, slots.view());
  store.Extend({seq}, {1});
  const OwnedTensor row = OwnedTensor::I32({static_cast<int32_t>(store.Row(seq))});
  const OwnedTensor cu = OwnedTensor::I32({0, 1}), key(GetParam(), {1, 2, 8});
  AppendKvParams p;
  p.key = p.value = key.view();
  p.batch = {row.view(), cu.view()};
  AppendKvCpu(store.view(), p, 0);
  for (int64_t h = 0; h < 2; ++h) {
    const Lane lane(store.view(), store.Row(seq), 0, h);
    ForEachNumber([&](size_t plane, int64_t c) {
      EXPECT_EQ(tensors.planes[plane].Get({lane.Block(17), c, 1}), static_cast<double>(c));
      EXPECT_EQ(tensors.planes[plane].Get({lane.Block(16), c, 0}), 9);
    });
  }
}

TEST_P(Planes, EvictionMovesThemWithTheirSlot) {
  LaneFixture cache(Shape(GetParam()), std::vector<int32_t>(12, 40), 2);
  const LaneFixture before = cache;
  const OwnedTensor rows = OwnedTensor::I32({1});
  OwnedTensor drop(DType::kI32, {1, 2, 2, 3}), count(DType::kI32, {1, 2, 2});
  count.Fill(3);
  // Slot 37 takes the place of 3, 39 that of 20.
  for (int64_t lane = 0; lane < 4; ++lane)
    for (int64_t i = 0; i < 3; ++i) drop.SetAt(3 * lane + i, std::vector<int>{3, 20, 38}[i]);
  EvictSlotsCpu(cache.view(), {rows.view(), drop.view(), count.view()}, 0);
  for (int64_t row = 0; row < 3; ++row)
    for (int64_t lane = 0; lane < 4; ++lane)
      for (int64_t slot = 0; slot < 37; ++slot) {
        const int64_t from = row != 1 ? slot : slot == 3 ? 37 : slot == 20 ? 39 : slot;
        ForEachNumber([&](size_t plane, int64_t c) {
          EXPECT_EQ(cache.Number(row, lane / 2, lane % 2, slot, c, plane),
                    before.Number(row, lane / 2, lane % 2, from, c, plane))
              << kPlanes[plane].name << " slot " << slot;
        });
      }
}

TEST_P(Planes, CopiesOfBlocksCarryThem) {
  LaneFixture cache(Shape(GetParam()), std::vector<int32_t>(12, 48), 3);
  const LaneFixture before = cache;
  std::vector<int32_t> ids(static_cast<size_t>(cache.position.view().shape[0]));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(4));
  const OwnedTensor src = OwnedTensor::I32({ids[0], ids[0], ids[1]}),
                    dst = OwnedTensor::I32({ids[2], ids[3], ids[4]});
  CopyBlocksCpu(cache.view(), {src.view(), dst.view()}, 0);
  for (const int32_t block : ids) {
    const int32_t from = block == ids[2] || block == ids[3] ? ids[0]
                         : block == ids[4]                  ? ids[1]
                                                            : block;
    for (size_t plane = 0; plane < kPlanes.size(); ++plane) {
      const auto size = static_cast<int64_t>(before.planes[plane].bytes().size()) /
                        before.planes[plane].view().shape[0];
      EXPECT_EQ(0, std::memcmp(cache.planes[plane].bytes().data() + block * size,
                               before.planes[plane].bytes().data() + from * size, size))
          << kPlanes[plane].name << " block " << block;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Planes, testing::Values(DType::kF32, DType::kBF16));

// A fork that shares blocks would let one child write what the other reads.
TEST(PlanesOfForks, AreTheirOwn) {
  CacheTensors tensors({.window = 0, .planes = kPlanes});
  KvStore store(tensors.view());
  const SeqId parent = store.Create();
  store.Extend({parent}, {40});
  for (OwnedTensor& plane : tensors.planes) plane.Fill(7);
  EXPECT_EQ(store.BlocksToFork(parent, 1, false), 12);
  const SeqId child = store.Fork(parent, 1, false)[0];
  for (int64_t l = 0; l < 4; ++l)
    for (int64_t slot = 0; slot < 40; slot += kBlockSlots) {
      const int64_t mine = Lane(store.view(), store.Row(parent) * 4 + l).Block(slot);
      const int64_t its = Lane(store.view(), store.Row(child) * 4 + l).Block(slot);
      EXPECT_NE(mine, its);
      ForEachNumber(
          [&](size_t plane, int64_t c) { EXPECT_EQ(tensors.planes[plane].Get({its, c, 5}), 7); });
    }
  store.CheckIntegrity();
}

TEST(RowStates, AreCopiedByForksAndBeginAnewWithTheirRow) {
  CacheTensors tensors({.window = 0});
  KvCacheView view = tensors.view();
  OwnedTensor bytes(DType::kU8, {4, 3}), floats(DType::kBF16, {4, 2, 2}), loose(DType::kI32, {4});
  OwnedTensor zero(DType::kU8, {1}), half(DType::kBF16, {1});
  zero.Fill(5);
  half.Fill(0.5);
  bytes.Fill(99);
  view.row_states.Set("bytes", bytes.view(), zero.view());
  view.row_states.Set("floats", floats.view(), half.view());
  view.row_states.Set("loose", loose.view());  // left as it is
  KvStore store(view);
  const SeqId a = store.Create();
  const int64_t row = store.Row(a);
  EXPECT_EQ(bytes.Get({row, 2}), 5);
  EXPECT_EQ(floats.Get({row, 1, 1}), 0.5);
  bytes.Set({row, 1}, 8);
  floats.Set({row, 1, 0}, 3);
  loose.Set({row}, 6);
  const SeqId b = store.Fork(a, 1, false)[0];
  EXPECT_EQ(bytes.Get({store.Row(b), 1}), 8);
  EXPECT_EQ(floats.Get({store.Row(b), 1, 0}), 3);
  EXPECT_EQ(loose.Get({store.Row(b)}), 6);
  store.Release(a);
  for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(bytes.Get({row, i}), 5);
  EXPECT_EQ(floats.Get({row, 1, 0}), 0.5);
  EXPECT_EQ(loose.Get({row}), 6);
  store.CheckIntegrity();
  bytes.Set({row, 0}, 1);  // somebody writes to a free row
  EXPECT_THROW(store.CheckIntegrity(), InternalError);
  store.Create();
  EXPECT_EQ(bytes.Get({row, 0}), 5);
}

std::string ErrorOf(const KvCacheView& view) {
  try {
    view.Check();
  } catch (const Error& e) {
    return e.what();
  }
  return "none";
}

TEST(SideTensors, WhatDoesNotFitIsRefusedByName) {
  const CacheTensors tensors({.blocks = 64, .planes = {{"good", DType::kF32, 2}}});
  const OwnedTensor plane(DType::kF32, {64, 2, 16}), few(DType::kF32, {63, 2, 16}),
      start(DType::kF32, {2}), start3(DType::kF32, {3}), bytes(DType::kU8, {2}),
      rows(DType::kI32, {3, 2}), row(DType::kI32, {4}), two(DType::kI32, {2});
  const auto with = [&](const TensorView& tensor, const TensorView& begin) {
    KvCacheView view = tensors.view();
    view.planes.Set("mine", tensor, begin);
    return ErrorOf(view);
  };
  EXPECT_EQ(with(plane.view(), start.view()), "none");
  EXPECT_EQ(with(few.view(), start.view()).find("mine: expected [blocks=64"), 0u);
  EXPECT_EQ(with(plane.view(), start3.view()).find("mine start: expected [channels=2]"), 0u);
  EXPECT_EQ(with(plane.view(), bytes.view()).find("mine start: expected dtype float32"), 0u);
  EXPECT_EQ(with(plane.view(), {}).find("mine start: "), 0u);
  const auto with_row = [&](const TensorView& tensor, const TensorView& begin) {
    KvCacheView view = tensors.view();
    view.row_states.Set("ours", tensor, begin);
    return ErrorOf(view);
  };
  EXPECT_EQ(with_row(rows.view(), {}).find("ours: expected contiguous [4 rows"), 0u);
  EXPECT_EQ(with_row(row.view(), two.view()).find("ours: expected one number of dtype int32"), 0u);
  KvCacheView view = tensors.view();
  EXPECT_THROW(view.planes.Set("good", plane.view(), start.view()), Error);
  EXPECT_THROW(view.planes.Set("", plane.view(), start.view()), Error);
  EXPECT_THROW(view.planes.Set(std::string(32, 'x'), plane.view(), start.view()), Error);
  for (int i = 1; i < SideTensors::kMax; ++i)
    view.planes.Set("p" + std::to_string(i), plane.view(), start.view());
  EXPECT_THROW(view.planes.Set("one more", plane.view(), start.view()), Error);
  EXPECT_EQ(view.plane<float>("good").channels, 2);
  EXPECT_EQ(view.plane<float>("none").data, nullptr);
  EXPECT_THROW(view.plane<int32_t>("good"), Error);
}

}  // namespace
}  // namespace kvcore
