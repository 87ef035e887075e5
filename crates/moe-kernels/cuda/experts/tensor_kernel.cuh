// The kernel of the experts on warpgroup products, for bf16 weights (tensor.cu, which explains the design) and
// quantised ones (quant/experts_tensor.cu). `W` is explained in tensor.cuh.
#pragma once

#include "experts/tensor.cuh"
#include "ptx/wgmma.cuh"

namespace moe::experts_tensor {

/// The number of blocks of an SM: several, each with its part of the shared memory, where the consumers' registers
/// allow it.
template <class W, int kCapacity>
constexpr int kBlocks = kCapacity > 32 ? 1 : (W::template kFewBlocks<kCapacity>);

#if MOE_HAS_WGMMA

/// The biases of a lane's two weight rows of a work tile, g and g + 8 of its warp: a gate row and its up row, or two
/// rows of w2.
template <class W>
__device__ __forceinline__ auto row_biases(const Args<W>& a, const Work& work) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  return work.product == 0 ? a.epilogue.gate_up(work.expert, a.inter, work.tile * (kTileRows / 2) + warp * 8 + g)
                           : a.epilogue.down(work.expert, a.hidden, work.tile * kTileRows + warp * 16 + g);
}

/// Computes a work tile with up to kColumns rows. Of every 4 columns a lane holds one, for weight rows g and g + 8 of
/// its warp.
template <int kCapacity, int kColumns, class W>
__device__ __forceinline__ void compute(const Block<W>& b, const Args<W>& a, const Work& work, Cursor& at) {
  constexpr int kResults = kColumns / 4;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const auto row = [](int i) { return W::result_row(i); };
  uint32_t place[kResults];  // place of each result
  const auto fetch_places = [&] {
#pragma unroll
    for (int i = 0; i < kResults; ++i)
      place[i] = row(i) >= work.rows ? kNoExpert : work.product == 0 ? work.first + row(i) : work.slots[row(i)];
  };
  constexpr bool kLate = kBlocks<W, kCapacity> > 2;  // registers are short, and other blocks hide the latency
  typename W::Epilogue::Biases biases;
  constexpr bool kBiasesLate = kBlocks<W, kCapacity> > 1;  // for the same reason
  if constexpr (!kLate) fetch_places();
  if constexpr (!kBiasesLate) biases = row_biases(a, work);
  float acc[kSums<kColumns>] = {};
  W::template multiply<kCapacity, kColumns>(b, a, work, at, acc);
  if constexpr (kLate) fetch_places();
  if constexpr (kBiasesLate) biases = row_biases(a, work);
#pragma unroll
  for (int i = 0; i < kResults; ++i) {
    if (place[i] == kNoExpert) continue;
    const float low = acc[i / 2 * 4 + i % 2], high = acc[i / 2 * 4 + i % 2 + 2];
    if (work.product == 0) {
      const int column = work.tile * (kTileRows / 2) + warp * 8 + g;
      a.act[static_cast<size_t>(place[i]) * a.inter + column] =
          __float2bfloat16(a.epilogue.activate(low, high, biases));
    } else {
      const int column = work.tile * kTileRows + warp * 16 + g;
      float* to = a.slot_rows + static_cast<size_t>(place[i]) * a.hidden + column;
      if (column < a.hidden) to[0] = a.epilogue.low(low, biases);
      if (column + 8 < a.hidden) to[8] = a.epilogue.high(high, biases);
    }
  }
}

/// Computes a work tile with the next larger number of columns that hold its rows.
template <int kCapacity, int kColumns, class W>
__device__ __forceinline__ void compute_rows(const Block<W>& b, const Args<W>& a, const Work& work, Cursor& at) {
  if constexpr (kColumns < kCapacity) {
    if (work.rows > kColumns) return compute_rows<kCapacity, 2 * kColumns>(b, a, work, at);
  }
  compute<kCapacity, kColumns>(b, a, work, at);
}

/// Skips stages whose contents are not needed.
template <class W>
__device__ __forceinline__ void skip(const Block<W>& b, int steps, Cursor& at) {
  for (int i = 0; i < steps; ++i, at.advance(b.stages)) {
    mbarrier_wait(b.full(at.stage), at.parity);
    warp_arrive<W::kReleases>(b.empty(at.stage));
  }
}

template <int kCapacity, class W>
__device__ __forceinline__ void consume(const Block<W>& b, const Args<W>& a) {
  Cursor at;
  for_each_work(b, [&](const Work& work) {
    if (work.rows == 0) return skip(b, work.steps, at);
    if (W::kFewestRows == 4 && work.rows <= 4) compute<kCapacity, W::kFewestRows>(b, a, work, at);
    else compute_rows<kCapacity, 8>(b, a, work, at);
    if (work.product == 1) return;
    // The copy engine of another block reads them. This fence does not wait; the fence towards the other blocks waits,
    // and only one thread issues it.
    fence_async_global();
    named_barrier(1, kConsumers * 32);
    if (threadIdx.x == 0) {
      fence_release();
      const Counters::Set set = b.counters();
      add_relaxed(set.progress(work.expert), work.rows);
      add_relaxed(set.finished(), work.rows);
    }
  });
}

#endif  // MOE_HAS_WGMMA

/// The number of registers that the launch gives to each thread.
template <class W, int kCapacity>
constexpr int kRegisters = 65536 / (kBlocks<W, kCapacity> * kThreads) / 8 * 8;

template <int kCapacity, class W>
__global__ void __launch_bounds__(kThreads, kBlocks<W, kCapacity>)
    experts_tensor(const __grid_constant__ CUtensorMap w13, const __grid_constant__ CUtensorMap w2,
                   const __grid_constant__ CUtensorMap act, const __grid_constant__ Args<W> a) {
#if MOE_HAS_WGMMA
  // The loaders give up registers for the consumers: there are half as many loaders.
  constexpr int kEach = kRegisters<W, kCapacity>, kTaken = W::template kConsumerRegisters<kCapacity>;
  extern __shared__ __align__(1024) uint8_t smem[];
  const Block<W> b = {smem, smem + a.ring(), a.stages, stage_bytes<W>(kCapacity)};
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&w13);
    prefetch_tensor_map(&w2);
    prefetch_tensor_map(&act);
    for (int i = 0; i < a.stages; ++i) {
      mbarrier_init(b.full(i), 1 + W::kRowArrivals);
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
  Producer<W> producer = {b, a, &w13, &w2};
  int ready = 0;
  if (warp == kConsumers && elect_one()) ready = producer.guess();
  __syncwarp();
  pdl_wait();
  fill_table(b, a);
  if (warp < kConsumers) {
    if constexpr (kTaken > 0) take_registers<kTaken>();
    consume<kCapacity>(b, a);
  } else {
    if constexpr (kTaken > 0) give_registers<3 * kEach - 2 * kTaken>();
    if (warp == kConsumers) {
      if (elect_one()) producer.template run<kCapacity>(ready);
      __syncwarp();
      leave_counters(a.counters);
    } else {
      W::template gather<kCapacity>(b, a, &act);
    }
  }
#endif
}

template <int kCapacity, class W>
cudaError_t run(Args<W> a, const CUtensorMap& w13, const CUtensorMap& w2, const DeviceLimits& limits, void* stream) {
  CUtensorMap act;
  const cudaError_t e = make_tensor_map(&act, a.act, a.num_slots(), a.inter, kActRows);
  if (e != cudaSuccess) return e;
  constexpr int kEach = kBlocks<W, kCapacity>, kStage = stage_bytes<W>(kCapacity) + W::kSideBytes;
  // Leaves room for the blocks of the kernels before; the plan uses the same number.
  constexpr int kRing = 200 * 1024 / kEach;
  constexpr int kMost = W::template kMostStages<kCapacity>;
  static_assert(kRing / kStage <= kMaxStages);
  a.stages = kRing / kStage < kMost ? kRing / kStage : kMost;
  const Launch l = {dim3(limits.sms * kEach), dim3(kThreads), stream,
                    a.ring() + static_cast<size_t>(a.stages) * kStage};
  if (l.smem > static_cast<size_t>(limits.block_smem)) return cudaErrorInvalidValue;
  return launch(experts_tensor<kCapacity, W>, l, w13, w2, act, a);
}

/// The launch with room for about twice the mean number of an expert's rows. Room for more rows shortens the ring; with
/// less room, an expert with more rows reads its weights again.
template <class W>
cudaError_t run(const Args<W>& a, int num_ids, const CUtensorMap& w13, const CUtensorMap& w2,
                const DeviceLimits& limits, void* stream) {
  const int mean = a.num_slots() / num_ids;
  if (mean <= 18) return run<32>(a, w13, w2, limits, stream);
  if (mean <= 40) return run<64>(a, w13, w2, limits, stream);
  return run<128>(a, w13, w2, limits, stream);
}

}  // namespace moe::experts_tensor
