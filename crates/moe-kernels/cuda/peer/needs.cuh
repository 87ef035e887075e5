// Which ranks need which rows of a sparse layer: the owners of the experts of the row's token.
#pragma once

#include "peer/peer.cuh"

namespace moe {

/// Which ranks need a row: the owners of its token's experts. moe-kernels' `cuda::PeerBuffers` uses the same layout.
struct Needs {
  const uint32_t* ids;     // [rows of all ranks, top_k]; null: all ranks need all rows
  const uint32_t* owners;  // [experts]
  uint32_t top_k, experts;
  uint32_t row_slots;

  /// A bit for each rank that needs data in this slot of all ranks' rows; with kAll all ranks do.
  template <bool kAll>
  __device__ __forceinline__ uint32_t of(uint32_t slot) const {
    if (kAll || ids == nullptr) return 0xffffffffu;
    const uint32_t* chosen = ids + slot / row_slots * top_k;
    uint32_t ranks = 0;
#pragma unroll 1
    for (uint32_t k = 0; k < top_k; ++k) {
      const uint32_t id = __ldcg(chosen + k);
      if (id < experts) ranks |= 1u << __ldg(owners + id);
    }
    return ranks;
  }

  /// A bit for each rank that needs a row of all ranks' rows. Whole warps call it, for up to 32 ids of a row.
  __device__ __forceinline__ uint32_t of_row(uint32_t row) const {
    if (ids == nullptr) return 0xffffffffu;
    const uint32_t lane = threadIdx.x % 32;
    uint32_t rank = 0;
    if (lane < top_k) {
      const uint32_t id = __ldcg(ids + static_cast<size_t>(row) * top_k + lane);
      if (id < experts) rank = 1u << __ldg(owners + id);
    }
    return __reduce_or_sync(0xffffffffu, rank);
  }
};

/// The i-th peer after this rank, so that each rank begins with a different peer.
__device__ __forceinline__ int peer_after(const Exchange& x, int i) {
  const int next = x.peers.rank + i;
  return next < x.peers.ranks ? next : next - x.peers.ranks;
}

}  // namespace moe
