// The experts on warpgroup products (experts/tensor_kernel.cuh) with quantised weights, for 8 tokens and more.
//
// Floor: the bytes of the touched experts (Qwen3-30B-A3B, all 128: int4 in groups of 128 with f16 scales 312 MB = 71 us
// at 4.4 TB/s, in groups of 32 with zero points 359 MB = 82 us, int8 613 MB = 139 us, FP8 604 MB = 137 us).
//
// Design: weights come as they lie in memory, 128 rows x 128 columns a stage, by one instruction of the copy engine; the
// gathering warps bring scales and zero points beside token rows. A consumer warp has 16 rows: it unpacks 64 columns to
// the A operand in registers while the products of the 64 columns before run, so weights never return to shared memory.
// Two blocks share an SM where experts have few rows: 16 consumer warps hide each other's latency.
#include "experts/tensor_kernel.cuh"
#include "quant/stage.cuh"

namespace moe::experts_tensor {
using quant::Source;

constexpr int kColumns = 128;  // of a stage: half as many would double the work around a stage

template <QuantFormat kFormat, int kShare>
struct QuantWeights : quant::QuantStage<kFormat, kColumns, kShare, kTileRows / 16> {
  using Stage = quant::QuantStage<kFormat, kColumns, kShare, kTileRows / 16>;
  using Source = quant::Source;
  using Self = QuantWeights;
  static constexpr int kFewBlocks = 2;

#if MOE_SM90
  static __device__ __forceinline__ int row_block(const Args<Self>& a, int product, int expert, int tile) {
    return expert * a.source[product].blocks + tile * (kTileRows / 16);
  }

  static __device__ __forceinline__ void load(void* to, const CUtensorMap* map, const Args<Self>& a, int product,
                                              int expert, int tile, int step, uint64_t* bar, uint64_t policy) {
    Stage::load_weights(to, map, row_block(a, product, expert, tile), step, bar, policy);
  }

  static __device__ __forceinline__ void copy_side(uint8_t* side, const Args<Self>& a, const Work& work, int step,
                                                   int index) {
    Stage::template copy_side<kGatherLanes>(side, a.source[work.product],
                                            row_block(a, work.product, work.expert, work.tile), step, index);
  }

  /// acc += 64 weight rows x kRows token rows over the work tile's steps, and leaves the ring behind them.
  template <int kCapacity, int kRows>
  static __device__ __forceinline__ void multiply(const Block<Self>& b, const Args<Self>& a, const Work& work,
                                                  Cursor& at, float (&acc)[kRows / 2]) {
    const int block = threadIdx.x / 32;
    const Source s = a.source[work.product];
    const auto read = [&](const Cursor& from) {
      mbarrier_wait(b.full(from.stage), from.parity);
      fence_async_shared();  // rows of x came by ordinary copies
      return Stage::read(b.weights(from.stage), b.side(from.stage), s, block);
    };
    uint32_t fragments[Stage::kUnits][Stage::kSteps][4];
    typename Stage::Lane lane = read(at);
    Stage::fragments(lane, 0, fragments[0]);
    for (int step = 0; step < work.steps; ++step) {
      const uint64_t x = tile_descriptor(b.rows(at.stage));
      Cursor next = at;
      next.advance(b.stages);
#pragma unroll
      for (int u = 0; u < Stage::kUnits; ++u) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Stage::kSteps; ++k)
          wgmma<kRows, false>(acc, fragments[u][k], x + u * (kCapacity * 128 / 16) + 2 * k);
        wgmma_commit();
        // The next unit's weights are unpacked while these products run.
        if (u + 1 < Stage::kUnits) {
          Stage::fragments(lane, u + 1, fragments[u + 1]);
        } else if (step + 1 < work.steps) {
          lane = read(next);
          Stage::fragments(lane, 0, fragments[0]);
        }
        wgmma_wait<0>();
      }
      Stage::give_back(b.empty(at.stage));
      at = next;
    }
  }
#endif
};

template <QuantFormat kFormat, int kShare>
cudaError_t launch(const QuantExpertsTensorArgs& c, const DeviceLimits& limits, void* stream) {
  using W = QuantWeights<kFormat, kShare>;
  const int hidden = static_cast<int>(c.w13.k), inter = static_cast<int>(c.w2.k);
  CUtensorMap w13, w2;
  cudaError_t e = quant::make_pack_map(&w13, c.w13, kTileRows / 16, W::kBlockBytes);
  if (e == cudaSuccess) e = quant::make_pack_map(&w2, c.w2, kTileRows / 16, W::kBlockBytes);
  if (e != cudaSuccess) return e;
  const Args<W> a = {c.x,
                     c.slots,
                     c.counts,
                     c.act,
                     static_cast<float*>(c.slot_rows),
                     {c.counters, static_cast<int>(c.w13.experts)},
                     c.bucket,
                     c.tokens,
                     c.top_k,
                     static_cast<int>(c.w13.experts),
                     hidden,
                     inter,
                     0,
                     c.tokens * c.top_k >= 2 * c.num_ids,
                     {quant::source(c.w13, kShare), quant::source(c.w2, kShare)}};
  return run(a, c.num_ids, w13, w2, limits, stream);
}

}  // namespace moe::experts_tensor

/// As moe_experts_tensor, with packs: w13 with gate and up rows in turn, w2 plain, of one format.
extern "C" int moe_quant_experts_tensor(const moe::QuantExpertsTensorArgs* args, void* stream) {
  using namespace moe;
  using namespace moe::experts_tensor;
  const QuantExpertsTensorArgs& c = *args;
  if (!quant::experts_fit(c)) return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  const bool wide_groups = quant::share(c.w13, kColumns) == kColumns && quant::share(c.w2, kColumns) == kColumns;
  switch (c.w13.format) {
    case QuantFormat::kInt4:
      return wide_groups ? experts_tensor::launch<QuantFormat::kInt4, 128>(c, limits, stream)
                         : experts_tensor::launch<QuantFormat::kInt4, 32>(c, limits, stream);
    case QuantFormat::kInt8:
      return wide_groups ? experts_tensor::launch<QuantFormat::kInt8, 128>(c, limits, stream)
                         : experts_tensor::launch<QuantFormat::kInt8, 32>(c, limits, stream);
    default: return experts_tensor::launch<QuantFormat::kFp8, 128>(c, limits, stream);
  }
}
