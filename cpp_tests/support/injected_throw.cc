#include "support/injected_throw.h"

#include <cstdlib>

namespace kvcore {
namespace {

thread_local Failures armed;

bool IsDue(int64_t* countdown) { return *countdown >= 0 && (*countdown)-- == 0; }

void CopyBlocksOrThrow(const KvCacheView& view, const CopyBlocksParams& p, Stream stream) {
  if (IsDue(&armed.op)) throw InjectedThrow();
  GetOps(Device::kCpu).copy_blocks(view, p, stream);
}

void EvictSlotsOrThrow(const KvCacheView& view, const EvictSlotsParams& p, Stream stream) {
  if (IsDue(&armed.op)) throw InjectedThrow();
  GetOps(Device::kCpu).evict_slots(view, p, stream);
}

void* AllocateOrThrow(size_t bytes) {
  if (IsDue(&armed.allocation)) throw InjectedThrow();
  void* memory = std::malloc(bytes > 0 ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

ArmedFailures::ArmedFailures(const Failures& failures) { armed = failures; }
ArmedFailures::~ArmedFailures() { armed = {}; }

const OpTable& ThrowingOps() {
  static const OpTable ops = [] {
    OpTable table = GetOps(Device::kCpu);
    table.copy_blocks = CopyBlocksOrThrow;
    table.evict_slots = EvictSlotsOrThrow;
    return table;
  }();
  return ops;
}

}  // namespace kvcore

void* operator new(size_t bytes) { return kvcore::AllocateOrThrow(bytes); }
void* operator new[](size_t bytes) { return kvcore::AllocateOrThrow(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
