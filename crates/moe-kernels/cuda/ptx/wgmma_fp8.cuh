// Hopper's warpgroup products of FP8 (E4M3): 64 x 128 times (N x 128)^T, the first operand in registers, the second in
// shared memory, K-major, in tiles of 128 columns with the 128-byte swizzle: `tile_descriptor` of wgmma.cuh, where 32
// columns further is 2, too. Accumulators lie as there. sm_90a only.
//
// Lane 4g + t holds of the first operand, of each 32 columns, four columns a word: (g, 4t ..), (g + 8, 4t ..), (g, 16 +
// 4t ..) and (g + 8, 16 + 4t ..). The tensor cores add with fewer bits than f32 has, so sums of more than 128 columns
// are for f32 registers to make.
#pragma once

#include "ptx/wgmma.cuh"

namespace moe {

#if MOE_SM90

// Accumulators are outputs alone: until the products begin their registers serve others.
#define MOE_O(i)                                                                                                     \
  "=&f"(d[i]), "=&f"(d[i + 1]), "=&f"(d[i + 2]), "=&f"(d[i + 3]), "=&f"(d[i + 4]), "=&f"(d[i + 5]), "=&f"(d[i + 6]), \
      "=&f"(d[i + 7])

/// d = a b^T of 128 columns: four products of 32, d are N / 2 accumulators.
template <int N>
__device__ __forceinline__ void wgmma_e4m3(float* d, const uint32_t (&a)[16], uint64_t b);

#define MOE_STEP(n, half, a0, a1, a2, a3, b_at, add)                                                                 \
  "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" MOE_T##half "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 \
                                                                           "}, %" #b_at ", " add ", 1, 1;"

/// The numbers behind the accumulators are those of a's 16 words, then of b.
#define MOE_WGMMA_E4M3(n, half, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, b0, b1, b2, b3, \
                       zero)                                                                                          \
  template <>                                                                                                         \
  __device__ __forceinline__ void wgmma_e4m3<n>(float* d, const uint32_t (&a)[16], uint64_t b) {                      \
    asm volatile("{ .reg .pred first, rest; setp.ne.b32 first, %" #zero ", 0; setp.eq.b32 rest, %" #zero              \
                 ", 0;" MOE_STEP(n, half, a0, a1, a2, a3, b0, "first") MOE_STEP(n, half, a4, a5, a6, a7, b1, "rest")  \
                     MOE_STEP(n, half, a8, a9, a10, a11, b2, "rest")                                                  \
                         MOE_STEP(n, half, a12, a13, a14, a15, b3, "rest") "}"                                        \
                 : MOE_O##half                                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), \
                   "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]), "r"(a[15]), "l"(b),         \
                   "l"(b + 2), "l"(b + 4), "l"(b + 6), "r"(0));                                                       \
  }

MOE_WGMMA_E4M3(16, 8, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28)
MOE_WGMMA_E4M3(32, 16, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36)
MOE_WGMMA_E4M3(48, 24, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44)
MOE_WGMMA_E4M3(64, 32, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52)
MOE_WGMMA_E4M3(80, 40, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60)
MOE_WGMMA_E4M3(96, 48, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68)
MOE_WGMMA_E4M3(112, 56, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76)
MOE_WGMMA_E4M3(128, 64, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82, 83, 84)

#undef MOE_WGMMA_E4M3
#undef MOE_STEP
#undef MOE_O

#endif

}  // namespace moe
