// moe_experts_stream for quantised experts: from topk_ids to token rows in one launch, for few rows per expert.
//
// Floor: 3 H I weights for each touched expert (46 of Qwen3-30B-A3B's 128 at 7 tokens: 112 MB at 4 bits with scales, 26
// us at 4.4 TB/s). A row of tiles has a quarter of the bytes that it has in bf16, so it arrives in 0.5 us. In that time
// a block must also pass the barrier and add the sums of its warps. This kernel is slower than the floor by the part of
// that work that takes longer.
//
// mma.sync has 8 columns: the weights of an expert with more than 8 slots are read again for each further 8.
#include "experts/stream_kernel.cuh"
#include "quant/product.cuh"

namespace moe::stream {
namespace {

constexpr int kPass = 8;
constexpr int kChunk = 1024;  // elements along K of a stage of w2; a stage of w13 has twice that number

/// Quantised weights: a stage holds columns of a row of tiles. In the first product a row of tiles is 8 gate and 8 up
/// rows.
template <class Kind, class Epilogue>
struct Tiles {
  static constexpr QuantFormat kFormat = Kind::kFormat;
  quant::Matrix w13, w2;
  quant::StageLayout layouts[2];
  Epilogue epilogue;

  int set_chunks(const Args& a) {
    layouts[0] = quant::stage_layout(w13, kFormat, a.chunk[0]);
    layouts[1] = quant::stage_layout(w2, kFormat, a.chunk[1]);
    return layouts[0].bytes > layouts[1].bytes ? layouts[0].bytes : layouts[1].bytes;
  }
  __device__ const quant::Matrix& matrix(int product) const { return product == 0 ? w13 : w2; }

  /// Loads this warp's half of the stages of a row of tiles.
  __device__ __forceinline__ void load_tile(const Block<Tiles>& b, int product, int expert, int tile,
                                            Cursor& at) const {
    static_assert(kLoaders == 2);
    const quant::Matrix& w = matrix(product);
    const int depth = b.a.depth(product), chunk = b.a.chunk[product];
    for (int k = 0; k < depth; k += chunk) {
      quant::Pieces p = quant::pieces<kFormat>(w, layouts[product], w.tile_row(expert, tile), k, min(chunk, depth - k));
      const uint32_t half = p.bytes[0] / 2;
      p.bytes[0] = half;
      if (threadIdx.x / 32 == kConsumers) {
        p.bytes[1] = p.bytes[2] = 0;
      } else {
        p.from[0] += half, p.to[0] = half;
      }
      mbarrier_wait(b.empty(at.stage), at.parity ^ 1);
      quant::copy_pieces(b.stage(at.stage), p, b.full(at.stage));
      at.advance(b.a.stages);
    }
  }

  /// Multiplies a row of tiles by the rows at `rows`, over this warp's steps along K.
  template <int kColumns>
  __device__ __forceinline__ void multiply(const Block<Tiles>& b, int product, int expert, int tile,
                                           const uint8_t* rows, Cursor& at, float (&acc)[kColumns / 8][4]) const {
    static_assert(kColumns == kPass);
    const quant::Matrix& w = matrix(product);
    const int depth = b.a.depth(product), chunk = b.a.chunk[product];
    const uint8_t* row = rows + threadIdx.x % 32 / 4 * padded(depth);
    // Warps exchange their halves of the steps in every other row of tiles. So if the steps do not divide evenly, the
    // additional steps go to other warps there.
    const int first = threadIdx.x / 32 ^ tile % 2 * (kConsumers / 2);
#pragma unroll
    for (int c = 0; c < 4; ++c) acc[0][c] = 0;
    for (int k = 0; k < depth; k += chunk) {
      mbarrier_wait(b.full(at.stage), at.parity);
      const quant::Stage<Kind> s(w, layouts[product], b.stage(at.stage), w.tile_row(expert, tile), k);
      const int steps = min(chunk, depth - k) / quant::kStep;
#pragma unroll 2
      for (int i = first; i < steps; i += kConsumers) {
        quant::Columns columns;
        columns.load(row + (k + i * quant::kStep) * 2);
        s.operands(i, k + i * quant::kStep).multiply(columns, acc[0]);
      }
      release_to_copies(b.empty(at.stage));
      at.advance(b.a.stages);
    }
  }
};

template <class Kind, class Epilogue>
cudaError_t run(const Args& common, const quant::Matrix& w13, const quant::Matrix& w2, const Epilogue& epilogue,
                void* stream) {
  Weighted<Tiles<Kind, Epilogue>> a = {common, {w13, w2, {}, epilogue}};
  if (kSetHeader + max_groups(a.slots(), a.num_local, kPass) > a.flag_set) return cudaErrorInvalidValue;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (choose_plan(&a, kPass, kChunk, limits.block_smem) == 0) return cudaErrorInvalidValue;
  return launch(experts_stream<kPass, Tiles<Kind, Epilogue>>, launch_of(a, kPass, limits, stream), a);
}

}  // namespace
}  // namespace moe::stream

/// The same as moe_experts_stream (and moe_experts_stream_flags), with packs that make_matrix accepts.
extern "C" int moe_quant_experts_stream(const moe::QuantExpertsStreamArgs* args, void* stream) {
  using namespace moe;
  const QuantExpertsStreamArgs& c = *args;
  stream::Args a = stream::common_args(c);
  quant::Matrix w13, w2;
  if (!quant::make_experts(c.w13, c.w2, &w13, &w2)) return cudaErrorInvalidValue;
  a.num_local = static_cast<int>(c.w13.experts), a.hidden = w13.k, a.inter = w2.k;
  if (!stream::launchable(a, c.output)) return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  return with_epilogue(c.epilogue, [&](auto epilogue) {
    return quant::with_kind(c.w13.format, w13.wide() && w2.wide(),
                            [&](auto kind) { return stream::run<decltype(kind)>(a, w13, w2, epilogue, stream); });
  });
}
