// Operations of the lanes for which a predicate holds, without a branch: after a branch the other lanes of the warp
// would wait.
#pragma once

#include "ptx/ptx.cuh"

namespace moe {

/// An arrival at a barrier of the block.
__device__ __forceinline__ void mbarrier_arrive_if(bool p, uint64_t* bar) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 state; setp.ne.u32 p, %0, 0; @p mbarrier.arrive.shared.b64 state, [%1]; }" ::"r"(
          static_cast<uint32_t>(p)),
      "r"(smem_addr(bar))
      : "memory");
}

/// A store to shared memory.
__device__ __forceinline__ void store_shared_if(bool p, void* to, uint32_t v) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.shared.u32 [%1], %2; }" ::"r"(static_cast<uint32_t>(p)),
               "r"(smem_addr(to)), "r"(v)
               : "memory");
}

/// Two words, aligned to 8 bytes.
__device__ __forceinline__ void store_shared_if(bool p, void* to, uint2 v) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.shared.v2.u32 [%1], {%2, %3}; }" ::"r"(static_cast<uint32_t>(p)),
      "r"(smem_addr(to)), "r"(v.x), "r"(v.y)
      : "memory");
}

}  // namespace moe
