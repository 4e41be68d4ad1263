#include "cpu/isa.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "base/check.h"

namespace kvcore {
namespace {

constexpr Isa kLevels[] = {Isa::kBase, Isa::kV3, Isa::kV4, Isa::kV4Bf16};

TEST(IsaLevel, BaseRunsEverywhere) { EXPECT_TRUE(IsaSupported(Isa::kBase)); }

#if KVCORE_X86_LEVELS > 0 && !defined(__clang__)
// GCC knows the levels by name. Whatever runs here was compiled, under sanitizers too.
TEST(IsaLevel, LevelRunsWhereItsInstructionSetDoes) {
  const bool v4 = __builtin_cpu_supports("x86-64-v4");
  EXPECT_EQ(IsaSupported(Isa::kV3), __builtin_cpu_supports("x86-64-v3") != 0);
  EXPECT_EQ(IsaSupported(Isa::kV4), v4);
  EXPECT_EQ(IsaSupported(Isa::kV4Bf16), v4 && __builtin_cpu_supports("avx512bf16"));
}
#endif

TEST(IsaLevel, EveryLevelThatRunsCanBeSet) {
  const Isa before = ActiveIsa();
  for (Isa isa : kLevels)
    if (IsaSupported(isa)) {
      SetIsa(isa);
      EXPECT_EQ(ActiveIsa(), isa);
    }
  SetIsa(before);
}

TEST(IsaLevel, LevelThatDoesNotRunIsRefusedAndChangesNothing) {
  const Isa before = ActiveIsa();
  for (Isa isa : kLevels)
    if (!IsaSupported(isa)) {
      EXPECT_THROW(SetIsa(isa), Error);
    }
  EXPECT_EQ(ActiveIsa(), before);
}

TEST(IsaLevel, ChosenLevelRuns) { EXPECT_TRUE(IsaSupported(ActiveIsa())); }

// A process of its own, because the level is chosen once. Prints the level or the error.
[[noreturn]] void PrintChoice(const char* wanted) {
  setenv("KVCORE_ISA", wanted, 1);
  try {
    std::fprintf(stderr, "level %s\n", IsaName(ActiveIsa()));
  } catch (const Error& e) {
    std::fprintf(stderr, "error %s\n", e.what());
  }
  std::_Exit(0);
}

TEST(IsaDeathTest, EnvironmentNamesTheLevel) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(PrintChoice("base"), testing::ExitedWithCode(0), "level base");
  if (IsaSupported(Isa::kV3)) {
    EXPECT_EXIT(PrintChoice("v3"), testing::ExitedWithCode(0), "level v3");
  }
}

TEST(IsaDeathTest, UnknownNameIsAnErrorThatNamesTheVariable) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(PrintChoice("v5"), testing::ExitedWithCode(0), "error KVCORE_ISA: .*'v5'");
}

}  // namespace
}  // namespace kvcore
