// Experts for 4 to a few hundred rows per expert on Hopper's warpgroup products: gate and up with SwiGLU, then the down
// product, one launch for both, over the slots that the router or moe_any_list_slots has listed by expert.
//
// Floor: touched experts * 6 H I bytes (Qwen3-30B-A3B, all 128: 1.2 GB = 263 us at 4.59 TB/s). 6 T K H I FLOPs take
// less up to about T = 2,000. So each weight must be read once, and the memory must never wait.
//
// Design: a persistent block per SM takes work tiles of 128 weight rows by ticket, all of gate and up before all of
// down. When a work tile of the down product begins, its expert's activations were finished long ago, so nothing waits
// between the products and no block idles while another has work. Weights are the wgmma's 64-row operand and an
// expert's rows its columns, in the next larger of 8, 16, 32, 64, 128: few rows cost no more than their bytes. One
// producer thread fills a ring of 16 KB TMA tiles. Before pdl_wait() it fills it with the weights of the block's first
// work tile, while the router still runs. Three warps gather token rows at the same time. A slot's sums are one
// ascending chain over K, so they depend on its row only.
#include "experts/tensor_kernel.cuh"

namespace moe::experts_tensor {

/// Rows of bf16, loaded by tensor maps, which write the swizzle that wgmma reads.
template <class E>
struct Bf16Weights : PlainWeights, CopiedRows {
  using Epilogue = E;
  using Self = Bf16Weights;
  static constexpr int kColumns = kTileColumns, kBytes = kWeightBytes;
  template <int kCapacity>
  static constexpr int kFewBlocks = 1;
  template <int kCapacity>
  static constexpr int kConsumerRegisters = 0;

#if MOE_HAS_WGMMA
  static __device__ __forceinline__ void load(void* to, const CUtensorMap* map, const Args<Self>& a, int product,
                                              int expert, int tile, int step, uint64_t* bar, uint64_t policy) {
    load_weights(to, map, product, expert, tile, a.hidden, step, bar, policy);
  }

  /// acc += 64 weight rows x kRows token rows over the work tile's steps. `at` is then past these steps.
  template <int kCapacity, int kRows>
  static __device__ __forceinline__ void multiply(const Block<Self>& b, const Args<Self>&, const Work& work, Cursor& at,
                                                  float (&acc)[kRows / 2]) {
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
    int previous = -1;
    for (int step = 0; step < work.steps; ++step) {
      mbarrier_wait(b.full(at.stage), at.parity);
      fence_async_shared();  // ordinary stores wrote the rows of x
      const uint64_t w = tile_descriptor(b.weights(at.stage) + group * 64 * 128), x = tile_descriptor(b.rows(at.stage));
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kTileColumns / 16; ++k) wgmma<kRows>(acc, w + 2 * k, x + 2 * k);
      wgmma_commit();
      wgmma_wait<1>();  // one stage's products run while the next ones are issued
      if (previous >= 0 && lane == 0) mbarrier_arrive(b.empty(previous));
      previous = at.stage;
      at.advance(b.stages);
    }
    wgmma_wait<0>();
    if (lane == 0) mbarrier_arrive(b.empty(previous));
  }
#endif
};

/// Launches the kernel whose weights have this epilogue.
template <class Epilogue>
cudaError_t run_bf16(const ExpertsTensorArgs& c, const CUtensorMap& w13, const CUtensorMap& w2,
                     const DeviceLimits& limits, const Epilogue& epilogue, void* stream) {
  const Args<Bf16Weights<Epilogue>> a = {c.x,
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
                                         c.tokens * c.top_k >= 2 * c.num_ids,
                                         {},
                                         epilogue};
  return run(a, c.num_ids, w13, w2, limits, stream);
}

}  // namespace moe::experts_tensor

/// The number of words of `counters`. Their order depends on num_local: calls with another num_local need other
/// counters.
extern "C" int moe_experts_tensor_counters(int num_local) { return moe::experts_tiles::Counters::all_words(num_local); }

/// The index in `counters` where the router may count. The launch leaves these words zero.
extern "C" int moe_experts_tensor_counts() { return moe::experts_tiles::Counters::kHead; }

/// slot_rows[slot] = w2[e] (silu(gate) * up) in f32, gate and up from w13[e] x[slot / K], for each slot that has a
/// local expert e; biases and another activation as `epilogue` says. It must follow the routing on the stream. Hopper
/// only; H and I are multiples of 64.
extern "C" int moe_experts_tensor(const moe::ExpertsTensorArgs* args, void* stream) {
  using namespace moe;
  using namespace moe::experts_tensor;
  const ExpertsTensorArgs& c = *args;
  if (!sizes_fit(c.tokens, c.top_k, c.num_ids, c.num_local, c.hidden, c.inter, c.bucket)) return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  DeviceLimits limits;
  cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  CUtensorMap w13, w2;
  e = map_gate_up(&w13, c.w13, c.num_local, c.inter, c.hidden);
  if (e == cudaSuccess) e = make_tensor_map(&w2, c.w2, c.num_local * c.hidden, c.inter, kTileRows);
  if (e != cudaSuccess) return e;
  return with_epilogue(c.epilogue, [&](auto epilogue) { return run_bf16(c, w13, w2, limits, epilogue, stream); });
}
