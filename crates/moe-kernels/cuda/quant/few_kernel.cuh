// The kernel of quantised experts with few rows each: work tiles, tickets, ring and consuming warps of
// experts/tensor_kernel.cuh, with as few instructions beside the products (experts_few.cuh) as can be.
//
// One warp gathers token rows of both products, another what lies beside the weights, and a third publishes activations
// when all consumers have stored theirs, so that these neither wait for each other nor for the fence. All of them sleep
// while they wait.
#pragma once

#include "quant/experts_few.cuh"

namespace moe::experts_few {

using namespace experts_tensor;

enum : int { kLoader = kConsumers, kRowGatherer, kSideGatherer, kPublisher };
static_assert((kPublisher + 1) * 32 == kThreads);

/// Blocks of an SM: with room for 32 rows of an expert two, else three.
template <int kCapacity>
constexpr int kFewBlocks = kCapacity == 16 ? 3 : 2;
/// Registers of a consuming thread.
template <int kCapacity>
constexpr int kTaken = kCapacity == 16 ? 64 : 88;

#if MOE_SM90

/// A lane's part of a work tile's token rows: 16 bytes of every fourth row in each 64 columns. One whole warp.
template <int kCapacity, class W>
struct FewRows {
  static constexpr int kApart = 4, kEach = kCapacity / kApart, kPiece = 8;  // elements of a copy
  const bf16* all;
  uint32_t from[kEach];  // in pieces
  int rows;

  __device__ __forceinline__ FewRows(const Args<W>& a, const Work& work)
      : all(work.product == 0 ? a.x : a.act), rows(work.rows) {
    const int lane = threadIdx.x % 32;
    uint32_t row = work.first + lane;  // of this lane's row, of 32
    if (work.product == 0 && lane < rows) row = work.slots[lane] / a.top_k;
    row *= (work.product == 0 ? a.hidden : a.inter) / kPiece;
#pragma unroll
    for (int i = 0; i < kEach; ++i) from[i] = __shfl_sync(0xffffffffu, row, i * kApart + lane / 8) + lane % 8;
  }

  /// Those of the next step. `left`: columns from there on; behind them a row is zero.
  __device__ __forceinline__ void copy(uint8_t* to, int left) {
    const int lane = threadIdx.x % 32;
    const int own = lane / 8;  // row of every four
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i * kApart >= rows) break;
      if (i * kApart + own >= rows) continue;
      const bf16* piece = all + static_cast<size_t>(from[i]) * kPiece;
      uint8_t* at = to + (i * kApart + own) * 128 + (lane % 8 ^ own ^ i % 2 * kApart) * 16;
      cp_async16(at, piece);
#pragma unroll
      for (int part = 1; part < W::kColumns / kTileColumns; ++part)
        cp_async16_or_zero(at + part * (kCapacity * 128), piece + part * kTileColumns, part * kTileColumns < left);
      from[i] += W::kColumns / kPiece;
    }
  }
};

/// Brings token rows. One warp. Activations are read by ordinary copies, so no fence need follow the wait for them.
template <int kCapacity, class W>
__device__ __forceinline__ void gather_rows(const Block<W>& b, const Args<W>& a) {
  Cursor at;
  for_each_work(b, [&](const Work& work) {
    FewRows<kCapacity, W> rows(a, work);
    if (work.product == 1 && threadIdx.x % 32 == 0) {
      const uint32_t all = work.total * a.tiles(0);
      while (load_acquire(a.counters.progress(work.expert)) < all) {}
    }
    __syncwarp();
    int left = work.product == 0 ? a.hidden : a.inter;
    for (int step = 0; step < work.steps; ++step, at.advance(b.stages), left -= W::kColumns) {
      mbarrier_sleep(b.empty(at.stage), at.parity ^ 1);
      rows.copy(b.rows(at.stage), left);
      cp_async_arrive(b.full(at.stage));
      __syncwarp();
    }
  });
}

/// Brings what lies beside the weights. One warp.
template <class W>
__device__ __forceinline__ void gather_side(const Block<W>& b, const Args<W>& a) {
  Cursor at;
  for_each_work(b, [&](const Work& work) {
    const auto side = W::side(a, work.product, work.expert, work.tile, threadIdx.x % 32);
    for (int step = 0; step < work.steps; ++step, at.advance(b.stages)) {
      mbarrier_sleep(b.empty(at.stage), at.parity ^ 1);
      side.copy(b.side(at.stage), step);
      cp_async_arrive(b.full(at.stage));
      __syncwarp();
    }
  });
}

/// Publishes activations of each work tile of the first product. One thread. It gives a work tile back when that is
/// done, so that consumers never finish the next one in its place before.
template <class W>
__device__ __forceinline__ void publish_all(const Block<W>& b, const Args<W>& a) {
  for (int i = 0;; ++i) {
    const uint32_t parity = i / Block<W>::kWorkSlots & 1;
    mbarrier_sleep(b.work_full(i), parity);
    const Work work = *b.work(i);
    if (work.product < 0) return;
    mbarrier_sleep(b.done(i), parity);
    if (work.product == 0 && work.rows > 0) publish(a, work);
    mbarrier_arrive(b.work_empty(i));
  }
}

#endif  // MOE_SM90

template <int kCapacity, class W>
__global__ void __launch_bounds__(kThreads, kFewBlocks<kCapacity>)
    experts_few(const __grid_constant__ CUtensorMap w13, const __grid_constant__ CUtensorMap w2,
                const __grid_constant__ Args<W> a) {
#if MOE_SM90
  // What consumers take the other warps give: there are half as many.
  constexpr int kEach = 65536 / (kFewBlocks<kCapacity> * kThreads) / 8 * 8;
  extern __shared__ __align__(1024) uint8_t smem[];
  const Block<W> b = {smem, smem + a.ring(), a.stages, stage_bytes<W>(kCapacity)};
  const int warp = threadIdx.x / 32;
  begin(b, 2 * 32, kThreads / 32 - 1, &w13, &w2);
  pdl_launch_dependents();
  Producer<W> producer = {b, a, &w13, &w2};
  int ready = 0;
  if (warp == kLoader && elect_one()) ready = producer.guess();
  __syncwarp();
  pdl_wait();
  fill_table(b, a);
  if (warp < kConsumers) {
    take_registers<kTaken<kCapacity>>();
    int finished = 0;
    consume<kCapacity>(b, a, [&](const Work&) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(b.done(finished));
      ++finished;
    });
  } else {
    give_registers<3 * kEach - 2 * kTaken<kCapacity>>();
    if (warp == kLoader) {
      if (elect_one()) producer.template run<kCapacity>(ready);
    } else if (warp == kRowGatherer) {
      gather_rows<kCapacity>(b, a);
    } else if (warp == kSideGatherer) {
      gather_side(b, a);
    } else if (elect_one()) {
      publish_all(b, a);
    }
    __syncwarp();
  }
  clear_counters(a.counters, b.flag());
#endif
}

template <int kCapacity, class W>
cudaError_t run(Args<W> a, const CUtensorMap& w13, const CUtensorMap& w2, const DeviceLimits& limits, void* stream) {
  constexpr int kBlocks = kFewBlocks<kCapacity>, kStage = stage_bytes<W>(kCapacity) + W::kSideBytes;
  constexpr int kRing = 200 * 1024 / kBlocks;  // leaves room for the blocks of the kernels ahead
  static_assert(kRing / kStage <= kMaxStages);
  a.stages = kRing / kStage;
  const Launch l = {dim3(limits.sms * kBlocks), dim3(kThreads), stream,
                    a.ring() + static_cast<size_t>(a.stages) * kStage};
  if (l.smem > static_cast<size_t>(limits.block_smem)) return cudaErrorInvalidValue;
  return launch(experts_few<kCapacity, W>, l, w13, w2, a);
}

}  // namespace moe::experts_few
