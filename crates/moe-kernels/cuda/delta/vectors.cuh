// Neighbouring f32 columns that a thread processes together.
#pragma once

#include <cstdint>

#include "ptx/common.cuh"

namespace moe {

/// N neighbouring columns, 1 or 4. Four are loaded and stored as 16 bytes.
template <int N>
struct Columns {
  float at[N];

  __device__ __forceinline__ static Columns zeros() {
    Columns c;
#pragma unroll
    for (float& x : c.at) x = 0.f;
    return c;
  }

  __device__ __forceinline__ static Columns load(const float* from) {
    Columns c;
    if constexpr (N == 4) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      c.at[0] = v.x, c.at[1] = v.y, c.at[2] = v.z, c.at[3] = v.w;
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) c.at[i] = from[i];
    }
    return c;
  }

  __device__ __forceinline__ void store(float* to) const {
    if constexpr (N == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(at[0], at[1], at[2], at[3]);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = at[i];
    }
  }
};

/// x * sigmoid(x)
__device__ __forceinline__ float silu(float x) { return x / (1.f + expf(-x)); }

/// Whether an address is a multiple of 16 bytes.
inline bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace moe
