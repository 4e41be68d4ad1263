#include "cpu/isa.h"

#include <cstdlib>
#include <string>

#include "base/check.h"

#if KVCORE_X86_LEVELS > 0
#include <cpuid.h>
#endif

namespace kvcore {
namespace {

#if KVCORE_X86_LEVELS > 0
// All that code compiled for x86-64-v3 may use. Not every compiler that builds kvcore knows that
// name here, nor those of the three features that are looked up. With AVX2 the system saves the
// wide registers.
bool RunsV3() {
  unsigned eax, ebx, leaf1, leaf_ext, edx;
  if (!__get_cpuid(1, &eax, &ebx, &leaf1, &edx)) return false;
  if (!__get_cpuid(0x80000001, &eax, &ebx, &leaf_ext, &edx)) return false;
  constexpr unsigned kMovbe = 1u << 22, kF16c = 1u << 29, kLzcnt = 1u << 5;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && (leaf1 & kMovbe) &&
         (leaf1 & kF16c) && (leaf_ext & kLzcnt);
}

bool RunsV4() {
  return RunsV3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

bool Runs(Isa isa) {
#if KVCORE_X86_LEVELS > 0
  __builtin_cpu_init();
  switch (isa) {
    case Isa::kBase:
      return true;
    case Isa::kV3:
      return RunsV3();
    case Isa::kV4:
      return KVCORE_X86_LEVELS >= 2 && RunsV4();
    case Isa::kV4Bf16:
      return KVCORE_X86_LEVELS >= 3 && RunsV4() && __builtin_cpu_supports("avx512bf16");
  }
  return false;
#else
  return isa == Isa::kBase;
#endif
}

// Intel's vdpbf16ps takes longer than widening to float and two multiply-adds (measured: 96 us
// against 76 us for 640 slots of 28 heads); AMD's is the faster way.
bool FastBf16() {
#if KVCORE_X86_LEVELS > 0
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

void Require(Isa isa) {
  KV_CHECK(Runs(isa)) << "KVCORE_ISA: level '" << IsaName(isa)
                      << "' was not compiled or does not run on this CPU";
}

Isa Choose() {
  const Isa levels[] = {Isa::kV4Bf16, Isa::kV4, Isa::kV3, Isa::kBase};
  if (const char* wanted = std::getenv("KVCORE_ISA"); wanted != nullptr && *wanted != '\0') {
    for (Isa isa : levels)
      if (std::string(wanted) == IsaName(isa)) {
        Require(isa);
        return isa;
      }
    KV_CHECK(false) << "KVCORE_ISA: expected base, v3, v4 or bf16, got '" << wanted << "'";
  }
  for (Isa isa : levels)
    if (Runs(isa) && (isa != Isa::kV4Bf16 || FastBf16())) return isa;
  return Isa::kBase;
}

Isa& Active() {
  static Isa isa = Choose();
  return isa;
}

}  // namespace

Isa ActiveIsa() { return Active(); }

const char* IsaName(Isa isa) {
  switch (isa) {
    case Isa::kBase:
      return "base";
    case Isa::kV3:
      return "v3";
    case Isa::kV4:
      return "v4";
    case Isa::kV4Bf16:
      return "bf16";
  }
  return "?";
}

bool IsaSupported(Isa isa) { return Runs(isa); }

void SetIsa(Isa isa) {
  Require(isa);
  Active() = isa;
}

}  // namespace kvcore
