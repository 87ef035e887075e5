// Reading a pack of quantised matrices (quant/args.cuh) as f32.
#pragma once

#include "any/any.cuh"
#include "quant/args.cuh"

namespace moe {

constexpr int kQuantTileRows = 16;
constexpr int kQuantTileBytes = 512;
constexpr int kQuantStep = 16;  // columns of a k-step

/// Columns of a tile.
__host__ __device__ constexpr int quant_tile_columns(QuantFormat format) {
  return format == QuantFormat::kInt4 ? 64 : 32;
}

/// Calls f(Format<kFormat>) for the format of a pack.
template <QuantFormat kFormat>
struct Format {
  static constexpr QuantFormat value = kFormat;
};
template <class F>
cudaError_t with_format(QuantFormat format, F&& f) {
  switch (format) {
    case QuantFormat::kInt4: return f(Format<QuantFormat::kInt4>{});
    case QuantFormat::kInt8: return f(Format<QuantFormat::kInt8>{});
    case QuantFormat::kFp8: return f(Format<QuantFormat::kFp8>{});
    default: return cudaErrorInvalidValue;
  }
}

/// Whether kernels can read a pack.
inline bool is_pack(const QuantPack& w) {
  const int columns = quant_tile_columns(w.format);
  const int64_t rows = w.n_tiles * kQuantTileRows;
  return is_code(w.format, QuantFormat::kFp8) && is_code(w.scale_dtype, Dtype::kF16) && w.experts >= 0 && w.k >= 0 &&
         w.n >= 0 && w.n <= rows && w.k_packed % columns == 0 && (w.perm != nullptr || w.k <= w.k_packed) &&
         w.k_packed < (int64_t{1} << 31) && w.group > 0 && w.groups > 0 && (w.scale_rows == 16 || w.scale_rows == 2) &&
         (w.gate_up == 0 || w.n % 2 == 0);
}

/// The row of the matrix that a row of a tile holds; there is none from `n` on.
__device__ __forceinline__ int64_t quant_row(const QuantPack& w, int64_t n_tile, int row) {
  if (w.gate_up == 0) return n_tile * kQuantTileRows + row;
  const int64_t column = n_tile * 8 + row % 8, width = w.n / 2;
  return column < width ? column + (row < 8 ? 0 : width) : w.n;
}

/// The column of x that a packed column is multiplied by; there is none from `k` on.
__device__ __forceinline__ int64_t quant_column(const QuantPack& w, int64_t expert, int64_t column) {
  if (w.perm == nullptr) return column;
  return w.perm[expert * w.k_packed + column];
}

/// Scale and zero point of a group of a tile's row.
struct GroupScale {
  float scale, zero;
};

template <QuantFormat kFormat>
__device__ __forceinline__ GroupScale group_scale(const QuantPack& w, int64_t tile, int64_t group, int row) {
  const int64_t at = tile * w.groups + group;
  const int64_t i = at * w.scale_rows + (w.scale_rows == 16 ? row : row / 8);
  float scale;
  switch (w.scale_dtype) {
    case Dtype::kF32: scale = static_cast<const float*>(w.scales)[i]; break;
    case Dtype::kBf16: scale = widen(static_cast<const bf16*>(w.scales)[i]); break;
    default: scale = widen(static_cast<const __half*>(w.scales)[i]); break;
  }
  constexpr float kMiddle = kFormat == QuantFormat::kInt4 ? 8.f : kFormat == QuantFormat::kInt8 ? 128.f : 0.f;
  return {scale, w.zeros == nullptr ? kMiddle : static_cast<float>(w.zeros[at * 16 + row])};
}

/// The group of a packed column.
__device__ __forceinline__ int64_t quant_group(const QuantPack& w, uint32_t column) {
  return min(static_cast<int64_t>(column / static_cast<uint32_t>(w.group)), w.groups - 1);
}

/// The i-th weight of a lane in a k-step, without scale and zero point. With 4 bits its words are words[0], with 8 bits
/// words[0 .. 1].
template <QuantFormat kFormat>
__device__ __forceinline__ float coded_weight(const uint32_t* words, int i) {
  if constexpr (kFormat == QuantFormat::kInt4) {
    return static_cast<float>(words[0] >> (4 * (i / 2) + 16 * (i % 2)) & 0xf);
  } else {
    const uint32_t q = words[i / 4] >> (8 * (i % 4 / 2) + 16 * (i % 2)) & 0xff;
    if constexpr (kFormat == QuantFormat::kInt8) return static_cast<float>(q);
    // The bits of E4M3 moved into an f32: its exponent is then 120 too small.
    return __uint_as_float((q & 0x80) << 24 | (q & 0x7f) << 20) * 0x1p120f;
  }
}

/// A lane's eight weights of the k-step that begins at packed column `column` of tile row `tile` (expert * n_tiles +
/// n_tile), in f32 and with the rounding that the scheme defines.
template <QuantFormat kFormat>
__device__ __forceinline__ void dequantised(const QuantPack& w, int64_t tile, uint32_t column, int lane,
                                            const uint32_t* words, float (&out)[8]) {
  const int row = lane / 4, own = lane % 4 * 2;
  const int64_t first = quant_group(w, column), last = quant_group(w, column + kQuantStep - 1);
  GroupScale scales[2] = {group_scale<kFormat>(w, tile, first, row), group_scale<kFormat>(w, tile, first, row + 8)};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    GroupScale s = scales[i / 2 % 2];
    if (first != last)
      s = group_scale<kFormat>(w, tile, quant_group(w, column + own + i % 2 + (i / 4) * 8), row + i / 2 % 2 * 8);
    out[i] = s.scale * (coded_weight<kFormat>(words, i) - s.zero);
  }
}

}  // namespace moe
