// How long L2 should keep copied data.
#pragma once

#include "ptx/ptx.cuh"

namespace moe {

/// For data that is read once: it leaves L2 before all other data. So data that all blocks read in each launch stays in
/// L2, including code.
__device__ __forceinline__ uint64_t read_once() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// For data that other blocks read at about the same time.
__device__ __forceinline__ uint64_t read_again() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// For data that blocks read much later: it leaves L2 after all other data.
__device__ __forceinline__ uint64_t read_late() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// `cp_async16` with a policy.
__device__ __forceinline__ void cp_async16(void* dst, const void* src, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(smem_addr(dst)), "l"(src),
               "l"(policy)
               : "memory");
}

#if MOE_HAS_TMA
/// `bulk_copy` with a policy.
__device__ __forceinline__ void bulk_copy(void* dst, const void* src, uint32_t bytes, uint64_t* bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(smem_addr(dst)),
      "l"(src), "r"(bytes), "r"(smem_addr(bar)), "l"(policy)
      : "memory");
}
#endif

/// Like `copy_rows`, for kRows rows of weights that are `src_stride` bytes apart and that the launch reads once.
template <int kRows>
__device__ __forceinline__ void copy_strided(uint8_t* dst, uint32_t stride, const void* src, size_t src_stride,
                                             uint32_t bytes, uint64_t* bar) {
  const uint8_t* from = static_cast<const uint8_t*>(src);
  const uint64_t policy = read_once();
#if MOE_HAS_TMA
  if (elect_one()) {
    arrive_expecting(bar, kRows * bytes);
#pragma unroll
    for (int r = 0; r < kRows; ++r) bulk_copy(dst + r * stride, from + r * src_stride, bytes, bar, policy);
  }
  __syncwarp();
#else
  for (uint32_t at = threadIdx.x % 32 * 16; at < bytes; at += 32 * 16) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) cp_async16(dst + r * stride + at, from + r * src_stride + at, policy);
  }
  cp_async_arrive(bar);
#endif
}

}  // namespace moe
