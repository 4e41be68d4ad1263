// Which instruction set the CPU kernels use, chosen once at load.
//
// Files in cpu/kernels/ are compiled once per level into a namespace of their own
// (KV_ISA_NAMESPACE) and export nothing but one constant table of function pointers each. They
// include no standard header with inline functions: the linker could keep a copy compiled for a
// level that the machine lacks. A test checks the object files for that.
#pragma once

namespace kvcore {

enum class Isa { kBase, kV3, kV4, kV4Bf16 };

// The fastest level of this machine, or KVCORE_ISA = base | v3 | v4 | bf16 if set. Throws Error if
// the variable names a level that is unknown, was not compiled or does not run here.
Isa ActiveIsa();
const char* IsaName(Isa isa);
bool IsaSupported(Isa isa);  // compiled and runs here
// For tests and benchmarks. Throws Error like ActiveIsa.
void SetIsa(Isa isa);

}  // namespace kvcore

// How many levels beyond the base were compiled, in their order: v3, v4, bf16.
#ifndef KVCORE_X86_LEVELS
#define KVCORE_X86_LEVELS 0
#endif
#if KVCORE_X86_LEVELS >= 1
#define KV_IF_V3(...) __VA_ARGS__
#else
#define KV_IF_V3(...)
#endif
#if KVCORE_X86_LEVELS >= 2
#define KV_IF_V4(...) __VA_ARGS__
#else
#define KV_IF_V4(...)
#endif
#if KVCORE_X86_LEVELS >= 3
#define KV_IF_BF16(...) __VA_ARGS__
#else
#define KV_IF_BF16(...)
#endif

// KV_DECLARE_ISA_TABLE(AttendKernels, kAttendKernels) declares the table in every level's
// namespace; KV_ISA_TABLE(kAttendKernels) is the one of the active level.
#define KV_DECLARE_ISA_IN(level, Type, name) \
  namespace level {                          \
  extern const Type name;                    \
  }
#define KV_DECLARE_ISA_TABLE(Type, name)          \
  KV_DECLARE_ISA_IN(isa_base, Type, name)         \
  KV_IF_V3(KV_DECLARE_ISA_IN(isa_v3, Type, name)) \
  KV_IF_V4(KV_DECLARE_ISA_IN(isa_v4, Type, name)) \
  KV_IF_BF16(KV_DECLARE_ISA_IN(isa_bf16, Type, name))
// clang-format off
#define KV_ISA_TABLE(name)                                                        \
  (KV_IF_BF16(::kvcore::ActiveIsa() == ::kvcore::Isa::kV4Bf16 ? isa_bf16::name :) \
   KV_IF_V4(::kvcore::ActiveIsa() == ::kvcore::Isa::kV4 ? isa_v4::name :)         \
   KV_IF_V3(::kvcore::ActiveIsa() == ::kvcore::Isa::kV3 ? isa_v3::name :)         \
   isa_base::name)
// clang-format on
