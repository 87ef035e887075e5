// Token alignment within one block: which slots each local expert computes, in which order.
//
// A slot is one (token, k) pair, numbered t * K + k. The order is the order of a stable sort by local expert, so every
// block that aligns the same ids gets the same result and needs no other block.
#pragma once

#include "experts/args.cuh"
#include "ptx/common.cuh"
#include "ptx/policy.cuh"
#include "ptx/ptx.cuh"

namespace moe {

/// The local expert of an id, or -1 if there is none, it is on another rank, or the id is out of range. A kernel cannot
/// report a bad id, so an id without a local expert costs nothing and writes nothing.
__device__ __forceinline__ int local_expert(uint32_t id, const int32_t* expert_map, int num_ids, int num_local) {
  if (id >= static_cast<uint32_t>(num_ids)) return -1;
  const int local = expert_map == nullptr ? static_cast<int>(id) : expert_map[id];
  return local >= 0 && local < num_local ? local : -1;
}

/// The stable rank of each lane's slot among the slots of its expert that this warp has seen so far. There were
/// `seen[e]` of them before the call; `seen` grows by this warp's 32 slots. `local` is -1 for no slot.
template <class Count>
__device__ __forceinline__ uint32_t rank_in_expert(int local, Count* seen) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t same = __match_any_sync(0xffffffffu, local);
  const uint32_t before = __popc(same & ((1u << lane) - 1));
  const uint32_t base = local < 0 ? 0 : seen[local];
  __syncwarp();
  if (local >= 0 && before == 0) seen[local] = static_cast<Count>(base + __popc(same));
  __syncwarp();
  return base + before;
}

/// Replaces counts[0..n) by the sums before each, and stores the total in counts[n]. All lanes of one warp call it.
template <class Count>
__device__ __forceinline__ void warp_offsets(Count* counts, int n) {
  const int lane = threadIdx.x % 32;
  uint32_t start = 0;
  for (int base = 0; base < n; base += 32) {
    uint32_t total;
    const uint32_t own = base + lane < n ? counts[base + lane] : 0;
    const uint32_t before = warp_exclusive_sum(own, &total);
    if (base + lane < n) counts[base + lane] = static_cast<Count>(start + before);
    start += total;
  }
  if (lane == 0) counts[n] = static_cast<Count>(start);
  __syncwarp();
}

}  // namespace moe
