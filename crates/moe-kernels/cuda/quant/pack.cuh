// Reading a pack of quantised matrices (quant/args.cuh) as f32.
#pragma once

#include "any/any.cuh"
#include "quant/args.cuh"
#include "quant/fp4.cuh"
#include "quant/q4k.cuh"

namespace moe {

constexpr int kQuantTileRows = 16;
constexpr int kQuantTileBytes = 512;
constexpr int kQuantStep = 16;  // columns of a k-step

/// Columns of a tile.
__host__ __device__ constexpr int quant_tile_columns(QuantFormat format) { return code_bits(format) == 4 ? 64 : 32; }

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
    case QuantFormat::kFp4: return f(Format<QuantFormat::kFp4>{});
    case QuantFormat::kNvfp4: return f(Format<QuantFormat::kNvfp4>{});
    case QuantFormat::kQ4k: return f(Format<QuantFormat::kQ4k>{});
    default: return cudaErrorInvalidValue;
  }
}

/// Whether kernels can read a pack.
inline bool is_pack(const QuantPack& w) {
  const int columns = quant_tile_columns(w.format);
  const int64_t rows = w.n_tiles * kQuantTileRows;
  return is_code(w.format, kLastFormat) && is_code(w.scale_dtype, Dtype::kF16) && w.experts >= 0 && w.k >= 0 &&
         w.n >= 0 && w.n <= rows && w.k_packed % columns == 0 && (w.perm != nullptr || w.k <= w.k_packed) &&
         w.k_packed < (int64_t{1} << 31) && w.group > 0 && w.groups > 0 && (w.scale_rows == 16 || w.scale_rows == 2) &&
         (w.gate_up == 0 || w.n % 2 == 0) &&
         (!is_fp4(w.format) || (w.scale_dtype == Dtype::kF32 && w.scale_rows == 16)) &&
         (!is_q4k(w.format) || (w.groups <= 1 || w.group == kQ4kGroup));
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

/// Scale and zero point of a group of a tile's row, or scale and minimum.
struct GroupScale {
  float scale, zero;
};

/// The value of an E4M3 byte that is not NaN: its bits moved into an f32, whose exponent is then 120 too small.
__device__ __forceinline__ float widen_e4m3(uint32_t q) {
  return __uint_as_float((q & 0x80) << 24 | (q & 0x7f) << 20) * 0x1p120f;
}

/// The same of an E2M1 code of 4 bits, whose exponent is then 126 too small.
__device__ __forceinline__ float widen_e2m1(uint32_t q) {
  return __uint_as_float((q & 8) << 28 | (q & 7) << 22) * 0x1p126f;
}

/// The scales and zero points of a tile row (expert * n_tiles + n_tile).
template <QuantFormat kFormat>
struct TileScales {
  static constexpr bool kTwoLevels = is_fp4(kFormat);
  const uint8_t* scales;  // [groups, rows]; Q4_K: units (q4k.cuh)
  const float* factors;   // [16], of the rows, where scales have two levels
  const uint8_t* zeros;   // [groups, 16] or null
  Dtype dtype;
  int rows;              // scales of a group, 16 or 2
  uint32_t group, last;  // columns of a group; the number of the last group
  int shift;             // columns of a group as a power of two; 0 where they are none

  __device__ __forceinline__ TileScales(const QuantPack& w, int64_t tile) {
    const int size = kTwoLevels ? 1 : w.scale_dtype == Dtype::kF32 ? 4 : 2;
    const int front = kTwoLevels ? kFp4Factors : 0;
    const int64_t bytes = is_q4k(kFormat) ? units_of(static_cast<int>(w.k_packed)) * int64_t{kUnitBytes}
                                          : front + w.groups * w.scale_rows * size;
    const uint8_t* first = static_cast<const uint8_t*>(w.scales) + tile * bytes;
    scales = first + front;
    factors = reinterpret_cast<const float*>(first);
    zeros = w.zeros == nullptr ? nullptr : w.zeros + tile * w.groups * kQuantTileRows;
    dtype = w.scale_dtype;
    rows = w.scale_rows;
    group = static_cast<uint32_t>(w.group);
    last = static_cast<uint32_t>(w.groups - 1);
    shift = __popc(group) == 1 ? __ffs(static_cast<int>(group)) - 1 : 0;
  }

  /// Whether the columns of every k-step share a scale.
  __device__ __forceinline__ bool has_whole_steps() const { return last == 0 || shift >= 4; }

  /// The group of a packed column.
  __device__ __forceinline__ uint32_t group_of(uint32_t column) const {
    return min(shift > 0 ? column >> shift : column / group, last);
  }

  /// Scale and zero point of a group of row `row` of the tile, or scale and minimum.
  __device__ __forceinline__ GroupScale at(uint32_t g, int row) const {
    const size_t i = static_cast<size_t>(g) * rows + (rows == kQuantTileRows ? row : row / 8);
    if constexpr (is_q4k(kFormat)) {
      const ScaleMinimum of = q4k_scale(scales + g / kUnitGroups * kUnitBytes, g % kUnitGroups, row);
      return {of.scale, of.minimum};
    } else if constexpr (kTwoLevels) {
      return {fp4_scale<kFormat>(scales[i], factors[row]), 0.f};
    } else {
      float scale;
      switch (dtype) {
        case Dtype::kF32: scale = reinterpret_cast<const float*>(scales)[i]; break;
        case Dtype::kBf16: scale = widen(reinterpret_cast<const bf16*>(scales)[i]); break;
        default: scale = widen(reinterpret_cast<const __half*>(scales)[i]); break;
      }
      return {scale, zero(static_cast<size_t>(g) * kQuantTileRows + row)};
    }
  }

  __device__ __forceinline__ float zero(size_t i) const {
    if constexpr (is_integer(kFormat)) {
      constexpr float kMiddle = kFormat == QuantFormat::kInt4 ? 8.f : 128.f;
      return zeros == nullptr ? kMiddle : static_cast<float>(zeros[i]);
    } else {
      return 0.f;
    }
  }
};

/// The i-th weight of a lane in a k-step, without scale and zero point. With 4 bits its words are words[0], with 8 bits
/// words[0 .. 1].
template <QuantFormat kFormat>
__device__ __forceinline__ float coded_weight(const uint32_t* words, int i) {
  if constexpr (code_bits(kFormat) == 4) {
    if constexpr (is_fp4(kFormat)) return widen_e2m1(fp4_code(words[0], i));
    return static_cast<float>(words[0] >> (4 * (i / 2) + 16 * (i % 2)) & 0xf);
  } else {
    const uint32_t q = words[i / 4] >> (8 * (i % 4 / 2) + 16 * (i % 2)) & 0xff;
    if constexpr (kFormat == QuantFormat::kInt8) return static_cast<float>(q);
    return widen_e4m3(q);
  }
}

/// A lane's eight weights of the k-step that begins at packed column `column` of a tile row, in f32 and with the
/// rounding that the scheme defines.
template <QuantFormat kFormat>
__device__ __forceinline__ void dequantised(const TileScales<kFormat>& of, uint32_t column, int lane,
                                            const uint32_t* words, float (&out)[8]) {
  const int row = lane / 4, own = lane % 4 * 2;
  const uint32_t first = of.group_of(column);
  const bool same = of.has_whole_steps() || first == of.group_of(column + kQuantStep - 1);
  const GroupScale scales[2] = {of.at(first, row), of.at(first, row + 8)};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    GroupScale s = scales[i / 2 % 2];
    if (!same) s = of.at(of.group_of(column + own + i % 2 + (i / 4) * 8), row + i / 2 % 2 * 8);
    const float code = coded_weight<kFormat>(words, i);
    // The product of Q4_K is exact.
    out[i] = is_q4k(kFormat) ? s.scale * code - s.zero : s.scale * (code - s.zero);
  }
}

}  // namespace moe
