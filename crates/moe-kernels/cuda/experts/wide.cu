// Experts for prompts, 32 rows per expert and more, at the rate of Hopper's tensor cores: gate and up with SwiGLU, then
// the down product, one launch for both, over the slots that the router or moe_any_list_slots has listed by expert.
//
// Floor: 6 T K H I FLOPs (Qwen3-30B-A3B, T = 8,192: 618 GFLOP; 1,104 us at 560 TFLOP/s, 936 at 660) and, below about
// 3,000 tokens, the weights' 1.2 GB.
//
// Design: as in tensor.cu a persistent block per SM takes work tiles by ticket, all of gate and up before all of down,
// and weights are the wgmma's rows, so that an expert's last rows cost columns of 16. But a tile has 128 weight rows x
// up to 256 token rows, two warpgroups of 128 sums a thread: of shared memory, which feeds the tensor cores, and of L2,
// which feeds shared memory, it asks least. Where experts have up to 128 rows it is 256 weight rows: then rows come out
// of L2 half as often beside the weights, which are what takes time. An expert's rows are spread evenly over as few
// such tiles as hold them. Each warpgroup rounds and stores its own results (wide_store.cuh), and the ring lets them
// drift apart, so that one's stores run beside the other's products; an order held by force was slower
// (docs/kernels-labbook.md). A slot's sums are one ascending chain over K, so they depend on its row only.
#include "experts/wide_store.cuh"

namespace moe::experts_wide {
namespace {

#if MOE_SM90

// Of 65,536 registers: 2 x 128 x 208 + 128 x 88.
constexpr int kConsumerRegisters = 208, kLoaderRegisters = 88;

/// kWidth: weight tiles of a work tile.
template <int kWidth>
struct Consumer {
  static constexpr int kRows = kMostRows / kWidth;
  const Block& b;
  const Args& a;
  Store store = {b, a};
  Cursor at = {};

  /// sums = 64 weight rows of each weight tile x kColumns token rows over the work tile's steps, and leaves the ring
  /// behind them.
  template <int kColumns>
  __device__ __forceinline__ void multiply(const Work& work, float (&sums)[kSums]) {
    int previous = -1;
    for (int step = 0; step < work.steps; ++step) {
      mbarrier_wait(b.full(at.stage), at.parity);
      if (work.product == 0) fence_async_shared();  // rows of x came by ordinary copies
      uint64_t w[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        w[i] = tile_descriptor(b.weights(at.stage) + i * kWeightBytes + store.group * 64 * 128);
      const uint64_t x = tile_descriptor(b.rows(at.stage));
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kTileColumns / 16; ++k) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          wgmma<kColumns>(sums + i * kPairSums, w[i] + 2 * k, x + 2 * k, k > 0 || step > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();  // one stage's products run while the next stage's are issued
      if (previous >= 0 && store.lane == 0) mbarrier_arrive(b.empty(previous));
      previous = at.stage;
      at.advance(b.stages);
    }
    wgmma_wait<0>();
    if (store.lane == 0) mbarrier_arrive(b.empty(previous));
  }

  /// With as few columns as hold the rows.
  template <int kColumns = kGranule>
  __device__ __forceinline__ void multiply_rows(const Work& work, float (&sums)[kSums]) {
    if constexpr (kColumns < kRows) {
      if (work.rows > kColumns) return multiply_rows<kColumns + kGranule>(work, sums);
    }
    multiply<kColumns>(work, sums);
  }

  __device__ __forceinline__ void run() {
    float sums[kSums] = {};  // one array for all work, which overwrites it: two would not fit
    for_each_work(b, [&](const Work& work) {
      if (work.product == 0) {
        multiply_rows(work, sums);
        wgmma_hold(sums);
        store.publish();
#pragma unroll
        for (int i = 0; i < kWidth; ++i) store.activations<kRows>(work, work.tile + i, sums + i * kPairSums);
      } else {
        store.publish();  // before waiting for others
        uint32_t slots[kRows / 16];
        store.fetch_slots<kRows>(work, slots);
        multiply_rows(work, sums);
        wgmma_hold(sums);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) store.slot_rows<kRows>(work, work.tile + i, sums + i * kPairSums, slots);
      }
    });
    store.publish();
  }
};

#endif  // MOE_SM90

template <int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    experts_wide(const __grid_constant__ CUtensorMap w13, const __grid_constant__ CUtensorMap w2,
                 const __grid_constant__ CUtensorMap act, const __grid_constant__ Args a) {
#if MOE_SM90
  extern __shared__ __align__(1024) uint8_t smem[];
  uint8_t* staging = smem + a.staging();
  const Block b = {smem, staging, staging + kStaging, a.stages(), a.stage_bytes(), a.width * kWeightBytes};
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&w13);
    prefetch_tensor_map(&w2);
    prefetch_tensor_map(&act);
    for (int i = 0; i < b.stages; ++i) {
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
  pdl_wait();
  if (warp == 0) scan_counts(b, a);
  __syncthreads();
  if (warp < kConsumers) {
    take_registers<kConsumerRegisters>();
    Consumer<kWidth>{b, a}.run();
  } else {
    give_registers<kLoaderRegisters>();
    if (warp > kConsumers) {
      Gatherer{b, a, &act}.run();
    } else if (elect_one()) {
      Producer{b, a, &w13, &w2}.run();
    }
    __syncwarp();
  }
  clear_counters(a.counters, b.flag());
#endif
}

/// Fewer rows per expert leave more of the ring to the weights, which are then what takes time.
int capacity_for(int mean_rows) { return mean_rows <= 40 ? 64 : mean_rows <= 96 ? kPairRows : kMostRows; }

}  // namespace
}  // namespace moe::experts_wide

/// slot_rows[slot] = w2[e] (silu(gate) * up), summed in f32 and rounded to bf16, gate and up from w13[e] x[slot / K],
/// of each slot that has a local expert e. Must follow the routing on the stream. `counters` as for moe_experts_tensor.
/// Hopper only; H and I are multiples of 64.
extern "C" int moe_experts_wide(const moe::ExpertsTensorArgs* args, void* stream) {
  using namespace moe;
  using namespace moe::experts_wide;
  const ExpertsTensorArgs& c = *args;
  if (c.tokens < 0 || c.top_k <= 0 || c.num_ids <= 0 || c.num_local <= 0 || c.hidden <= 0 || c.inter <= 0 ||
      c.hidden % 64 != 0 || c.inter % 64 != 0 || c.num_local > INT32_MAX / c.hidden || c.tokens > INT32_MAX / c.top_k ||
      c.bucket < 0)
    return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  const int capacity = capacity_for(c.tokens * c.top_k / c.num_ids);
  const Args a = {c.x,
                  c.slots,
                  c.counts,
                  c.act,
                  static_cast<bf16*>(c.slot_rows),
                  {c.counters, c.num_local},
                  c.bucket,
                  c.tokens,
                  c.top_k,
                  c.num_local,
                  c.hidden,
                  c.inter,
                  capacity <= kPairRows && c.inter % kTileRows == 0 && c.hidden % (2 * kTileRows) == 0 ? 2 : 1,
                  capacity};
  DeviceLimits limits;
  cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  if (a.smem() > limits.block_smem) return cudaErrorInvalidValue;
  CUtensorMap w13_map, w2_map, act_map;
  e = map_gate_up(&w13_map, c.w13, c.num_local, c.inter, c.hidden);
  if (e == cudaSuccess) e = make_tensor_map(&w2_map, c.w2, c.num_local * c.hidden, c.inter, kTileRows);
  if (e == cudaSuccess) e = make_tensor_map(&act_map, a.act, a.num_slots(), c.inter, kActRows);
  if (e != cudaSuccess) return e;
  const Launch l = {dim3(limits.sms), dim3(kThreads), stream, static_cast<size_t>(a.smem())};
  return launch(a.width == 2 ? experts_wide::experts_wide<2> : experts_wide::experts_wide<1>, l, w13_map, w2_map,
                act_map, a);
}
