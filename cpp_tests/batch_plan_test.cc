#include "store/batch_plan.h"

#include <gtest/gtest.h>

#include "support/store_model.h"

namespace kvcore {
namespace {

struct Plan {
  OwnedTensor rows, cu_tokens, positions;
  Plan(int64_t num_seqs, int64_t num_tokens)
      : rows(DType::kI32, {num_seqs}),
        cu_tokens(DType::kI32, {num_seqs + 1}),
        positions(DType::kI64, {num_tokens}) {
    for (OwnedTensor* t : {&rows, &cu_tokens, &positions}) t->Fill(-7);
  }
  void Fill(const KvStore& store, const std::vector<SeqId>& seqs,
            const std::vector<int64_t>& counts) {
    FillBatch(store, seqs, counts, rows.view(), cu_tokens.view(), positions.view());
  }
};

std::vector<int64_t> Values(const OwnedTensor& t) {
  std::vector<int64_t> values;
  for (int64_t i = 0; i < t.numel(); ++i) values.push_back(static_cast<int64_t>(t.At(i)));
  return values;
}

// Three sequences of 5, 0 and 20 tokens in rows 0, 1, 2.
class FillBatchTest : public ::testing::Test {
 protected:
  FillBatchTest() : m({}) {
    for (int i = 0; i < 3; ++i) seqs.push_back(m.Create());
    m.Append({seqs[0], seqs[2]}, {5, 20});
  }
  ModelledStore m;
  std::vector<SeqId> seqs;
};

TEST_F(FillBatchTest, NamesTheNewestTokensOfEachSequence) {
  m.store.Extend({seqs[2], seqs[1], seqs[0]}, {3, 0, 1});
  Plan plan(3, 4);
  plan.Fill(m.store, {seqs[2], seqs[1], seqs[0]}, {3, 0, 1});
  EXPECT_EQ(Values(plan.rows), (std::vector<int64_t>{2, 1, 0}));
  EXPECT_EQ(Values(plan.cu_tokens), (std::vector<int64_t>{0, 3, 3, 4}));
  EXPECT_EQ(Values(plan.positions), (std::vector<int64_t>{20, 21, 22, 5}));
}

TEST_F(FillBatchTest, PositionsCountTokensAndNotSlots) {
  m.Evict({seqs[2]}, {{{0, 3}, {1}, {}, {2, 19}}});
  m.store.Extend({seqs[2]}, {2});
  Plan plan(1, 2);
  plan.Fill(m.store, {seqs[2]}, {2});
  EXPECT_EQ(Values(plan.positions), (std::vector<int64_t>{20, 21}));
}

TEST_F(FillBatchTest, RowsFollowAdoption) {
  const SeqId child = m.Fork(seqs[0], 1, false)[0];
  m.Adopt(seqs[0], child);
  Plan plan(1, 0);
  plan.Fill(m.store, {seqs[0]}, {0});
  EXPECT_EQ(Values(plan.rows), (std::vector<int64_t>{3}));
}

TEST_F(FillBatchTest, AnEmptyBatchIsLegal) {
  Plan plan(0, 0);
  plan.Fill(m.store, {}, {});
  EXPECT_EQ(Values(plan.cu_tokens), (std::vector<int64_t>{0}));
}

TEST_F(FillBatchTest, BadInputIsRefusedBeforeAnythingIsWritten) {
  Plan plan(2, 3);
  const auto refuses = [&](const std::vector<SeqId>& ids, const std::vector<int64_t>& counts) {
    EXPECT_THROW(plan.Fill(m.store, ids, counts), Error);
  };
  refuses({seqs[0]}, {3});                    // sizes of rows and cu_tokens
  refuses({seqs[0], seqs[2]}, {3, 1});        // size of positions
  refuses({seqs[0], seqs[2]}, {3});           // counts
  refuses({seqs[0], seqs[0]}, {2, 1});        // twice
  refuses({seqs[0], seqs[2]}, {4, -1});       // negative
  refuses({seqs[0], seqs[1]}, {2, 1});        // more than it has
  refuses({seqs[0], seqs[2] + 100}, {2, 1});  // stale
  EXPECT_THROW(FillBatch(m.store, {seqs[0], seqs[2]}, {2, 1}, plan.rows.view(),
                         plan.cu_tokens.view(), OwnedTensor(DType::kI32, {3}).view()),
               Error);
  for (const OwnedTensor* t : {&plan.rows, &plan.cu_tokens, &plan.positions}) {
    for (const int64_t value : Values(*t)) EXPECT_EQ(value, -7);
  }
}

}  // namespace
}  // namespace kvcore
