// Experts for 4 to a few hundred rows per expert on Hopper's warpgroup products: gate and up with SwiGLU, then the down
// product, one launch for both, over the slots that the router or moe_any_list_slots has listed by expert.
//
// Floor: touched experts * 6 H I bytes (Qwen3-30B-A3B, all 128: 1.2 GB = 263 us at 4.59 TB/s); 6 T K H I FLOPs are
// below it to about T = 2,000. So each weight is to be read once and the memory must never wait.
//
// Design: a persistent block per SM takes work tiles of 128 weight rows by ticket, all of gate and up before all of
// down: a work tile of the down product finds its expert's activations finished long ago, so nothing waits between the
// products and no block idles while another has work. Weights are the wgmma's 64-row operand, an expert's rows its
// columns, in the next larger of 8, 16, 32, 64, 128: few rows cost no more than their bytes. One producer thread fills
// a ring of 16 KB TMA tiles; before pdl_wait() it fills it with the weights of the block's first work tile, while the
// router still runs. Three warps gather token rows beside them. A slot's sums are one ascending chain over K, so they
// depend on its row only.
#include "experts/tensor.cuh"
#include "ptx/wgmma.cuh"

namespace moe::experts_tensor {
namespace {

#if MOE_SM90

/// acc += 64 weight rows x kColumns token rows over the work tile's steps, and leaves the ring behind them.
template <int kColumns>
__device__ __forceinline__ void multiply(const Block& b, int steps, Cursor& at, float (&acc)[kColumns / 2]) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  int previous = -1;
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(b.full(at.stage), at.parity);
    fence_async_shared();  // rows of x came by ordinary copies
    const uint64_t w = tile_descriptor(b.weights(at.stage) + group * 64 * 128), x = tile_descriptor(b.rows(at.stage));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileColumns / 16; ++k) wgmma<kColumns>(acc, w + 2 * k, x + 2 * k);
    wgmma_commit();
    wgmma_wait<1>();  // one stage's products run while the next stage's are issued
    if (previous >= 0 && lane == 0) mbarrier_arrive(b.empty(previous));
    previous = at.stage;
    at.advance(b.stages);
  }
  wgmma_wait<0>();
  if (lane == 0) mbarrier_arrive(b.empty(previous));
}

/// A work tile with up to kColumns rows. Of every 8 columns a lane holds two, of weight rows g and g + 8 of its warp.
template <int kColumns>
__device__ __forceinline__ void compute(const Block& b, const Args& a, const Work& work, Cursor& at) {
  constexpr int kResults = kColumns / 4;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const auto row = [](int i) { return i / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2; };
  uint32_t place[kResults];  // of each result: fetched before the products, which hide its latency
#pragma unroll
  for (int i = 0; i < kResults; ++i)
    place[i] = row(i) >= work.rows ? kNoExpert : work.product == 0 ? work.first + row(i) : work.slots[row(i)];
  float acc[kColumns / 2] = {};
  multiply<kColumns>(b, work.steps, at, acc);
#pragma unroll
  for (int i = 0; i < kResults; ++i) {
    if (place[i] == kNoExpert) continue;
    const float low = acc[i / 2 * 4 + i % 2], high = acc[i / 2 * 4 + i % 2 + 2];
    if (work.product == 0) {
      const int column = work.tile * (kTileRows / 2) + warp * 8 + g;
      a.act[static_cast<size_t>(place[i]) * a.inter + column] = __float2bfloat16(low / (1.0f + __expf(-low)) * high);
    } else {
      const int column = work.tile * kTileRows + warp * 16 + g;
      float* to = a.slot_rows + static_cast<size_t>(place[i]) * a.hidden + column;
      if (column < a.hidden) to[0] = low;
      if (column + 8 < a.hidden) to[8] = high;
    }
  }
}

/// Leaves stages behind that hold what nobody needs.
__device__ __forceinline__ void skip(const Block& b, int steps, Cursor& at) {
  for (int i = 0; i < steps; ++i, at.advance(b.stages)) {
    mbarrier_wait(b.full(at.stage), at.parity);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(b.empty(at.stage));
  }
}

template <int kCapacity>
__device__ __forceinline__ void consume(const Block& b, const Args& a) {
  Cursor at;
  for_each_work(b, [&](const Work& work) {
    if (work.rows == 0) return skip(b, work.steps, at);
    if (work.rows <= 8) compute<8>(b, a, work, at);
    else if (work.rows <= 16) compute<16>(b, a, work, at);
    else if (kCapacity == 32 || work.rows <= 32) compute<32>(b, a, work, at);
    else if constexpr (kCapacity > 32) {
      if (kCapacity == 64 || work.rows <= 64) compute<64>(b, a, work, at);
      else if constexpr (kCapacity > 64) compute<128>(b, a, work, at);
    }
    if (work.product == 1) return;
    fence_async_proxy();  // the copy engine of another block reads them
    named_barrier(1, kConsumers * 32);
    if (threadIdx.x == 0) {
      add_release(a.counters.progress(work.expert), work.rows);
      add_release(a.counters.finished(), work.rows);
    }
  });
}

#endif  // MOE_SM90

template <int kCapacity>
__global__ void __launch_bounds__(kThreads, 1)
    experts_tensor(const __grid_constant__ CUtensorMap w13, const __grid_constant__ CUtensorMap w2,
                   const __grid_constant__ CUtensorMap act, const __grid_constant__ Args a) {
#if MOE_SM90
  extern __shared__ __align__(1024) uint8_t smem[];
  const Block b = {smem, smem + a.ring(), a.stages, stage_bytes(kCapacity)};
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&w13);
    prefetch_tensor_map(&w2);
    prefetch_tensor_map(&act);
    for (int i = 0; i < a.stages; ++i) {
      mbarrier_init(b.full(i), 1 + kGatherLanes);
      mbarrier_init(b.empty(i), kConsumers);
    }
    for (int i = 0; i < Block::kWorkSlots; ++i) {
      mbarrier_init(b.work_full(i), 1);
      mbarrier_init(b.work_empty(i), kConsumers + kGatherers);
    }
    mbarrier_fence_init();
  }
  __syncthreads();
  pdl_launch_dependents();
  Producer producer = {b, a, &w13, &w2};
  int ready = 0;
  if (warp == kConsumers && elect_one()) ready = producer.guess();
  __syncwarp();
  pdl_wait();
  fill_table(b, a);
  if (warp < kConsumers) {
    consume<kCapacity>(b, a);
  } else if (warp == kConsumers) {
    if (elect_one()) producer.run<kCapacity>(ready);
    __syncwarp();
  } else {
    gather<kCapacity>(b, a, &act);
  }
  clear_counters(a.counters, b.flag());
#endif
}

template <int kCapacity>
cudaError_t run(Args a, const bf16* w13, const bf16* w2, void* stream) {
  DeviceLimits limits;
  cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  CUtensorMap w13_map, w2_map, act_map;
  e = map_gate_up(&w13_map, w13, a.num_local, a.inter, a.hidden);
  if (e == cudaSuccess) e = make_tensor_map(&w2_map, w2, a.num_local * a.hidden, a.inter, kTileRows);
  if (e == cudaSuccess) e = make_tensor_map(&act_map, a.act, a.num_slots(), a.inter, kActRows);
  if (e != cudaSuccess) return e;
  constexpr int kRing = 200 * 1024;  // leaves room for the blocks of the kernels ahead
  a.stages = kRing / stage_bytes(kCapacity);
  static_assert(kRing / stage_bytes(kCapacity) <= kMaxStages);
  const Launch l = {dim3(limits.sms), dim3(kThreads), stream,
                    a.ring() + static_cast<size_t>(a.stages) * stage_bytes(kCapacity)};
  if (l.smem > static_cast<size_t>(limits.block_smem)) return cudaErrorInvalidValue;
  return launch(experts_tensor<kCapacity>, l, w13_map, w2_map, act_map, a);
}

}  // namespace
}  // namespace moe::experts_tensor

/// Words of `counters`.
extern "C" int moe_experts_tensor_counters(int num_local) {
  return moe::experts_tiles::Counters::kHead + 2 * num_local;
}

/// Where in `counters` the router may count, which the launch leaves zero.
extern "C" int moe_experts_tensor_counts() { return moe::experts_tiles::Counters::kHead; }

/// slot_rows[slot] = w2[e] (silu(gate) * up) in f32, gate and up from w13[e] x[slot / K], of each slot that has a local
/// expert e. Must follow the routing on the stream. Hopper only; H and I are multiples of 64.
extern "C" int moe_experts_tensor(const moe::ExpertsTensorArgs* args, void* stream) {
  using namespace moe;
  using namespace moe::experts_tensor;
  const ExpertsTensorArgs& c = *args;
  if (c.tokens < 0 || c.top_k <= 0 || c.num_ids <= 0 || c.num_local <= 0 || c.hidden <= 0 || c.inter <= 0 ||
      c.hidden % 64 != 0 || c.inter % 64 != 0 || c.num_local > INT32_MAX / c.hidden || c.tokens > INT32_MAX / c.top_k ||
      c.bucket < 0)
    return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  const Args a = {c.x,
                  c.slots,
                  c.counts,
                  c.act,
                  static_cast<float*>(c.slot_rows),
                  {c.counters, c.num_local},
                  c.bucket,
                  c.tokens,
                  c.top_k,
                  c.num_local,
                  c.hidden,
                  c.inter,
                  0,
                  c.tokens * c.top_k >= 2 * c.num_ids};
  // Place for more rows shortens the ring; an expert with more rows than that reads its weights again.
  const int mean = c.tokens * c.top_k / c.num_ids;
  if (mean <= 18) return run<32>(a, c.w13, c.w2, stream);
  if (mean <= 40) return run<64>(a, c.w13, c.w2, stream);
  return run<128>(a, c.w13, c.w2, stream);
}
