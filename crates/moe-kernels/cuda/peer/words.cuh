// Copies a slot's words, or half of them, from and to an array whose address is any multiple of 2 bytes.
#pragma once

#include "ptx/common.cuh"

namespace moe {

/// kWords words at a multiple of 2 bytes or, with `aligned`, at a multiple of their size.
template <int kWords>
__device__ __forceinline__ void load_words(const uint8_t* p, bool aligned, uint32_t (&w)[kWords]) {
  static_assert(kWords == 2 || kWords == 4, "half a slot or a slot");
  if (!aligned) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint16_t* halves = reinterpret_cast<const uint16_t*>(p) + 2 * i;
      w[i] = __ldcg(halves) | static_cast<uint32_t>(__ldcg(halves + 1)) << 16;
    }
  } else if constexpr (kWords == 2) {
    const uint2 v = __ldcg(reinterpret_cast<const uint2*>(p));
    w[0] = v.x, w[1] = v.y;
  } else {
    const uint4 v = __ldcg(reinterpret_cast<const uint4*>(p));
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  }
}

template <int kWords>
__device__ __forceinline__ void store_words(uint8_t* p, bool aligned, const uint32_t (&w)[kWords]) {
  if (!aligned) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      uint16_t* halves = reinterpret_cast<uint16_t*>(p) + 2 * i;
      halves[0] = static_cast<uint16_t>(w[i]), halves[1] = static_cast<uint16_t>(w[i] >> 16);
    }
  } else if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(p) = {w[0], w[1]};
  } else {
    *reinterpret_cast<uint4*>(p) = {w[0], w[1], w[2], w[3]};
  }
}

}  // namespace moe
