// How long L2 is to keep what a copy brings.
#pragma once

#include "ptx/ptx.cuh"

namespace moe {

/// For what is read once: it leaves L2 before everything else, so that what all blocks read in each launch stays, code
/// among it.
__device__ __forceinline__ uint64_t read_once() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// For what other blocks read at about the same time.
__device__ __forceinline__ uint64_t read_again() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// For what blocks read much later: it leaves L2 after everything else.
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

}  // namespace moe
