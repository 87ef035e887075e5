// Hopper's warpgroup products of FP8 (E4M3): 64 x 128 times (128 x 128)^T, both operands in shared memory, K-major, in
// tiles of 128 columns with the 128-byte swizzle: `tile_descriptor` of wgmma.cuh, where 32 columns further is 2, too.
// Accumulators lie as there. sm_90a only.
//
// The tensor cores add with fewer bits than f32 has, so sums of more than 128 columns are for f32 registers to make.
#pragma once

#include "ptx/wgmma.cuh"

namespace moe {

#if MOE_SM90

// Accumulators are outputs alone: until the products begin their registers serve others.
#define MOE_O(i)                                                                                                     \
  "=&f"(d[i]), "=&f"(d[i + 1]), "=&f"(d[i + 2]), "=&f"(d[i + 3]), "=&f"(d[i + 4]), "=&f"(d[i + 5]), "=&f"(d[i + 6]), \
      "=&f"(d[i + 7])
#define MOE_STEP(a, b, add) \
  "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" MOE_T64 "}, %" #a ", %" #b ", " add ", 1, 1;"

/// d = a b^T of 128 columns: four products of 32.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile("{ .reg .pred first, rest; setp.ne.b32 first, %72, 0; setp.eq.b32 rest, %72, 0;"  //
               MOE_STEP(64, 68, "first") MOE_STEP(65, 69, "rest") MOE_STEP(66, 70, "rest") MOE_STEP(67, 71, "rest") "}"
               : MOE_O64
               : "l"(a), "l"(a + 2), "l"(a + 4), "l"(a + 6), "l"(b), "l"(b + 2), "l"(b + 4), "l"(b + 6), "r"(0));
}

#undef MOE_STEP
#undef MOE_O

#endif

}  // namespace moe
