// The kernel of the experts' products for prompts, for bf16 weights (wide.cu, which explains the design) and quantised
// ones (quant/experts_wide.cu). `W` is explained in tensor.cuh.
#pragma once

#include "experts/wide_store.cuh"

namespace moe::experts_wide {

/// Whether `multiply` takes a function that tells the other blocks of the activations that were stored last, and calls
/// it while products run.
template <class W>
constexpr bool kPublishesInside = false;

#if MOE_HAS_WGMMA

// Registers of a launch of three warpgroups: loaders get the registers that the consumers do not take.
constexpr int kAllRegisters = 3 * 168;

/// kWidth: weight tiles of a work tile.
template <int kWidth, class W>
struct Consumer {
  static constexpr int kRows = kMostRows / kWidth;
  const Block<W>& b;
  const Args<W>& a;
  Store<W> store = {b, a};
  Cursor at = {};

  /// Computes a work tile with the smallest number of columns that holds its rows.
  template <int kColumns = kGranule>
  __device__ __forceinline__ void multiply_rows(const Work& work, float (&sums)[kSums]) {
    if constexpr (kColumns < kRows) {
      if (work.rows > kColumns) return multiply_rows<kColumns + kGranule>(work, sums);
    }
    if constexpr (kPublishesInside<W>) {
      W::template multiply<kWidth, kColumns>(b, a, work, at, sums,
                                             [&]() __attribute__((always_inline)) { store.publish(); });
    } else {
      W::template multiply<kWidth, kColumns>(b, a, work, at, sums);
    }
  }

  __device__ __forceinline__ void run() {
    float sums[kSums] = {};  // one array for all work tiles: two would not fit
    for_each_work(b, [&](const Work& work) __attribute__((always_inline)) {
      // Their loads are in flight during the products.
      typename Store<W>::Biases biases[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) biases[i] = store.biases(work, work.tile + i);
      if (work.product == 0) {
        multiply_rows(work, sums);
        wgmma_hold(sums);
        store.publish();
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          store.template activations<kRows>(work, work.tile + i, sums + i * kPairSums, biases[i]);
      } else {
        store.publish();  // before waiting for other blocks
        typename Store<W>::template Slots<kRows> slots;
        store.template fetch_slots<kRows>(work, slots);
        multiply_rows(work, sums);
        wgmma_hold(sums);
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          store.template slot_rows<kRows>(work, work.tile + i, sums + i * kPairSums, slots, biases[i]);
      }
    });
    store.publish();
  }
};

#endif  // MOE_HAS_WGMMA

template <int kWidth, class W>
__global__ void __launch_bounds__(kThreads, 1)
    experts_wide(const __grid_constant__ CUtensorMap w13, const __grid_constant__ CUtensorMap w2,
                 const __grid_constant__ CUtensorMap act, const __grid_constant__ Args<W> a) {
#if MOE_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t smem[];
  uint8_t* staging = smem + a.staging();
  const Block<W> b = {smem, staging, staging + kStaging, a.stages(), a.stage_bytes(), a.width};
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&w13);
    prefetch_tensor_map(&w2);
    prefetch_tensor_map(&act);
    for (int i = 0; i < b.stages; ++i) {
      mbarrier_init(b.full(i), 1 + kGatherLanes);
      mbarrier_init(b.empty(i), kConsumers * W::kReleases);
    }
    for (int i = 0; i < Block<W>::kWorkSlots; ++i) {
      mbarrier_init(b.work_full(i), 1);
      mbarrier_init(b.work_empty(i), (kConsumers + kGatherers) * kWarpArrivals);
    }
    mbarrier_fence_init();
  }
  __syncthreads();
  pdl_launch_dependents();
  pdl_wait();
  if (warp == 0) scan_counts(b, a);
  __syncthreads();
  if (warp < kConsumers) {
    take_registers<W::kConsumerRegisters>();
    Consumer<kWidth, W>{b, a}.run();
  } else {
    give_registers<kAllRegisters - 2 * W::kConsumerRegisters>();
    if (warp > kConsumers) {
      Gatherer<W>{b, a, &act}.run();
    } else {
      if (elect_one()) Producer<W>{b, a, &w13, &w2}.run();
      __syncwarp();
      leave_counters(a.counters);
    }
  }
#endif
}

/// With fewer rows per expert, more of the ring is left to the weights, which are the bound then.
inline int capacity_for(int mean_rows) { return mean_rows <= 40 ? 64 : mean_rows <= 96 ? kPairRows : kMostRows; }

/// The number of weight tiles of a work tile: two if rows are few and the products have an even number of weight tiles,
/// or, with `odd`, at least 16, of which the one that is missing at the end is a small part.
inline int width_for(int capacity, int hidden, int inter, bool odd) {
  constexpr int kMany = 16;
  const bool even = inter % kTileRows == 0 && hidden % (2 * kTileRows) == 0;
  const bool many = weight_tiles(0, hidden, inter) >= kMany && weight_tiles(1, hidden, inter) >= kMany;
  return capacity <= kPairRows && (even || (odd && many)) ? 2 : 1;
}

template <class W>
cudaError_t run(const Args<W>& a, const CUtensorMap& w13, const CUtensorMap& w2, const DeviceLimits& limits,
                void* stream) {
  if (a.smem() > limits.block_smem) return cudaErrorInvalidValue;
  CUtensorMap act;
  const cudaError_t e = make_tensor_map(&act, a.act, a.num_slots(), a.inter, kActRows);
  if (e != cudaSuccess) return e;
  const Launch l = {dim3(limits.sms), dim3(kThreads), stream, static_cast<size_t>(a.smem())};
  return launch(a.width == 2 ? experts_wide<2, W> : experts_wide<1, W>, l, w13, w2, act, a);
}

}  // namespace moe::experts_wide
