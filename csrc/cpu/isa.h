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

// KV_DECLARE_ISA_TABLE(AttendKernels, kAttendKernels) declares the table in every level's
// namespace; KV_ISA_TABLE(kAttendKernels) is the one of the active level.
#if defined(KVCORE_X86_LEVELS)
#define KV_DECLARE_ISA_TABLE(Type, name) \
  namespace isa_base {                   \
  extern const Type name;                \
  }                                      \
  namespace isa_v3 {                     \
  extern const Type name;                \
  }                                      \
  namespace isa_v4 {                     \
  extern const Type name;                \
  }                                      \
  namespace isa_bf16 {                   \
  extern const Type name;                \
  }
#define KV_ISA_TABLE(name)                                          \
  (::kvcore::ActiveIsa() == ::kvcore::Isa::kV4Bf16 ? isa_bf16::name \
   : ::kvcore::ActiveIsa() == ::kvcore::Isa::kV4   ? isa_v4::name   \
   : ::kvcore::ActiveIsa() == ::kvcore::Isa::kV3   ? isa_v3::name   \
                                                   : isa_base::name)
#else
#define KV_DECLARE_ISA_TABLE(Type, name) \
  namespace isa_base {                   \
  extern const Type name;                \
  }
#define KV_ISA_TABLE(name) isa_base::name
#endif
