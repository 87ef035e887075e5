// The weight-streaming expert kernel, for weights of any kind (bf16 and the design: experts/stream.cu; quantised:
// quant/experts_stream.cu).
//
// A kind of weights determines how much of them a stage holds (set_chunks, on the host), fills the stages of a tile
// (load_tile, called by each of the loading warps) and multiplies them (multiply, called by each of the consuming
// warps). Its `epilogue` (epilogue.cuh) makes results of sums.
#pragma once

#include "experts/combine.cuh"
#include "experts/stream_consume.cuh"

namespace moe::stream {

/// All blocks of the launch meet here once. What a block wrote before is visible to all blocks after.
__device__ inline void grid_barrier(uint32_t* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    add_release(arrived, 1);
    while (load_acquire(arrived) != gridDim.x) {}
    __threadfence();
  }
  __syncthreads();
}

template <int kPass, class Weights>
__global__ __launch_bounds__(kThreads, 1) void experts_stream(const __grid_constant__ Weighted<Weights> a) {
  extern __shared__ __align__(128) uint8_t smem[];
  Block<Weights> b = {a, layout(a, kPass), smem, 0, 0};
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
  b.left = *reinterpret_cast<const volatile uint64_t*>(a.flags);  // used later: the load is in flight meanwhile
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
inline int even_chunk(int depth, int limit) { return round_up(ceil_div(depth, ceil_div(depth, limit)), 64); }

/// The number of stages for which there is room next to everything else.
inline int stages_that_fit(Args a, int pass, int block_smem) {
  a.stages = 0;
  const Layout l = layout(a, pass);
  const int stages = (block_smem - static_cast<int>(l.total)) / a.stage_bytes;
  return stages < kMaxStages ? stages : kMaxStages;
}

/// Fills in chunks and stages for this number of columns and this chunk limit; false if the ring would be too short.
template <class Weights>
bool plan(Weighted<Weights>* a, int pass, int chunk_limit, int block_smem) {
  a->chunk[0] = even_chunk(a->hidden, 2 * chunk_limit);  // its stages have half as many rows
  a->chunk[1] = even_chunk(a->inter, chunk_limit);
  a->stage_bytes = a->w.set_chunks(*a);
  a->stages = stages_that_fit(*a, pass, block_smem);
  return a->stages >= kMinStages && align_bytes(*a) <= static_cast<uint32_t>(a->stages * a->stage_bytes);
}

/// Tries most columns first, because a second read of weights costs most, then the longest stages. 0 = nothing fits.
template <class Weights>
int choose_plan(Weighted<Weights>* a, int first_pass, int chunk_limit, int block_smem) {
  for (int pass = first_pass; pass >= 8; pass /= 2)
    for (int limit = chunk_limit; limit >= 256; limit /= 2)
      if (plan(a, pass, limit, block_smem)) return pass;
  return 0;
}

/// Launches a kernel for `pass` columns, for which `a` has been planned.
template <class Weights>
Launch launch_of(const Weighted<Weights>& a, int pass, const DeviceLimits& limits, void* stream) {
  Launch l = {dim3(limits.sms), dim3(kThreads), stream, layout(a, pass).total};
  l.cooperative = true;
  return l;
}

/// The fields that the launchers' arguments share.
template <class Launcher>
Args common_args(const Launcher& c) {
  Args a = {};
  a.x = c.x, a.topk_ids = c.topk_ids, a.topk_weights = c.topk_weights, a.expert_map = c.expert_map;
  a.act = c.act, a.slot_rows = c.slot_rows;
  if (c.output == Output::kF32) a.out_f32 = static_cast<float*>(c.out);
  else a.out = static_cast<bf16*>(c.out);
  a.flags = c.flags, a.flag_set = (c.flag_words - kFlagHeader) / 2;
  a.tokens = c.tokens, a.top_k = c.top_k, a.num_ids = c.num_ids;
  return a;
}

/// Whether a launcher accepts these arguments.
inline bool launchable(const Args& a, Output output) {
  return a.tokens >= 0 && a.top_k > 0 && a.num_ids > 0 && a.num_local > 0 && a.num_local <= INT16_MAX && a.hidden > 0 &&
         a.inter > 0 && a.hidden % 64 == 0 && a.inter % 64 == 0 && a.tokens <= kMaxSlots / a.top_k &&
         is_code(output, Output::kBf16);
}

}  // namespace moe::stream
