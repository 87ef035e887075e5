// What the persistent kernels of both expert products on warpgroup products share (tensor_kernel.cuh, wide_kernel.cuh):
// tiles of 128 weight rows, the counters that blocks share, and how a block's warps get its work.
#pragma once

#include "experts/args.cuh"
#include "ptx/common.cuh"
#include "ptx/policy.cuh"
#include "ptx/tensor_map.cuh"

namespace moe::experts_tiles {

constexpr int kTileRows = 128;  // weight rows of a work tile: 64 for each consuming warpgroup
constexpr int kConsumers = 8;   // warps, two warpgroups
constexpr int kGatherers = 3;   // warps that load token rows
constexpr int kThreads = (kConsumers + 1 + kGatherers) * 32;
constexpr int kGatherLanes = kGatherers * 32;
constexpr int kWeightBytes = kTileRows * kTileColumns * 2;  // bytes of a stage

/// Counters in global memory that all launches share, one launch at a time; zero before the first one. A launch counts
/// in one of two sets and does not clear it: the next launch counts in the other set and clears the first one
/// meanwhile. Otherwise each block would have to find out at its end whether it is the last one, a round trip to memory
/// that nothing hides.
struct Counters {
  static constexpr int kHead = 4;     // which set is next, number of blocks that no longer need it
  static constexpr int kSetHead = 2;  // tickets, finished
  uint32_t* words;                    // head, slots of each expert as counted by the router [E], two sets
  int num_local;

  struct Set {
    uint32_t* words;
    __device__ uint32_t* tickets() const { return words; }
    // Work of the first product that is finished, of all experts.
    __device__ uint32_t* finished() const { return words + 1; }
    __device__ uint32_t* progress(int expert) const { return words + kSetHead + expert; }

    // The pointer is kept in 8 bytes of shared memory. With plain loads the consumers would need more registers than
    // they have.
    __device__ __forceinline__ void keep(void* at) const {
      asm volatile("st.shared.u64 [%0], %1;" ::"r"(smem_addr(at)), "l"(words) : "memory");
    }
    static __device__ __forceinline__ Set kept(const void* at) {
      Set set;
      asm volatile("ld.shared.u64 %0, [%1];" : "=l"(set.words) : "r"(smem_addr(at)) : "memory");
      return set;
    }
  };

  static __host__ __device__ int set_words(int num_local) { return kSetHead + num_local; }
  static __host__ __device__ int all_words(int num_local) { return kHead + num_local + 2 * set_words(num_local); }
  __device__ uint32_t* next() const { return words; }
  __device__ uint32_t* done() const { return words + 1; }
  __device__ Set set(uint32_t which) const { return {words + kHead + num_local + which * set_words(num_local)}; }
};

/// A block calls it when it takes no more tickets. The last block to call it zeroes the counts of slots and the other
/// set, and makes the other set the next one. All lanes of one warp call it.
__device__ __forceinline__ void leave_counters(const Counters& c) {
  const int lane = threadIdx.x % 32;
  const bool last = lane == 0 && add_acq_rel(c.done(), 1) == gridDim.x - 1;
  if (!__any_sync(0xffffffffu, last)) return;
  const uint32_t which = __ldcg(c.next());
  uint32_t *counts = c.words + Counters::kHead, *other = c.set(which ^ 1).words;
  for (int i = lane; i < c.num_local; i += 32) counts[i] = 0;
  for (int i = lane; i < Counters::set_words(c.num_local); i += 32) other[i] = 0;
  __syncwarp();
  if (lane == 0) *c.next() = which ^ 1, *c.done() = 0;
}

/// A place in the ring and the parity of its barriers.
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

/// Calls f(work) for each work tile of the block. The loader of weights announces them in `kWorkSlots` places; a
/// negative product is the end. All lanes of one warp call it.
template <class Block, class F>
__device__ __forceinline__ void for_each_work(const Block& b, F f) {
  for (int i = 0;; ++i) {
    mbarrier_wait(b.work_full(i), i / Block::kWorkSlots & 1);
    const auto work = *b.work(i);
    warp_arrive(b.work_empty(i));
    if (work.product < 0) return;
    f(work);
  }
}

/// Announces work tiles to for_each_work. One thread calls it and counts what it has announced.
template <class Block, class Work>
__device__ __forceinline__ void announce_work(const Block& b, const Work& work, int* announced) {
  mbarrier_wait(b.work_empty(*announced), *announced / Block::kWorkSlots & 1 ^ 1);
  *b.work(*announced) = work;
  mbarrier_arrive(b.work_full((*announced)++));
}

#if MOE_HAS_TMA

/// Loads 64 columns of a tile of w13 to shared memory: 8 gate rows and the 8 up rows of the same columns in turn, so
/// that a lane's accumulators hold both. One thread calls it.
__device__ __forceinline__ void load_gate_up(void* to, const CUtensorMap* w13, int expert, int tile, int column,
                                             uint64_t* bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %3, %4, %5}], [%6], %7;" ::"r"(smem_addr(to)),
      "l"(w13), "r"(column), "r"(0), "r"(tile * (kTileRows / 16)), "r"(expert), "r"(smem_addr(bar)), "l"(policy)
      : "memory");
}

/// Loads 64 columns, the step-th, of a tile of bf16 weights: alternating gate and up rows, or 128 rows of w2 [E, H, I].
/// One thread calls it.
__device__ __forceinline__ void load_weights(void* to, const CUtensorMap* map, int product, int expert, int tile,
                                             int hidden, int step, uint64_t* bar, uint64_t policy) {
  if (product == 0) {
    load_gate_up(to, map, expert, tile, step * kTileColumns, bar, policy);
  } else {
    load_tile(to, map, expert * hidden + tile * kTileRows, step * kTileColumns, bar, policy);
  }
}

#endif

/// Weights without scales or zero points.
struct PlainWeights {
  struct Source {};
  struct Side {};
  static constexpr int kSideBytes = 0;
  static constexpr uint32_t kReleases = kProductArrivals;

  template <class Args>
  static __device__ __forceinline__ Side side(const Args&, int, int, int, int) {
    return {};
  }
};

/// Whether these sizes and counts can be launched.
inline bool sizes_fit(int tokens, int top_k, int num_ids, int64_t num_local, int64_t hidden, int64_t inter,
                      int bucket) {
  return tokens >= 0 && top_k > 0 && num_ids > 0 && num_local > 0 && hidden > 0 && inter > 0 && hidden % 64 == 0 &&
         inter % 64 == 0 && num_local <= INT32_MAX / hidden && tokens <= INT32_MAX / top_k && bucket >= 0;
}

/// The tensor map of w13 [E, 2 I, H] in which a tile is 8 gate rows, the 8 up rows of the same columns, the next 8 gate
/// rows, ..
inline cudaError_t map_gate_up(CUtensorMap* map, const bf16* w13, int num_local, int inter, int hidden) {
  const cuuint64_t row = static_cast<cuuint64_t>(hidden) * sizeof(bf16);
  const cuuint64_t dims[5] = {static_cast<cuuint64_t>(hidden), 8, 2, static_cast<cuuint64_t>(inter / 8),
                              static_cast<cuuint64_t>(num_local)};
  const cuuint64_t strides[4] = {row, row * inter, row * 8, row * 2 * inter};
  const cuuint32_t box[5] = {kTileColumns, 8, 2, kTileRows / 16, 1};
  return make_tensor_map(map, w13, 5, dims, strides, box);
}

}  // namespace moe::experts_tiles
