#include "detect/step_text.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "detect/token_bytes.h"
#include "support/detect_oracle.h"

namespace kvcore {
namespace {

struct Case {
  std::vector<std::string> tokens;
  int64_t ends_in;   // index of the token that ends the step; -1: none
  int64_t step_end;  // byte offset
};

class StepEnd : public testing::TestWithParam<Case> {};

TEST_P(StepEnd, IsTheFirstEmptyLineAfterContent) {
  const Case& c = GetParam();
  StepText text;
  std::string all;
  for (size_t i = 0; i < c.tokens.size(); ++i) {
    EXPECT_EQ(text.Append(c.tokens[i]), int64_t(i) == c.ends_in) << i;
    all += c.tokens[i];
  }
  EXPECT_EQ(text.bytes(), all);  // the last token stays whole
  EXPECT_EQ(text.step_end(), c.step_end);
  EXPECT_EQ(detect_oracle::StepEnd(all), c.step_end);
}

INSTANTIATE_TEST_SUITE_P(
    Tokens, StepEnd,
    testing::Values(
        Case{{"So", " x", " =", " 2", "\n\n"}, 4, 10},          //
        Case{{"x", ".\n\n"}, 1, 4},                             //
        Case{{"(x", ")\n\n"}, 1, 5},                            //
        Case{{"x", "\n", "\n", "y"}, 2, 3},                     //
        Case{{"x", "\n\n\n"}, 1, 3},                            //
        Case{{"x", " \n", "\n \n"}, 2, 4},                      //
        Case{{"x\n", " \n"}, -1, -1},                           // a blank, but no empty line
        Case{{"x\n", "", "\n"}, 2, 3},                          // special token in between
        Case{{"\n\n", "x", "\n\n"}, 2, 5},                      // leading empty lines
        Case{{"\n", "\n", "\n", "x", "\n", "\n"}, 5, 6},        //
        Case{{"\n\n", " \t", "\n\n"}, -1, -1},                  // only white space
        Case{{"\n\nx\n\ny\n\n", "z\n\n"}, 0, 5},                // all in one token
        Case{{"\u3000\n\n", "x\n\n"}, 1, 8},                    // ideographic space
        Case{{"\xe3", "\x80", "\x80", "\n\n", "x\n\n"}, 4, 8},  // the same in three tokens
        Case{{"\xe3", "\n\n"}, 1, 3},                           // a stray byte is content
        Case{{"\xf0\x9f", "\x98\x80", "\n", "\n"}, 3, 6},       // an emoji in two tokens
        Case{{"x\r\n\r\n"}, -1, -1},                            //
        Case{{}, -1, -1}));

TEST(StepText, EqualsTheOracleHoweverTheTextIsCut) {
  const std::vector<std::string> atoms = {"\n",     "\n",     "\n\n",   " ",    "\t",  "x",
                                          "\u3000", "\u00a0", "\u2028", "\xe3", "\x80"};
  std::mt19937_64 rng(41);
  for (int round = 0; round < 20000; ++round) {
    std::string all;
    for (uint64_t i = 0, n = rng() % 12; i < n; ++i) all += atoms[rng() % atoms.size()];
    const int64_t end = detect_oracle::StepEnd(all);
    StepText text;
    for (size_t at = 0; at < all.size();) {
      const size_t length = rng() % 4;
      const bool ended = text.Append(std::string_view(all).substr(at, length));
      const int64_t before = int64_t(at);
      at = std::min(all.size(), at + length);
      ASSERT_EQ(ended, end > before && end <= int64_t(at)) << testing::PrintToString(all);
    }
    ASSERT_EQ(text.step_end(), end) << testing::PrintToString(all);
  }
}

TEST(StepText, AnySeparatorsEndAStepHoweverTheTextIsCut) {
  const std::vector<std::vector<std::string>> sets = {
      {"\n"}, {"ab"}, {"aa", "aaa"}, {"abc", "b", "\n\n"}, {" ", "x"}, {"\xe3\x80\x80"}, {}};
  const std::vector<std::string> atoms = {"a", "a", "b", "c", "x", " ", "\n", "\u3000"};
  std::mt19937_64 rng(43);
  for (int round = 0; round < 20000; ++round) {
    const std::vector<std::string>& separators = sets[rng() % sets.size()];
    std::string all;
    for (uint64_t i = 0, n = rng() % 12; i < n; ++i) all += atoms[rng() % atoms.size()];
    const int64_t end = detect_oracle::StepEnd(all, separators);
    StepText text(separators);
    for (size_t at = 0; at < all.size();) {
      const size_t length = rng() % 5;
      const bool ended = text.Append(std::string_view(all).substr(at, length));
      const int64_t before = int64_t(at);
      at = std::min(all.size(), at + length);
      ASSERT_EQ(ended, end > before && end <= int64_t(at)) << testing::PrintToString(all);
    }
    ASSERT_EQ(text.step_end(), end) << testing::PrintToString(all);
  }
}

TEST(StepText, SeparatorsThatStartATextDoNotEndIt) {
  StepText text({"Step"});
  EXPECT_FALSE(text.Append("Step"));
  EXPECT_FALSE(text.Append(" 1: x\n"));
  EXPECT_TRUE(text.Append("Step"));
  EXPECT_THROW(StepText({"x", ""}), Error);
}

TEST(TokenBytes, ReturnsTheBytesOfEveryId) {
  using namespace std::string_view_literals;
  const TokenBytes table({"a", "", "\n\n", "\xe6\x95", "\0b"sv});
  EXPECT_EQ(table.size(), 5);
  EXPECT_EQ(table[0], "a");
  EXPECT_EQ(table[1], "");
  EXPECT_EQ(table[2], "\n\n");
  EXPECT_EQ(table[3], "\xe6\x95");
  EXPECT_EQ(table[4], "\0b"sv);
}

TEST(TokenBytes, RefusesIdsOutOfRange) {
  const TokenBytes table({"a", "b"});
  EXPECT_THROW(table[2], Error);
  EXPECT_THROW(table[-1], Error);
  EXPECT_THROW(TokenBytes({})[0], Error);
}

}  // namespace
}  // namespace kvcore
