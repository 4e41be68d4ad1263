// Counter-based random numbers: a pure function of (key, counter), so that a draw does not depend
// on who shares the batch, on threads or on resuming. Host and device.
//
// Source: Philox-4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KV_HOST_DEVICE __host__ __device__
#else
#define KV_HOST_DEVICE
#endif

namespace kvcore {

struct Philox4 {
  uint32_t x[4];
};

KV_HOST_DEVICE inline Philox4 Philox(uint64_t key, uint64_t counter_lo, uint64_t counter_hi) {
  uint32_t c0 = static_cast<uint32_t>(counter_lo), c1 = static_cast<uint32_t>(counter_lo >> 32);
  uint32_t c2 = static_cast<uint32_t>(counter_hi), c3 = static_cast<uint32_t>(counter_hi >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Uniform in [0, 1) with 24 random bits, exact in float.
KV_HOST_DEVICE inline float UniformFloat(uint64_t key, uint64_t counter) {
  return static_cast<float>(Philox(key, counter, 0).x[0] >> 8) * (1.0f / 16777216.0f);
}

// Uniform in [0, 1) with 53 random bits.
KV_HOST_DEVICE inline double UniformDouble(uint64_t key, uint64_t counter) {
  const Philox4 r = Philox(key, counter, 0);
  const uint64_t bits = (static_cast<uint64_t>(r.x[0]) << 21) ^ (r.x[1] >> 11);
  return static_cast<double>(bits) * (1.0 / 9007199254740992.0);
}

// Folds one more word into a key: HashKey(HashKey(seed, problem), step) ... Source: splitmix64
// finaliser.
KV_HOST_DEVICE inline uint64_t HashKey(uint64_t key, uint64_t word) {
  uint64_t z = key + 0x9E3779B97F4A7C15ull * (word + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

}  // namespace kvcore
