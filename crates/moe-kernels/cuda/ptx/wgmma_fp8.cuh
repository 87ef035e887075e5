// Hopper's warpgroup products of FP8 (E4M3): 64 x 128 times (128 x 128)^T, both operands in shared memory, K-major, in
// tiles of 128 columns with the 128-byte swizzle. `tile_descriptor` of wgmma.cuh describes them; 32 columns further is
// 2 in its units, too. Accumulators are in the same lanes as in wgmma.cuh. sm_90a only.
//
// The tensor cores add with fewer bits than f32 has, so sums over more than 128 columns are added in f32 registers.
#pragma once

#include "ptx/wgmma.cuh"

namespace moe {

#if MOE_HAS_WGMMA

// Accumulators are only outputs: until the products begin, their registers can be used for other values.
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

/// The same as wgmma_e4m3 with a in registers, four words for each 32 columns: lane 4g + t holds (g, 4t), (g + 8, 4t),
/// (g, 4t + 16) and (g + 8, 4t + 16), four columns in a word. b has N rows.
template <int N>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[N / 2], const uint32_t (&a)[4][4], uint64_t b);

#define MOE_STEP(n, half, a0, a1, a2, a3, b, add)                                                                    \
  "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" MOE_T##half "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 \
                                                                           "}, %" #b ", " add ", 1, 1;"
#define MOE_A(i) "r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3])
/// The operand numbers after the accumulators: a's words, the four addresses of b, and a zero.
#define MOE_WGMMA_E4M3(n, half, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, aa, ab, ac, ad, ae, af, b0, b1, b2, b3, zero) \
  template <>                                                                                                         \
  __device__ __forceinline__ void wgmma_e4m3<n>(float (&d)[half], const uint32_t (&a)[4][4], uint64_t b) {            \
    asm volatile("{ .reg .pred first, rest; setp.ne.b32 first, %" #zero ", 0; setp.eq.b32 rest, %" #zero              \
                 ", 0;" MOE_STEP(n, half, a0, a1, a2, a3, b0, "first") MOE_STEP(n, half, a4, a5, a6, a7, b1, "rest")  \
                     MOE_STEP(n, half, a8, a9, aa, ab, b2, "rest") MOE_STEP(n, half, ac, ad, ae, af, b3, "rest") "}"  \
                 : MOE_O##half                                                                                        \
                 : MOE_A(0), MOE_A(1), MOE_A(2), MOE_A(3), "l"(b), "l"(b + 2), "l"(b + 4), "l"(b + 6), "r"(0));       \
  }
MOE_WGMMA_E4M3(32, 16, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36)
MOE_WGMMA_E4M3(48, 24, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44)
MOE_WGMMA_E4M3(64, 32, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52)

#undef MOE_WGMMA_E4M3
#undef MOE_A
#undef MOE_STEP
#undef MOE_O

#endif

}  // namespace moe
