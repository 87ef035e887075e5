// Thread block clusters: blocks of one launch that read and write each other's shared memory. A sum over the blocks of
// a cluster costs a cluster barrier (about 0.3 us), and its order is fixed. A sum through global memory costs a fence,
// an atomic and a reload (over 1 us). Before Hopper every block is a cluster by itself.
#pragma once

#include "ptx/ptx.cuh"

namespace moe {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r = 0;
#if MOE_HAS_CLUSTERS
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
#endif
  return r;
}

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t n = 1;
#if MOE_HAS_CLUSTERS
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
#endif
  return n;
}

/// All threads of all blocks of the cluster, in two halves for work in between; shared memory written before the first
/// is readable after the second.
__device__ __forceinline__ void cluster_arrive() {
#if MOE_HAS_CLUSTERS
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if MOE_HAS_CLUSTERS
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

#if MOE_HAS_CLUSTERS
/// Address of the same shared variable in another block of the cluster.
__device__ __forceinline__ uint32_t cluster_addr(const void* p, uint32_t rank) {
  uint32_t a;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(smem_addr(p)), "r"(rank));
  return a;
}
#endif

__device__ __forceinline__ uint32_t cluster_load(const uint32_t* p, [[maybe_unused]] uint32_t rank) {
#if MOE_HAS_CLUSTERS
  uint32_t v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(cluster_addr(p, rank)) : "memory");
  return v;
#else
  return *p;
#endif
}

__device__ __forceinline__ uint64_t cluster_load(const uint64_t* p, [[maybe_unused]] uint32_t rank) {
#if MOE_HAS_CLUSTERS
  uint64_t v;
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(v) : "r"(cluster_addr(p, rank)) : "memory");
  return v;
#else
  return *p;
#endif
}

/// Four floats, 16-byte aligned.
__device__ __forceinline__ float4 cluster_load4(const float* p, [[maybe_unused]] uint32_t rank) {
#if MOE_HAS_CLUSTERS
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(cluster_addr(p, rank))
               : "memory");
  return v;
#else
  return *reinterpret_cast<const float4*>(p);
#endif
}

__device__ __forceinline__ void cluster_store(float* p, [[maybe_unused]] uint32_t rank, float v) {
#if MOE_HAS_CLUSTERS
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(cluster_addr(p, rank)), "f"(v) : "memory");
#else
  *p = v;
#endif
}

__device__ __forceinline__ void cluster_store(uint64_t* p, [[maybe_unused]] uint32_t rank, uint64_t v) {
#if MOE_HAS_CLUSTERS
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(cluster_addr(p, rank)), "l"(v) : "memory");
#else
  *p = v;
#endif
}

__device__ __forceinline__ void cluster_store4(float* p, [[maybe_unused]] uint32_t rank, float4 v) {
#if MOE_HAS_CLUSTERS
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(cluster_addr(p, rank)), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w)
               : "memory");
#else
  *reinterpret_cast<float4*>(p) = v;
#endif
}

#if MOE_HAS_CLUSTERS
/// Arrives at a barrier of another block, without waiting for this thread's own stores: for data that the thread has
/// read.
__device__ __forceinline__ void cluster_arrive_at(uint64_t* bar, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_addr(bar, rank)) : "memory");
}

/// Writes a word to another block's shared memory, where the barrier's current phase must expect these 4 bytes.
__device__ __forceinline__ void cluster_send(uint32_t* p, uint32_t v, uint64_t* bar, uint32_t rank) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(cluster_addr(p, rank)),
               "r"(v), "r"(cluster_addr(bar, rank))
               : "memory");
}
#endif

}  // namespace moe
