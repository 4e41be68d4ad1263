// Seeded choices of the store's random tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "store/kv_store.h"

namespace kvcore {

class Random {
 public:
  explicit Random(uint64_t seed) : bits_(seed) {}
  int64_t Below(int64_t n) { return static_cast<int64_t>(bits_() % static_cast<uint64_t>(n)); }
  bool Chance(int percent) { return Below(100) < percent; }
  // Up to `n` different ids of `from`.
  std::vector<SeqId> Pick(std::vector<SeqId> from, int64_t n) {
    std::shuffle(from.begin(), from.end(), bits_);
    from.resize(std::min<size_t>(from.size(), n));
    return from;
  }

 private:
  std::mt19937_64 bits_;
};

}  // namespace kvcore
