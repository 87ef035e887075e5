// The experts' products for prompts (experts/wide_kernel.cuh) with quantised weights, 32 rows per expert and more.
//
// Floor: 6 T K H I FLOPs, as with bf16; the weights' bytes are a quarter or a half.
//
// Design: each warpgroup unpacks its own 64 weight rows to the A operand in registers, a k-step of 16 columns while the
// k-step before is multiplied. With 256 token rows a k-step of a warpgroup keeps the tensor cores busy for 128 clocks,
// and both warpgroups share them: unpacking takes a warp 26 (int4) to 45 (FP8) instructions of its 256 clocks. Shared
// memory gives the tensor cores token rows only, and stages are smaller than with bf16, so there are more of them.
#include "experts/wide_kernel.cuh"
#include "quant/experts.cuh"

namespace moe::experts_wide {

/// The products of integers use one scale for each 32 columns for all group sizes: instructions are not the bound here.
constexpr int share_of(QuantFormat format) { return is_integer(format) ? 32 : kTileColumns; }

template <QuantFormat kFormat, class E>
struct QuantWeights : quant::ExpertStage<kFormat, kTileColumns, share_of(kFormat)> {
  using Epilogue = E;
  using typename quant::ExpertStage<kFormat, kTileColumns, share_of(kFormat)>::Stage;
  using Self = QuantWeights;
  static constexpr int kConsumerRegisters = 216;

#if MOE_HAS_WGMMA
  /// sums = 64 weight rows of each weight tile x kColumns token rows over the work tile's steps. `at` is then past
  /// them.
  template <int kWidth, int kColumns>
  static __device__ __forceinline__ void multiply(const Block<Self>& b, const Args<Self>& a, const Work& work,
                                                  Cursor& at, float (&sums)[kSums]) {
    const int block = threadIdx.x / 32;
    const quant::Source s = a.source[work.product];
    typename Stage::Words words[kWidth];
    typename Stage::Operands o[kWidth];
    const auto read = [&](const Cursor& from) {
      mbarrier_wait(b.full(from.stage), from.parity);
      fence_async_shared();  // ordinary stores wrote the rows of x
#pragma unroll
      for (int i = 0; i < kWidth; ++i) Stage::read(b.weights(from.stage) + i * Stage::kBytes, block, words[i]);
    };
    // Two k-steps are unpacked together with one weight tile, and one with two tiles, so that both take as many
    // registers.
    constexpr int kTogether = 2 / kWidth, kParts = Stage::kSteps / kTogether;
    uint32_t fragments[2][kTogether][kWidth][4];
    const auto unpack = [&](const Cursor& from, int part) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        Stage::fetch(b.side(from.stage) + i * Stage::kSideBytes, s, block, part * kTogether, &o[i]);
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          Stage::fetch_step_of(b.side(from.stage) + i * Stage::kSideBytes, block, part * kTogether + k, &o[i]);
          Stage::template fragment<true>(words[i], o[i], part * kTogether + k, fragments[part % 2][k][i]);
        }
      }
    };
    read(at);
    unpack(at, 0);
    for (int step = 0; step < work.steps; ++step) {
      const uint64_t x = tile_descriptor(b.rows(at.stage));
      const bool more = step + 1 < work.steps;
      Cursor next = at;
      next.advance(b.stages);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i)
            wgmma<kColumns, false>(sums + i * kPairSums, fragments[part % 2][k][i], x + 2 * (part * kTogether + k),
                                   part + k > 0 || step > 0);
        }
        wgmma_commit();
        // The next part is unpacked while these products run. The next stage is read as soon as the words of this one
        // have been used.
        if (part + 1 < kParts) unpack(at, part + 1);
        if (part + 2 == kParts && more) read(next);
        if (part + 1 == kParts && more) unpack(next, 0);
        wgmma_wait<0>();
      }
      if constexpr (Stage::kFp4) {
        if (!more) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i)
            Stage::template scale_rows<kColumns / 2>(b.side(at.stage) + i * Stage::kSideBytes, s, block,
                                                     sums + i * kPairSums);
        }
      }
      Stage::give_back(b.empty(at.stage), !more);
      at = next;
    }
  }
#endif
};

template <QuantFormat kFormat, class E>
cudaError_t launch(const QuantExpertsTensorArgs& c, const E& epilogue, const DeviceLimits& limits, void* stream) {
  using W = QuantWeights<kFormat, E>;
  const int hidden = static_cast<int>(c.w13.k), inter = static_cast<int>(c.w2.k);
  const int capacity = capacity_for(c.tokens * c.top_k / c.num_ids);
  CUtensorMap w13, w2;
  const cudaError_t e = quant::make_pack_maps(&w13, &w2, c, W::kBlockBytes);
  if (e != cudaSuccess) return e;
  const Args<W> a = {
      c.x,
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
      width_for(capacity, hidden, inter, false),
      capacity,
      {quant::source(c.w13, kTileColumns, share_of(kFormat)), quant::source(c.w2, kTileColumns, share_of(kFormat))},
      epilogue};
  return run(a, w13, w2, limits, stream);
}

}  // namespace moe::experts_wide

/// The same as moe_experts_wide, with the packs that moe_quant_experts_tensor accepts.
extern "C" int moe_quant_experts_wide(const moe::QuantExpertsTensorArgs* args, void* stream) {
  using namespace moe;
  const QuantExpertsTensorArgs& c = *args;
  if (!quant::experts_fit(c)) return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  return with_epilogue(c.epilogue, [&](auto epilogue) {
    switch (c.w13.format) {
      case QuantFormat::kInt4: return experts_wide::launch<QuantFormat::kInt4>(c, epilogue, limits, stream);
      case QuantFormat::kInt8: return experts_wide::launch<QuantFormat::kInt8>(c, epilogue, limits, stream);
      case QuantFormat::kFp4: return experts_wide::launch<QuantFormat::kFp4>(c, epilogue, limits, stream);
      case QuantFormat::kNvfp4: return experts_wide::launch<QuantFormat::kNvfp4>(c, epilogue, limits, stream);
      case QuantFormat::kQ4k: return experts_wide::launch<QuantFormat::kQ4k>(c, epilogue, limits, stream);
      default: return experts_wide::launch<QuantFormat::kFp8>(c, epilogue, limits, stream);
    }
  });
}
