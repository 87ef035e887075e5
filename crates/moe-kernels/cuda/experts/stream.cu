// Experts for few rows per expert: gate and up products with SwiGLU, down product and weighted sum over k,
// from topk_ids to token rows in one launch that streams every touched weight once.
//
// Floor: touched experts * 6 H I bytes; 6 T K H I FLOPs are far below it (T = 256 on 128 experts, top 8:
// 16 rows per expert, 16 FLOP per byte). So only bytes in flight count.
//
// Design: one persistent block per SM takes consecutive 16-row weight tiles of both products
// (stream_block.cuh says which). Two warps do nothing but copy weights into a ring that fills shared
// memory, through both products without a pause: while the down product waits for the activations of other
// blocks, its weights are already on the way. The weights are the mma's 16 rows, the slots its 8 columns; so
// one token costs no more than eight, and the eight consumer warps split K, which keeps the tile small
// enough to spread 8 experts over 132 SMs. Their partial sums are added in warp order: a slot's
// bits depend on its own row and on the length of a stage, not on the batch beside it.
//
// Measured, one H200 (141 GB), Qwen3-30B-A3B: 2.58 TB/s at T = 1, 3.85 at 8, 4.10 at 32, 3.83 at 128; docs/kernels.md
// has the rest.
//
// Blocks wait for each other (flags per group), so the launch is cooperative. The flags come in two sets: a
// launch uses one and clears the other, so clearing costs no time and one zeroed buffer serves all launches.
#include "experts/combine.cuh"
#include "experts/stream_consume.cuh"

namespace moe::stream {
namespace {

/// All blocks of the launch meet here, once; what they wrote before is visible to all after.
__device__ void grid_barrier(uint32_t* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    add_release(arrived, 1);
    while (load_acquire(arrived) != gridDim.x) {}
    __threadfence();
  }
  __syncthreads();
}

template <int kPass>
__global__ __launch_bounds__(kThreads, 1) void experts_stream(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) uint8_t smem[];
  Block b = {a, layout(a, kPass), smem, 0, 0};
  if (threadIdx.x == 0) {
    for (int s = 0; s < a.stages; ++s) {
      mbarrier_init(b.full(s), kLoaders * copy_arrivals());
      mbarrier_init(b.empty(s), kConsumers * kWarpArrivals);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(b.rows_full(i), copy_arrivals());
      mbarrier_init(b.rows_empty(i), kConsumers * kWarpArrivals);
    }
    for (int i = 0; i < 4; ++i) mbarrier_init(b.run_full(i), 1);
    mbarrier_fence_init();
  }
  pdl_wait();
  b.left = *reinterpret_cast<const volatile uint64_t*>(a.flags);  // used later: in flight meanwhile
  b.groups = build_groups<kPass>(a, smem, b.l);
  const int warp = threadIdx.x / 32;
  if (warp < kConsumers) {
    const Flags flags(a, b.left);
    for (int i = blockIdx.x * kConsumers * 32 + threadIdx.x; i < a.flag_set; i += gridDim.x * kConsumers * 32)
      flags.other[i] = 0;
    consume<kPass>(b);
    pdl_launch_dependents();
  } else if (warp < kConsumers + kLoaders) {
    load_weights(b);
  } else {
    load_rows<kPass>(b);
  }
  if (a.out != nullptr || a.out_f32 != nullptr) {
    grid_barrier(Flags(a, b.left).arrived());
    combine_share(Combine<float>{a.slot_rows, a.topk_ids, a.topk_weights, a.expert_map, a.out, a.out_f32, a.tokens,
                                 a.top_k, a.num_ids, a.num_local, a.hidden});
  }
  if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long*>(a.flags), 1ull);
}

/// Elements per stage: `depth` in equal parts of at most `limit`, each a multiple of 64.
int even_chunk(int depth, int limit) { return round_up(ceil_div(depth, ceil_div(depth, limit)), 64); }

/// Columns per pass: few enough that the ring stays deep, enough that most experts need one pass.
int choose_pass(const Args& a) {
  const int mean = a.slots() / a.num_local;
  return mean <= 2 ? 8 : mean <= 8 ? 16 : 32;
}

/// Stages that fit beside everything else.
int stages_that_fit(Args a, int pass, int block_smem) {
  a.stages = 0;
  const Layout l = layout(a, pass);
  const int stages = (block_smem - static_cast<int>(l.total)) / static_cast<int>(l.stage_bytes);
  return stages < kMaxStages ? stages : kMaxStages;
}

/// Fills in chunks and stages for this many columns and this chunk limit; false if the ring would be too short.
bool plan(Args* a, int pass, int chunk_limit, int block_smem) {
  a->chunk[0] = even_chunk(a->hidden, 2 * chunk_limit);  // its stages are half as high
  a->chunk[1] = even_chunk(a->inter, chunk_limit);
  a->stages = stages_that_fit(*a, pass, block_smem);
  return a->stages >= kMinStages && align_bytes(*a) <= a->stages * layout(*a, pass).stage_bytes;
}

/// Most columns first, because a second read of weights costs most; then the longest stages. 0 = nothing fits.
int choose_plan(Args* a, int chunk_limit, int block_smem) {
  for (int pass = choose_pass(*a); pass >= 8; pass /= 2)
    for (int limit = chunk_limit; limit >= 256; limit /= 2)
      if (plan(a, pass, limit, block_smem)) return pass;
  return 0;
}

cudaError_t run(Args a, int pass, int chunk_limit, void* stream) {
  if (kSetHeader + max_groups(a.slots(), a.num_local, 8) > a.flag_set) return cudaErrorInvalidValue;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (pass == 0) pass = choose_plan(&a, chunk_limit, limits.block_smem);
  else if (!plan(&a, pass, chunk_limit, limits.block_smem)) pass = 0;
  if (pass == 0) return cudaErrorInvalidValue;
  Launch l = {dim3(limits.sms), dim3(kThreads), stream, layout(a, pass).total};
  l.cooperative = true;
  switch (pass) {
    case 8: return launch(experts_stream<8>, l, a);
    case 16: return launch(experts_stream<16>, l, a);
    case 32: return launch(experts_stream<32>, l, a);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace moe::stream

/// Words of the zeroed `flags` buffer that launches with up to `slots` slots may share.
extern "C" int moe_experts_stream_flags(int slots, int num_local) {
  using namespace moe::stream;
  return kFlagHeader + 2 * (kSetHeader + max_groups(slots, num_local, 8));
}

/// As `moe_experts_stream`, with the choices that it makes itself: columns per pass (8, 16, 32; 0 = choose),
/// elements along K of a stage of 16 rows. For tests and for tuning.
extern "C" int moe_experts_stream_planned(const moe::ExpertsStreamArgs* args, int pass, int chunk, void* stream) {
  using namespace moe;
  const ExpertsStreamArgs& c = *args;
  if (c.tokens < 0 || c.top_k <= 0 || c.num_ids <= 0 || c.num_local <= 0 || c.num_local > INT16_MAX || c.hidden <= 0 ||
      c.inter <= 0 || c.hidden % 64 != 0 || c.inter % 64 != 0 || c.tokens > stream::kMaxSlots / c.top_k || chunk < 64 ||
      !is_code(c.output, Output::kBf16))
    return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  const bool is_f32 = c.output == Output::kF32;
  const int flag_set = (c.flag_words - stream::kFlagHeader) / 2;
  const stream::Args a = {c.x,
                          c.w13,
                          c.w2,
                          c.topk_ids,
                          c.topk_weights,
                          c.expert_map,
                          c.act,
                          c.slot_rows,
                          is_f32 ? nullptr : static_cast<bf16*>(c.out),
                          is_f32 ? static_cast<float*>(c.out) : nullptr,
                          c.flags,
                          flag_set,
                          c.tokens,
                          c.top_k,
                          c.num_ids,
                          c.num_local,
                          c.hidden,
                          c.inter,
                          {0, 0},
                          0};
  return stream::run(a, pass, chunk, stream);
}

/// out[t] = sum over k of topk_weights[t, k] * w2[e] (silu(gate) * up), gate and up from w13[e] x[t], e = topk_ids[t,
/// k]. Refuses T K > 2048, H or I that are no multiple of 64, and H too large for shared memory.
extern "C" int moe_experts_stream(const moe::ExpertsStreamArgs* args, void* stream) {
  return moe_experts_stream_planned(args, 0, 1024, stream);
}
