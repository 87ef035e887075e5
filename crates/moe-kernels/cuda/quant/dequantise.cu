// Writes the matrices of a pack (in the order of the fast kernels) as bf16 in rows. cuBLAS reads rows, and with many
// rows of x its product is so much faster that writing the matrix out is worth it.
//
// Floor: bytes, packed in and bf16 out. Qwen3-30B-A3B's qkv [5120, 2048] in int4: 5.4 + 21 MB, 6.1 us at 4.3 TB/s (FP8
// 7.3); o_proj [2048, 4096] 4.9 us (FP8 5.9); the experts of a layer 302 + 1,208 MB, 351 us (FP8 421).
//
// Design: a warp turns 16 rows x 64 columns at a time from fragment order into rows. A lane reads 16 bytes a tile,
// makes exact bf16 pairs of them (unpack.cuh), multiplies in f32 and rounds once, as moe_any_dequantise does, so the
// bits are the same. Its words cross the warp through 2 KB of shared memory whose 16-byte chunks are swizzled by row,
// so that no access meets a bank twice, and leave as whole lines of 128 bytes. That is about 300 instructions a warp
// for 2.5 KB, and an SM's share of the memory moves those in 130 clocks of its four schedulers: memory stays the bound.
#include "quant/matrix.cuh"

namespace moe::quant {
namespace {

constexpr int kWarps = 8;
constexpr int kUnit = 64;      // columns that a warp turns at a time
constexpr int kUnitsEach = 2;  // units whose loads a warp has in flight
constexpr int kSteps = kUnit / 16;

/// The scales of a lane's rows g and g + 8 in a group, and their zero points in the form that `unpack` subtracts.
struct RowScales {
  float scale[2];
  uint32_t zero[2];
  float minimum[2];  // of Q4_K
};

template <QuantFormat kFormat>
__device__ __forceinline__ RowScales row_scales(const Matrix& w, size_t row, int column) {
  const int g = threadIdx.x % 32 / 4, group = min(w.group(column), w.groups - 1);
  const uint8_t* from = w.scales + w.scales_at(row, group);
  RowScales s;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (is_q4k(kFormat)) {
      const uint8_t* unit = w.scales + (row * units_of(w.k) + column / kUnitColumns) * kUnitBytes;
      const ScaleMinimum of = q4k_scale(unit, column / kQ4kGroup % kUnitGroups, g + 8 * half);
      s.scale[half] = of.scale, s.minimum[half] = of.minimum, s.zero[half] = kQ4kCodes;
    } else if constexpr (is_fp4(kFormat)) {
      // The scale is a float of its own here, and the operand of `unpack` is 2^126: weights then have the rounding of
      // the definition, scale times code.
      const uint8_t* factors = w.scales + row * fp4_row_bytes(w.groups);
      const float factor = __ldg(reinterpret_cast<const float*>(factors) + g + 8 * half);
      s.scale[half] = fp4_scale<kFormat>(__ldg(factors + kFp4Factors + group * kFp4Bytes + g + 8 * half), factor);
      s.zero[half] = 0x7e807e80u;
    } else if constexpr (kFormat == QuantFormat::kFp8) {
      const bool halves = w.scale_bytes == 8;  // a scale for each 8 rows
      s.scale[half] = __ldg(reinterpret_cast<const float*>(from) + (halves ? half : g + 8 * half));
      s.zero[half] = 0;
    } else {
      s.scale[half] = exact_scale(__ldg(reinterpret_cast<const uint16_t*>(from) + g + 8 * half), w.f16 != 0);
      const uint32_t middle = kFormat == QuantFormat::kInt4 ? 8 : 128;
      const size_t at = (row * w.groups + group) * kTileRows + g + 8 * half;
      s.zero[half] = zero_operand<kFormat>(w.zeros == nullptr ? middle : __ldg(w.zeros + at));
    }
  }
  return s;
}

/// The tiles of a unit; each lane has its words in the order of k-steps.
template <QuantFormat kFormat>
struct Unit {
  static constexpr int kWords = step_words(kFormat);
  uint32_t word[kSteps * kWords];

  __device__ __forceinline__ void load(const uint8_t* tiles) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const Vec16 v = load_stream(tiles + i * 512 + threadIdx.x % 32 * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) word[4 * i + j] = v.word[j];
    }
  }
};

/// A block's warps take units of one row of tiles in turn. Grid: rows of tiles x parts of K.
template <QuantFormat kFormat>
__global__ void __launch_bounds__(kWarps * 32) dequantise_rows(const Matrix w, int n, int gate_up, bf16* out) {
  constexpr int kWords = Unit<kFormat>::kWords;
  __shared__ __align__(128) uint8_t staging[kWarps][kTileRows * kUnit * 2];
  pdl_launch_dependents();
  pdl_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const size_t row = blockIdx.x;
  const int expert = blockIdx.x / w.n_tiles, tile = blockIdx.x - expert * w.n_tiles, units = w.k / kUnit;
  const uint8_t* tiles = w.q + row * tile_bytes(kFormat, w.k);
  const int first = blockIdx.y * kWarps * kUnitsEach + warp;
  Unit<kFormat> unit[kUnitsEach];
#pragma unroll
  for (int i = 0; i < kUnitsEach; ++i)
    if (first + i * kWarps < units) unit[i].load(tiles + (first + i * kWarps) * tile_bytes(kFormat, kUnit));
#pragma unroll
  for (int i = 0; i < kUnitsEach; ++i) {
    const int column = (first + i * kWarps) * kUnit;
    if (column >= w.k) break;
    uint8_t* to = staging[warp];
    RowScales s = row_scales<kFormat>(w, row, column);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const bool other =
          is_fp4(kFormat) ? step > 0 && step % operand_steps(kFormat) == 0 : step == kSteps / 2 && !w.wide();
      if (other) s = row_scales<kFormat>(w, row, column + step * 16);
      uint32_t pairs[4];  // rows g and g + 8 of columns 2c, then of the columns 8 further
      unpack<kFormat>(unit[i].word + step * kWords, s.zero, pairs);
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float2 q = unpack_bf16(pairs[part]);
        const float scale = s.scale[part % 2], minimum = is_q4k(kFormat) ? s.minimum[part % 2] : 0.f;
        const int chunk = 2 * step + part / 2, r = g + part % 2 * 8;
        const float2 v = is_q4k(kFormat) ? make_float2(scale * q.x - minimum, scale * q.y - minimum)
                                         : make_float2(scale * q.x, scale * q.y);
        *reinterpret_cast<uint32_t*>(to + r * 128 + ((chunk ^ g) << 4) + c * 4) = pack_bf16(v.x, v.y);
      }
    }
    __syncwarp();
#pragma unroll
    for (int part = 0; part < kTileRows / 4; ++part) {
      const int r = part * 4 + lane / 8, chunk = lane % 8;
      // A tile of a gate and up pack holds 8 rows of gate and 8 rows of up.
      const int matrix_row = gate_up == 0 ? tile * kTileRows + r : tile * 8 + r % 8 + (r < 8 ? 0 : n / 2);
      if (matrix_row >= (gate_up != 0 && r < 8 ? n / 2 : n)) continue;
      const uint4 v = *reinterpret_cast<const uint4*>(to + r * 128 + ((chunk ^ (r & 7)) << 4));
      *reinterpret_cast<uint4*>(out + (static_cast<size_t>(expert) * n + matrix_row) * w.k + column + chunk * 8) = v;
    }
    __syncwarp();  // the next unit overwrites what was read
  }
}

template <QuantFormat kFormat>
cudaError_t dequantise(const QuantPack& pack, const Matrix& w, bf16* out, void* stream) {
  const dim3 grid(static_cast<unsigned>(pack.experts * pack.n_tiles), ceil_div(w.k / kUnit, kWarps * kUnitsEach));
  return launch(dequantise_rows<kFormat>, {grid, dim3(kWarps * 32), stream}, w, static_cast<int>(pack.n), pack.gate_up,
                out);
}

}  // namespace
}  // namespace moe::quant

/// out [experts, n, k] = the matrices of a pack that make_matrix takes, rounded once: the bits of moe_any_dequantise.
extern "C" int moe_quant_dequantise(const moe::QuantPack* w, __nv_bfloat16* out, void* stream) {
  using namespace moe;
  using namespace moe::quant;
  Matrix m;
  if (!make_matrix(*w, &m) || w->experts * w->n_tiles >= int64_t{1} << 31) return cudaErrorInvalidValue;
  switch (w->format) {
    case QuantFormat::kInt4: return dequantise<QuantFormat::kInt4>(*w, m, out, stream);
    case QuantFormat::kInt8: return dequantise<QuantFormat::kInt8>(*w, m, out, stream);
    case QuantFormat::kFp4: return dequantise<QuantFormat::kFp4>(*w, m, out, stream);
    case QuantFormat::kNvfp4: return dequantise<QuantFormat::kNvfp4>(*w, m, out, stream);
    case QuantFormat::kQ4k: return dequantise<QuantFormat::kQ4k>(*w, m, out, stream);
    default: return dequantise<QuantFormat::kFp8>(*w, m, out, stream);
  }
}
