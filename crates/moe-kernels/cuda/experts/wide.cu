// Experts for prompts, with 32 rows per expert and more, at the rate of Hopper's tensor cores. One launch computes gate
// and up with SwiGLU, then the down product, over the slots that the router or moe_any_list_slots has listed by expert.
//
// Floor: 6 T K H I FLOPs (Qwen3-30B-A3B, T = 8,192: 618 GFLOP; 1,104 us at 560 TFLOP/s, 936 at 660) and, below about
// 3,000 tokens, the weights' 1.2 GB.
//
// Design: as in tensor.cu a persistent block per SM takes work tiles by ticket, all of gate and up before all of down.
// Weights are the wgmma's rows, so that an expert's last rows cost columns of 16. But a tile has 128 weight rows x up
// to 256 token rows, in two warpgroups with 128 sums a thread. This shape reads least from shared memory, which feeds
// the tensor cores, and from L2, which feeds shared memory. Where experts have up to 128 rows, a tile is 256 weight
// rows: the weights are the bound then, and rows are read from L2 half as often. If a product has an odd number of such
// halves, the last tile has one. An expert's rows are spread evenly over the smallest number of such tiles that holds
// them. Each warpgroup rounds and stores its own results (wide_store.cuh). The ring lets the warpgroups drift apart, so
// that one stores while the other multiplies; an enforced order was slower. A warpgroup tells the other blocks that
// activations are there when the products of its next work tile are running, which hide the wait for memory.
// docs/lessons/experts.md lists what was tried and where the clocks go. A slot's sums are one ascending chain over K,
// so they depend on its row only.
#include "experts/wide_kernel.cuh"

namespace moe::experts_wide {

template <class E>
struct Bf16Weights;

template <class E>
constexpr bool kPublishesInside<Bf16Weights<E>> = true;

/// Rows of bf16, loaded by tensor maps, which write the swizzle that wgmma reads.
template <class E>
struct Bf16Weights : PlainWeights {
  using Epilogue = E;
  using Self = Bf16Weights;
  static constexpr int kBytes = kWeightBytes, kConsumerRegisters = 208;

#if MOE_HAS_WGMMA
  static __device__ __forceinline__ void load(void* to, const CUtensorMap* map, const Args<Self>& a, int product,
                                              int expert, int tile, int step, uint64_t* bar, uint64_t policy) {
    load_weights(to, map, product, expert, tile, a.hidden, step, bar, policy);
  }

  /// sums = 64 weight rows of each weight tile x kColumns token rows over the work tile's steps. `at` is then past
  /// these steps. `publish` is called when products are running.
  template <int kWidth, int kColumns, class Publish>
  static __device__ __forceinline__ void multiply(const Block<Self>& b, const Args<Self>&, const Work& work, Cursor& at,
                                                  float (&sums)[kSums], Publish publish) {
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
    int previous = -1;
    for (int step = 0; step < work.steps; ++step) {
      mbarrier_wait(b.full(at.stage), at.parity);
      if (work.product == 0) fence_async_shared();  // ordinary stores wrote the rows of x
      uint64_t w[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        w[i] = tile_descriptor(b.weights(at.stage) + i * kWeightBytes + group * 64 * 128);
      const uint64_t x = tile_descriptor(b.rows(at.stage));
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kTileColumns / 16; ++k) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          wgmma<kColumns>(sums + i * kPairSums, w[i] + 2 * k, x + 2 * k, k > 0 || step > 0);
      }
      wgmma_commit();
      if (step == 1) publish();  // waits for memory while two stages' products run
      wgmma_wait<1>();           // one stage's products run while the next ones are issued
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
  const int capacity = capacity_for(c.tokens * c.top_k / c.num_ids);
  const Args<Bf16Weights<Epilogue>> a = {c.x,
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
                                         width_for(capacity, c.hidden, c.inter, true),
                                         capacity,
                                         {},
                                         epilogue};
  return run(a, w13, w2, limits, stream);
}

}  // namespace moe::experts_wide

/// slot_rows[slot] = w2[e] (silu(gate) * up), summed in f32 and rounded to bf16, gate and up from w13[e] x[slot / K],
/// for each slot that has a local expert e; biases and another activation as `epilogue` says. It must follow the
/// routing on the stream. `counters` are the same as for moe_experts_tensor. Hopper only; H and I are multiples of 64.
extern "C" int moe_experts_wide(const moe::ExpertsTensorArgs* args, void* stream) {
  using namespace moe;
  using namespace moe::experts_wide;
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
