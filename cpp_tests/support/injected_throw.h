// Failures on demand: an operation or an allocation that throws in the middle of a call. Linking
// this replaces operator new of the test program, which is plain while nothing is armed.
#pragma once

#include <cstdint>
#include <new>

#include "ops/op_table.h"

namespace kvcore {

struct InjectedThrow : std::bad_alloc {
  const char* what() const noexcept override { return "injected"; }
};

// Which call of its kind fails, counted from 0; -1 = none.
struct Failures {
  int64_t op = -1;          // copy_blocks or evict_slots of ThrowingOps, before it does anything
  int64_t allocation = -1;  // operator new of this thread
};

// Failures happen while it lives, in this thread.
class ArmedFailures {
 public:
  explicit ArmedFailures(const Failures& failures);
  ~ArmedFailures();
  ArmedFailures(const ArmedFailures&) = delete;
  ArmedFailures& operator=(const ArmedFailures&) = delete;
};

// The CPU's operations with the failures above.
const OpTable& ThrowingOps();

}  // namespace kvcore
