// Writes the rows of E4M3 that an FP8 pack holds, and their scales. cuBLASLt reads rows, and with many rows of
// activations in FP8 its product is so much faster that writing the matrix out is worth it. The columns are in the
// order of fp8_quantise.cu, so that activations are quantised in the same way for all products.
//
// Floor: bytes, packed in and as many out: 21 MB for Qwen3-30B-A3B's qkv [5120, 2048], 4.9 us at 4.3 TB/s, 17 MB for
// o_proj [2048, 4096], 3.9 us.
//
// Design: a warp turns 16 rows x 128 columns at a time. A lane's 64 bytes, of four tiles, are 32 consecutive bytes of
// two rows of the result, so lanes exchange only the halves of a sector that two of them share.
#include "quant/matrix.cuh"

namespace moe::fp8 {
namespace {

using quant::kTileRows;
using quant::Matrix;

constexpr int kWarps = 8;
constexpr int kUnit = 128;     // columns that a warp turns at a time
constexpr int kUnitsEach = 2;  // units whose loads a warp has in flight
constexpr int kBlock = 128;    // rows and columns that share a scale
constexpr int kBlockTiles = kBlock / kTileRows;

/// The bytes of one row. Of the words of a k-step, bytes 0 and 2 belong to row g of the tile, bytes 1 and 3 to row g +
/// 8.
__device__ __forceinline__ uint4 row_of(const Vec16 (&tiles)[2], uint32_t bytes) {
  return {
      __byte_perm(tiles[0].word[0], tiles[0].word[1], bytes), __byte_perm(tiles[0].word[2], tiles[0].word[3], bytes),
      __byte_perm(tiles[1].word[0], tiles[1].word[1], bytes), __byte_perm(tiles[1].word[2], tiles[1].word[3], bytes)};
}

/// Exchanges the even lane's second 16 bytes and the odd lane's first ones, so that two lanes store whole sectors.
__device__ __forceinline__ void exchange(uint4& first, uint4& second) {
  const bool odd = threadIdx.x & 1;
  uint4& give = odd ? first : second;
  give.x = __shfl_xor_sync(0xffffffffu, give.x, 1), give.y = __shfl_xor_sync(0xffffffffu, give.y, 1);
  give.z = __shfl_xor_sync(0xffffffffu, give.z, 1), give.w = __shfl_xor_sync(0xffffffffu, give.w, 1);
}

/// A block's warps take units of one row of tiles in turn. Grid: rows of tiles x parts of K.
__global__ void __launch_bounds__(kWarps * 32)
    write_rows(const Matrix w, const float* from, uint8_t* rows, float* scales, int scale_columns) {
  pdl_launch_dependents();
  pdl_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, tile = blockIdx.x;
  const uint8_t* tiles = w.q + static_cast<size_t>(tile) * quant::tile_bytes(QuantFormat::kFp8, w.k) + lane * 16;
  const int first = blockIdx.y * kWarps * kUnitsEach + warp, units = w.k / kUnit;
  Vec16 packed[kUnitsEach][2][2];  // halves of 64 columns, tiles of 32
#pragma unroll
  for (int i = 0; i < kUnitsEach; ++i) {
    if (first + i * kWarps >= units) break;
#pragma unroll
    for (int t = 0; t < 4; ++t) packed[i][t / 2][t % 2] = load_stream(tiles + ((first + i * kWarps) * 4 + t) * 512);
  }
#pragma unroll
  for (int i = 0; i < kUnitsEach; ++i) {
    const int unit = first + i * kWarps;
    if (unit >= units) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t bytes = half == 0 ? 0x6420 : 0x7531;
      uint4 low = row_of(packed[i][0], bytes), high = row_of(packed[i][1], bytes);
      exchange(low, high);
      // After the exchange, lane c has chunks 2 c and 2 c + 1: first the even lane's pair, then the odd one's.
      uint8_t* row = rows + static_cast<size_t>(tile * kTileRows + g + 8 * half) * w.k + unit * kUnit;
      uint4* to = reinterpret_cast<uint4*>(row) + c / 2 * 4 + c % 2;
      to[0] = low, to[2] = high;
    }
  }
  // The scales of 128 rows are one line.
  if (tile % kBlockTiles != 0 || blockIdx.y != 0) return;
  for (int i = threadIdx.x; i < scale_columns; i += kWarps * 32) {
    const int group = min(w.group(i * kBlock), w.groups - 1);
    const float scale = i < units ? __ldg(from + (static_cast<size_t>(tile) * w.groups + group) * 2) : 0.f;
    scales[static_cast<size_t>(tile / kBlockTiles) * scale_columns + i] = scale;
  }
}

}  // namespace
}  // namespace moe::fp8

/// rows [n, k] E4M3 in the order of moe_fp8_quantise, scales [n / 128, k / 128 rounded up to 4] f32 of one FP8 matrix
/// whose scales are the same for each 128 rows and 128 columns; n and k are multiples of 128.
extern "C" int moe_fp8_rows(const moe::QuantPack* w, uint8_t* rows, float* scales, void* stream) {
  using namespace moe;
  quant::Matrix m;
  if (w->format != QuantFormat::kFp8 || w->experts != 1 || w->gate_up != 0 || w->scale_rows != 2 ||
      w->n % fp8::kBlock != 0 || w->k % fp8::kBlock != 0 || !quant::make_matrix(*w, &m))
    return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(w->n_tiles), ceil_div(m.k / fp8::kUnit, fp8::kWarps * fp8::kUnitsEach));
  return launch(fp8::write_rows, {grid, dim3(fp8::kWarps * 32), stream}, m, static_cast<const float*>(w->scales), rows,
                scales, round_up(m.k / fp8::kBlock, 4));
}
