// Hopper's warpgroup products of FP8 (E4M3): 64 x N += 64 x 32 times (N x 32)^T, the first operand in registers, the
// second in shared memory, K-major, in tiles of 128 columns with the 128-byte swizzle: `tile_descriptor` of wgmma.cuh,
// where 32 columns further is 2, too. Accumulators lie as there. sm_90a only.
//
// Lane 4g + t holds of the first operand, four columns a word: (g, 4t ..), (g + 8, 4t ..), (g, 16 + 4t ..) and
// (g + 8, 16 + 4t ..). The tensor cores add with fewer bits than f32 has, so sums of more than 128 columns are for f32
// registers to make.
#pragma once

#include "ptx/wgmma.cuh"

namespace moe {

#if MOE_SM90

#define MOE_O(i)                                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

/// d += a b^T for 32 columns of K, or d = a b^T without `add`; d are N / 2 accumulators.
template <int N>
__device__ __forceinline__ void wgmma_e4m3(float* d, const uint32_t* a, uint64_t b, int add);

/// The numbers behind the accumulators are those of a's four words, b and `add`.
#define MOE_WGMMA_E4M3(n, half, a0, a1, a2, a3, b_at, add_at)                                             \
  template <>                                                                                             \
  __device__ __forceinline__ void wgmma_e4m3<n>(float* d, const uint32_t* a, uint64_t b, int add) {       \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #add_at ", 0; wgmma.mma_async.sync.aligned.m64n" #n   \
                 "k32.f32.e4m3.e4m3 {" MOE_T##half "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_at \
                                                   ", p, 1, 1; }"                                         \
                 : MOE_O##half                                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                         \
  }

MOE_WGMMA_E4M3(16, 8, 8, 9, 10, 11, 12, 13)
MOE_WGMMA_E4M3(32, 16, 16, 17, 18, 19, 20, 21)
MOE_WGMMA_E4M3(48, 24, 24, 25, 26, 27, 28, 29)
MOE_WGMMA_E4M3(64, 32, 32, 33, 34, 35, 36, 37)
MOE_WGMMA_E4M3(80, 40, 40, 41, 42, 43, 44, 45)
MOE_WGMMA_E4M3(96, 48, 48, 49, 50, 51, 52, 53)
MOE_WGMMA_E4M3(112, 56, 56, 57, 58, 59, 60, 61)
MOE_WGMMA_E4M3(128, 64, 64, 65, 66, 67, 68, 69)

#undef MOE_WGMMA_E4M3
#undef MOE_O

#endif

}  // namespace moe
