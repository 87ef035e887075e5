// Philox4x32-10: the counter-based generator of Salmon, Moraes, Dror, Shaw (SC 2011), as on the CPU.
#pragma once

#include <cstdint>

namespace moe {

/// Four random words.
struct Philox {
  uint32_t word[4];
};

/// The words of a counter under the key `seed`, low word first.
__device__ __forceinline__ Philox philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int i = 0; i < 10; ++i) {
    const uint64_t p0 = static_cast<uint64_t>(0xd2511f53u) * c0, p1 = static_cast<uint64_t>(0xcd9e8d57u) * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace moe
