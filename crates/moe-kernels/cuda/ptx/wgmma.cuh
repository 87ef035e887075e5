// Hopper's warpgroup products: 64 x N += 64 x 16 times (N x 16)^T, both operands bf16 in shared memory, K-major, in
// tiles of 64 columns with the 128-byte swizzle (what a tensor map writes). sm_90a only.
//
// Of the 4 warps, warp w holds rows 16 w ..; of every 8 columns j, lane 4g + t holds d[4j] at (g, 8j + 2t), d[4j + 1]
// in the next column, and d[4j + 2] and d[4j + 3] in the same columns of row g + 8.
#pragma once

#include "ptx/ptx.cuh"

namespace moe {

#if MOE_HAS_WGMMA

/// The descriptor of a swizzled tile at a 1,024-byte aligned address. Each group of 8 rows begins `eight_rows` bytes
/// after the group before. 16 columns further is 32 bytes, 2 in units of the descriptor.
__device__ __forceinline__ uint64_t tile_descriptor(const void* tile, uint32_t eight_rows = 1024) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kUnused = uint64_t{1} << 16;
  return kSwizzle128 | uint64_t{eight_rows >> 4} << 32 | kUnused | ((smem_addr(tile) & 0x3ffff) >> 4);
}

/// The descriptor of a transposed operand, in which the columns of the product are next to each other. Its tiles of 64
/// columns are `tile_bytes` apart, and rows have 128 bytes. 16 rows of K further is twice `eight_rows`.
__device__ __forceinline__ uint64_t transposed_descriptor(const void* tile, uint32_t tile_bytes,
                                                          uint32_t eight_rows = 1024) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | uint64_t{eight_rows >> 4} << 32 | uint64_t{tile_bytes >> 4} << 16 |
         ((smem_addr(tile) & 0x3ffff) >> 4);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Waits until at most N groups are running.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Accumulators as operands of an instruction (O(n) for the first n), and their numbers in its text (T(n)).
#define MOE_O(i)                                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define MOE_O8 MOE_O(0)
#define MOE_O16 MOE_O8, MOE_O(8)
#define MOE_O24 MOE_O16, MOE_O(16)
#define MOE_O32 MOE_O24, MOE_O(24)
#define MOE_O40 MOE_O32, MOE_O(32)
#define MOE_O48 MOE_O40, MOE_O(40)
#define MOE_O56 MOE_O48, MOE_O(48)
#define MOE_O64 MOE_O56, MOE_O(56)
#define MOE_O72 MOE_O64, MOE_O(64)
#define MOE_O80 MOE_O72, MOE_O(72)
#define MOE_O88 MOE_O80, MOE_O(80)
#define MOE_O96 MOE_O88, MOE_O(88)
#define MOE_O104 MOE_O96, MOE_O(96)
#define MOE_O112 MOE_O104, MOE_O(104)
#define MOE_O120 MOE_O112, MOE_O(112)
#define MOE_O128 MOE_O120, MOE_O(120)
#define MOE_T8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MOE_T16 MOE_T8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MOE_T24 MOE_T16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MOE_T32 MOE_T24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MOE_T40 MOE_T32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MOE_T48 MOE_T40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MOE_T56 MOE_T48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define MOE_T64 MOE_T56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define MOE_T72 MOE_T64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define MOE_T80 MOE_T72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define MOE_T88 MOE_T80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define MOE_T96 MOE_T88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define MOE_T104 MOE_T96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define MOE_T112 MOE_T104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define MOE_T120 MOE_T112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define MOE_T128 MOE_T120 ", %120, %121, %122, %123, %124, %125, %126, %127"

/// d += a b^T for 16 columns of K, or d = a b^T without `add`; d has N / 2 accumulators.
template <int N>
__device__ __forceinline__ void wgmma(float* d, uint64_t a, uint64_t b, int add = 1);

/// `half` is N / 2; the three numbers after the accumulators are the operand numbers of a, b and `add`.
#define MOE_WGMMA(n, half, a_at, b_at, add_at)                                                          \
  template <>                                                                                           \
  __device__ __forceinline__ void wgmma<n>(float* d, uint64_t a, uint64_t b, int add) {                 \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #add_at ", 0; wgmma.mma_async.sync.aligned.m64n" #n \
                 "k16.f32.bf16.bf16 {" MOE_T##half "}, %" #a_at ", %" #b_at ", p, 1, 1, 0, 0; }"        \
                 : MOE_O##half                                                                          \
                 : "l"(a), "l"(b), "r"(add));                                                           \
  }

template <>
__device__ __forceinline__ void wgmma<8>(float* d, uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, "
      "%5, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b), "r"(add));
}
MOE_WGMMA(16, 8, 8, 9, 10)
MOE_WGMMA(32, 16, 16, 17, 18)
MOE_WGMMA(48, 24, 24, 25, 26)
MOE_WGMMA(64, 32, 32, 33, 34)
MOE_WGMMA(80, 40, 40, 41, 42)
MOE_WGMMA(96, 48, 48, 49, 50)
MOE_WGMMA(112, 56, 56, 57, 58)
MOE_WGMMA(128, 64, 64, 65, 66)
MOE_WGMMA(144, 72, 72, 73, 74)
MOE_WGMMA(160, 80, 80, 81, 82)
MOE_WGMMA(176, 88, 88, 89, 90)
MOE_WGMMA(192, 96, 96, 97, 98)
MOE_WGMMA(208, 104, 104, 105, 106)
MOE_WGMMA(224, 112, 112, 113, 114)
MOE_WGMMA(240, 120, 120, 121, 122)
MOE_WGMMA(256, 128, 128, 129, 130)

/// The same as `wgmma` with a in registers: lane 4g + t holds (g, 2t), (g + 8, 2t), (g, 2t + 8) and (g + 8, 2t + 8),
/// two columns in a word. `kTransposed`: b is [16, N] (`transposed_descriptor`).
template <int N, bool kTransposed>
__device__ __forceinline__ void wgmma(float* d, const uint32_t (&a)[4], uint64_t b, int add = 1);

/// The operand numbers after the accumulators: a's four words, b, `add` and whether b is transposed.
#define MOE_WGMMA_REGISTERS(n, half, a0, a1, a2, a3, b_at, add_at, transposed_at)                                  \
  template <>                                                                                                      \
  __device__ __forceinline__ void wgmma<n, transposed_at>(float* d, const uint32_t (&a)[4], uint64_t b, int add) { \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #add_at ", 0; wgmma.mma_async.sync.aligned.m64n" #n            \
                 "k16.f32.bf16.bf16 {" MOE_T##half "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_at          \
                                                   ", p, 1, 1, " #transposed_at "; }"                              \
                 : MOE_O##half                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                                  \
  }

template <>
__device__ __forceinline__ void wgmma<8, 0>(float* d, const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, "
      "{%4, "
      "%5, %6, %7}, %8, p, 1, 1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
MOE_WGMMA_REGISTERS(16, 8, 8, 9, 10, 11, 12, 13, 0)
MOE_WGMMA_REGISTERS(32, 16, 16, 17, 18, 19, 20, 21, 0)
MOE_WGMMA_REGISTERS(48, 24, 24, 25, 26, 27, 28, 29, 0)
MOE_WGMMA_REGISTERS(64, 32, 32, 33, 34, 35, 36, 37, 0)
MOE_WGMMA_REGISTERS(80, 40, 40, 41, 42, 43, 44, 45, 0)
MOE_WGMMA_REGISTERS(96, 48, 48, 49, 50, 51, 52, 53, 0)
MOE_WGMMA_REGISTERS(112, 56, 56, 57, 58, 59, 60, 61, 0)
MOE_WGMMA_REGISTERS(128, 64, 64, 65, 66, 67, 68, 69, 0)
MOE_WGMMA_REGISTERS(144, 72, 72, 73, 74, 75, 76, 77, 0)
MOE_WGMMA_REGISTERS(160, 80, 80, 81, 82, 83, 84, 85, 0)
MOE_WGMMA_REGISTERS(176, 88, 88, 89, 90, 91, 92, 93, 0)
MOE_WGMMA_REGISTERS(192, 96, 96, 97, 98, 99, 100, 101, 0)
MOE_WGMMA_REGISTERS(208, 104, 104, 105, 106, 107, 108, 109, 0)
MOE_WGMMA_REGISTERS(224, 112, 112, 113, 114, 115, 116, 117, 0)
MOE_WGMMA_REGISTERS(240, 120, 120, 121, 122, 123, 124, 125, 0)
MOE_WGMMA_REGISTERS(256, 128, 128, 129, 130, 131, 132, 133, 0)
MOE_WGMMA_REGISTERS(64, 32, 32, 33, 34, 35, 36, 37, 1)
MOE_WGMMA_REGISTERS(128, 64, 64, 65, 66, 67, 68, 69, 1)
MOE_WGMMA_REGISTERS(192, 96, 96, 97, 98, 99, 100, 101, 1)
MOE_WGMMA_REGISTERS(256, 128, 128, 129, 130, 131, 132, 133, 1)

/// d += a b^T over 16 columns, where a's rows are next to each other: a is [16, 64] (`transposed_descriptor`), and so
/// is b.
__device__ __forceinline__ void wgmma_transposed(float (&d)[8], uint64_t a, uint64_t b) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %10, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" MOE_T8
               "}, %8, %9, p, 1, 1, 1, 0; }"
               : MOE_O8
               : "l"(a), "l"(b), "r"(1));
}

#undef MOE_WGMMA
#undef MOE_WGMMA_REGISTERS
#undef MOE_O

/// Keeps reads and writes of accumulators after this place: the compiler does not know that products are still running.
template <int N>
__device__ __forceinline__ void wgmma_hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Keeps the computation of an operand in registers before the wgmma_fence that follows. If it came after the fence,
/// ptxas would make each product wait for the one before.
template <int N>
__device__ __forceinline__ void wgmma_hold(uint32_t (&a)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

#endif

}  // namespace moe
