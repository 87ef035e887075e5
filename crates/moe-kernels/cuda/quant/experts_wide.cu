// The experts' products for prompts (experts/wide_kernel.cuh) with quantised weights, 32 rows per expert and more.
//
// Floor: 6 T K H I FLOPs, as with bf16; the weights' bytes are a quarter or a half.
//
// Design: each warpgroup unpacks its own 64 weight rows to the A operand in registers, a k-step of 16 columns while the
// k-step before is multiplied. With 256 token rows a k-step of a warpgroup keeps the tensor cores busy for 128 clocks,
// and both warpgroups share them: unpacking takes a warp 26 (int4) to 45 (FP8) instructions of its 256 clocks. Shared
// memory gives the tensor cores token rows only, and stages are smaller, so there are more of them than with bf16.
#include "experts/wide_kernel.cuh"
#include "quant/stage.cuh"

namespace moe::experts_wide {
constexpr int kRowBlocks = kTileRows / 16;

/// One scale for 32 columns whatever the groups are, but of FP8: instructions are not what takes time here.
constexpr int share_of(QuantFormat format) { return format == QuantFormat::kFp8 ? kTileColumns : 32; }

template <QuantFormat kFormat>
struct QuantWeights : quant::QuantStage<kFormat, kTileColumns, share_of(kFormat), kRowBlocks> {
  using Stage = quant::QuantStage<kFormat, kTileColumns, share_of(kFormat), kRowBlocks>;
  using Source = quant::Source;
  using Self = QuantWeights;

#if MOE_SM90
  static __device__ __forceinline__ int row_block(const Args<Self>& a, int product, int expert, int tile) {
    return expert * a.source[product].blocks + tile * kRowBlocks;
  }

  static __device__ __forceinline__ void load(void* to, const CUtensorMap* map, const Args<Self>& a, int product,
                                              int expert, int tile, int step, uint64_t* bar, uint64_t policy) {
    Stage::load_weights(to, map, row_block(a, product, expert, tile), step, bar, policy);
  }

  /// Of the work tile's i-th weight tile.
  static __device__ __forceinline__ void copy_side(uint8_t* side, const Args<Self>& a, const Work& work, int i,
                                                   int step, int index) {
    Stage::template copy_side<kGatherLanes>(side, a.source[work.product],
                                            row_block(a, work.product, work.expert, work.tile + i), step, index);
  }

  /// sums = 64 weight rows of each weight tile x kColumns token rows over the work tile's steps, and leaves the ring
  /// behind them.
  template <int kWidth, int kColumns>
  static __device__ __forceinline__ void multiply(const Block<Self>& b, const Args<Self>& a, const Work& work,
                                                  Cursor& at, float (&sums)[kSums]) {
    const int block = threadIdx.x / 32;
    const quant::Source s = a.source[work.product];
    typename Stage::Lane lanes[kWidth];
    const auto read = [&](const Cursor& from) {
      mbarrier_wait(b.full(from.stage), from.parity);
      if (work.product == 0) fence_async_shared();  // rows of x came by ordinary copies
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        lanes[i] = Stage::read(b.weights(from.stage) + i * Stage::kBytes, b.side(from.stage) + i * Stage::kSideBytes, s,
                               block);
    };
    uint32_t fragments[2][kWidth][4];
    const auto unpack = [&](int k) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) Stage::fragment(lanes[i], 0, k, fragments[k % 2][i]);
    };
    read(at);
    unpack(0);
    for (int step = 0; step < work.steps; ++step) {
      const uint64_t x = tile_descriptor(b.rows(at.stage));
      Cursor next = at;
      next.advance(b.stages);
#pragma unroll
      for (int k = 0; k < Stage::kSteps; ++k) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          wgmma<kColumns, false>(sums + i * kPairSums, fragments[k % 2][i], x + 2 * k, k > 0 || step > 0);
        wgmma_commit();
        // The next k-step's weights are unpacked while these products run.
        if (k + 1 < Stage::kSteps) {
          unpack(k + 1);
        } else if (step + 1 < work.steps) {
          read(next);
          unpack(0);
        }
        wgmma_wait<0>();
      }
      Stage::give_back(b.empty(at.stage));
      at = next;
    }
  }
#endif
};

template <QuantFormat kFormat>
cudaError_t launch(const QuantExpertsTensorArgs& c, const DeviceLimits& limits, void* stream) {
  using W = QuantWeights<kFormat>;
  const int hidden = static_cast<int>(c.w13.k), inter = static_cast<int>(c.w2.k);
  const int capacity = capacity_for(c.tokens * c.top_k / c.num_ids);
  CUtensorMap w13, w2;
  cudaError_t e = quant::make_pack_map(&w13, c.w13, kRowBlocks, W::kBlockBytes);
  if (e == cudaSuccess) e = quant::make_pack_map(&w2, c.w2, kRowBlocks, W::kBlockBytes);
  if (e != cudaSuccess) return e;
  const Args<W> a = {c.x,
                     c.slots,
                     c.counts,
                     c.act,
                     static_cast<bf16*>(c.slot_rows),
                     {c.counters, static_cast<int>(c.w13.experts)},
                     c.bucket,
                     c.tokens,
                     c.top_k,
                     static_cast<int>(c.w13.experts),
                     hidden,
                     inter,
                     width_for(capacity, hidden, inter),
                     capacity,
                     {quant::source(c.w13, share_of(kFormat)), quant::source(c.w2, share_of(kFormat))}};
  return run(a, w13, w2, limits, stream);
}

}  // namespace moe::experts_wide

/// As moe_experts_wide, with packs as moe_quant_experts_tensor takes them.
extern "C" int moe_quant_experts_wide(const moe::QuantExpertsTensorArgs* args, void* stream) {
  using namespace moe;
  const QuantExpertsTensorArgs& c = *args;
  if (!quant::experts_fit(c)) return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  switch (c.w13.format) {
    case QuantFormat::kInt4: return experts_wide::launch<QuantFormat::kInt4>(c, limits, stream);
    case QuantFormat::kInt8: return experts_wide::launch<QuantFormat::kInt8>(c, limits, stream);
    default: return experts_wide::launch<QuantFormat::kFp8>(c, limits, stream);
  }
}
