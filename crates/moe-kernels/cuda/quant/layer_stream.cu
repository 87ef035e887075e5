// moe_layer_stream for quantised experts: a sub-layer of a decode step for 1 to 4 tokens in one launch.
//
// Floor: 3 H I weights for each expert chosen, 19.5 MB at 4 bits with scales for a token of Qwen3-30B-A3B: 4.4 us
// at 4.4 TB/s. The latencies are those of bf16 (about 7 us, layer/stream.cu), the copies a fourth as long: 17 KB for a
// tile of gate and up, 7 KB for an expert's rows of a block in the down product. So more of them are on their way at a
// time (kFlying bytes), a tile is there before a ticket is, and fetching activations stands in the way where it did
// not: four warps do it, each with one way to L2 and back for an expert. Unpacking is 1.9 us of issue at 4 bits,
// hidden.
//
// A block owns whole rows of tiles of w2, so of 2,048 columns 128 blocks own 16 each and four none.
#include "layer/stream_kernel.cuh"
#include "quant/product.cuh"

namespace moe::layer {
namespace {

constexpr int kFlying = 96 * 1024;      // bytes on their way to a block
constexpr int kSoleBlock = 116 * 1024;  // of shared memory: a second block of the launch does not fit beside

/// Quantised weights: a stage holds columns of a row of tiles, in the first product of 8 gate and 8 up rows.
template <class Kind>
struct Tiles {
  static constexpr QuantFormat kFormat = Kind::kFormat;
  static constexpr int kUnit = quant::kTileRows, kMaxRing = (kFormat == QuantFormat::kInt4 ? 112 : 176) * 1024;
  static constexpr int kRowPad = 16;  // against bank conflicts
  static constexpr int kFetchers = 4;
  using Sums = float[4];

  quant::Matrix w13, w2;
  quant::StageLayout layouts[2];
  int most_flying[2];

  __host__ __device__ int stage_bytes(const Args&, int product) const { return layouts[product].bytes; }
  int set_chunk(const Args& a, int product) {
    layouts[product] = quant::stage_layout(product == 0 ? w13 : w2, kFormat, a.chunk[product]);
    return layouts[product].bytes;
  }

#if MOE_SM90

  static constexpr int kByTicket = 0;  // a tile comes faster than a ticket
  static constexpr bool kEager = true;

  __device__ __forceinline__ int flying(int product) const { return most_flying[product]; }

  __device__ __forceinline__ void load_gate_up(const Args& a, uint8_t* to, uint32_t expert, int row, int k,
                                               uint64_t* bar) const {
    const size_t tile = w13.tile_row(expert, row / kPairs);
    quant::bulk_copy_pieces(to, quant::pieces<kFormat>(w13, layouts[0], tile, k, min(a.chunk[0], a.hidden - k)), bar);
  }

  __device__ __forceinline__ void load_head(const Args& a, uint8_t* to, uint32_t expert, int row, uint64_t* bar) const {
    load_gate_up(a, to, expert, row, 0, bar);
  }

  __device__ __forceinline__ void load_down(const Args& a, uint8_t* to, uint32_t expert, int top, int, int k,
                                            uint64_t* bar) const {
    const size_t tile = w2.tile_row(expert, top / quant::kTileRows);
    quant::bulk_copy_pieces(to, quant::pieces<kFormat>(w2, layouts[1], tile, k, min(a.chunk[1], a.inter - k)), bar);
  }

  /// The stage's columns, k and on, times those of x: this warp's.
  static __device__ __forceinline__ void multiply(const quant::Stage<Kind>& s, const uint8_t* x, int k, int columns,
                                                  int warp, Sums& acc) {
#pragma unroll 4
    for (int i = warp; i < columns / kStep; i += kConsumers) {
      quant::Columns of;
      of.load(x + (k + i * kStep) * 2);
      s.operands(i, k + i * kStep).multiply(of, acc);
    }
  }

  __device__ __forceinline__ void multiply_gate_up(const Args& a, const uint8_t* stage, uint32_t expert, int row, int k,
                                                   const uint8_t* x, int warp, Sums& acc) const {
    const quant::Stage<Kind> s(w13, layouts[0], stage, w13.tile_row(expert, row / kPairs), k);
    multiply(s, x, k, min(a.chunk[0], a.hidden - k), warp, acc);
  }

  __device__ __forceinline__ void multiply_down(const Args& a, const uint8_t* stage, uint32_t expert, int top, int,
                                                int k, const uint8_t* act, int warp, Sums& acc) const {
    const quant::Stage<Kind> s(w2, layouts[1], stage, w2.tile_row(expert, top / quant::kTileRows), k);
    multiply(s, act, k, min(a.chunk[1], a.inter - k), warp, acc);
  }

  /// Both of a token's columns hold the same sums.
  static __device__ __forceinline__ float sum(const Sums& acc, int high) { return acc[2 * high]; }

#endif  // MOE_SM90
};

template <class Kind>
cudaError_t run(const Args& common, const quant::Matrix& w13, const quant::Matrix& w2, void* stream) {
  Weighted<Tiles<Kind>> a = {common, {w13, w2, {}, {}}};
  Launch l;
  const cudaError_t e = prepare(&a, &l, stream);
  if (e != cudaSuccess) return e;
  for (int product = 0; product < 2; ++product) {
    const int most = ceil_div(kFlying, a.w.stage_bytes(a, product)), stages = a.stages[product];
    a.w.most_flying[product] = most < 2 ? 2 : most < stages ? most : stages;
  }
  if (l.smem < kSoleBlock) l.smem = kSoleBlock;
  if (a.gate == nullptr) return launch(layer_kernel<0, false, AnyOutput, Tiles<Kind>>, l, a);
  if (a.route.experts <= 128 && is_plain(a.route, a.routing))
    return launch(layer_kernel<4, true, AnyOutput, Tiles<Kind>>, l, a);
  return launch(layer_kernel<16, false, AnyOutput, Tiles<Kind>>, l, a);
}

}  // namespace
}  // namespace moe::layer

/// As moe_layer_stream: the sizes that moe_layer_stream_fits allows, and what make_matrix takes.
extern "C" int moe_quant_layer_stream(const moe::QuantLayerStreamArgs* args, void* stream) {
  using namespace moe;
  const QuantLayerStreamArgs& c = *args;
  layer::Args a = layer::common_args(c);
  quant::Matrix w13, w2;
  if (!quant::make_experts(c.w13, c.w2, &w13, &w2)) return cudaErrorInvalidValue;
  a.num_local = static_cast<int>(c.w13.experts), a.hidden = w13.k, a.inter = w2.k;
  if (!layer::launchable(a)) return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  return quant::with_kind(c.w13.format, w13.wide() && w2.wide(),
                          [&](auto kind) { return layer::run<decltype(kind)>(a, w13, w2, stream); });
}
