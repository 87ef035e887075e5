// A pack as the streaming kernels see it: rows of tiles, and stages of shared memory that hold some columns of one.
#pragma once

#include "ptx/ptx.cuh"
#include "quant/args.cuh"
#include "quant/unpack.cuh"

namespace moe::quant {

constexpr int kTileRows = 16;

/// A checked pack: its columns are the columns of x, and the number of columns of a group is a power of two.
struct Matrix {
  const uint8_t* q;
  const uint8_t* scales;
  const uint8_t* zeros;  // or null; null for FP4, whose factors are with the scales
  int n_tiles, k, groups;
  int shift;        // log2 of the number of a group's columns; 31 if there is one group
  int scale_bytes;  // bytes of the scales of a group in a row of tiles; Q4_K: its part of a unit's bytes
  int f16;          // whether 16-bit scales are f16; else they are bf16

  /// The number of the row of tiles of an expert, over all experts.
  __host__ __device__ size_t tile_row(int expert, int tile) const {
    return static_cast<size_t>(expert) * n_tiles + tile;
  }
  __host__ __device__ bool wide() const { return shift > 5; }
  __device__ int group(int column) const { return column >> shift; }
  /// The byte offset of the scales of a group in a row of tiles.
  __device__ size_t scales_at(size_t row, int group) const { return (row * groups + group) * scale_bytes; }
};

/// Makes the matrix of a pack. The caller checks whether `gate_up` and the sizes are right for its op.
inline bool make_matrix(const QuantPack& pack, Matrix* out) {
  const bool fp8 = pack.format == QuantFormat::kFp8, fp4 = is_fp4(pack.format), q4k = is_q4k(pack.format);
  int shift = 31;
  if (q4k) {
    if (pack.group != kQ4kGroup || pack.groups != ceil_div(pack.k, pack.group)) return false;
    shift = 5;
  } else if (fp4) {
    if (pack.group != fp4_group(pack.format) || pack.groups != ceil_div(pack.k, pack.group)) return false;
    shift = pack.format == QuantFormat::kNvfp4 ? 4 : 5;
  } else if (pack.groups > 1) {
    for (shift = 5; shift < 31 && int64_t{1} << shift != pack.group; ++shift) {}
    if (shift == 31 || (fp8 && shift == 5) || pack.groups != ceil_div(pack.k, pack.group)) return false;
  }
  const bool scales =
      fp8          ? pack.scale_dtype == Dtype::kF32 && (pack.scale_rows == 2 || pack.scale_rows == 16)
      : fp4 || q4k ? pack.scale_dtype == Dtype::kF32 && pack.scale_rows == 16
                   : pack.scale_rows == 16 && (pack.scale_dtype == Dtype::kF16 || pack.scale_dtype == Dtype::kBf16);
  // Copies are of 16 bytes. With 8 bytes for a group, the last copy must not reach beyond the end.
  const bool whole = pack.scale_rows != 2 || pack.experts * pack.n_tiles * pack.groups % 2 == 0;
  const int64_t rows = pack.gate_up != 0 ? pack.n / 2 * 2 : pack.n;
  if (!is_code(pack.format, kLastFormat) || pack.perm != nullptr || pack.k != pack.k_packed || pack.k <= 0 ||
      pack.k % 64 != 0 || pack.k > 1 << 20 || pack.groups < 1 || pack.experts < 1 || pack.experts > INT16_MAX ||
      pack.n < 1 || pack.n > 1 << 24 || rows != pack.n || !scales || !whole ||
      (!is_integer(pack.format) && pack.zeros != nullptr) ||
      pack.n_tiles != (pack.gate_up != 0 ? ceil_div(pack.n / 2, 8) : ceil_div(pack.n, kTileRows)))
    return false;
  *out = {pack.q,
          static_cast<const uint8_t*>(pack.scales),
          pack.zeros,
          static_cast<int>(pack.n_tiles),
          static_cast<int>(pack.k),
          static_cast<int>(pack.groups),
          shift,
          q4k   ? kUnitBytes / kUnitGroups
          : fp4 ? kFp4Bytes
                : pack.scale_rows * (fp8 ? 4 : 2),
          pack.scale_dtype == Dtype::kF16};
  return true;
}

/// The matrices of an expert's two products, which go together.
inline bool make_experts(const QuantPack& w13, const QuantPack& w2, Matrix* first, Matrix* second) {
  return make_matrix(w13, first) && make_matrix(w2, second) && w13.format == w2.format && w13.gate_up != 0 &&
         w2.gate_up == 0 && w13.experts == w2.experts && w13.n == 2 * w2.k && w2.n == w13.k;
}

/// The properties for which kernels are compiled: a format, and a number of columns that always share a scale of sums.
template <QuantFormat kFormat_, int kShare_>
struct Kind {
  static constexpr QuantFormat kFormat = kFormat_;
  static constexpr int kShare = kShare_;
};

/// Calls f(Kind) for matrices of this format; the kind says whether all groups have at least 64 columns.
template <class F>
auto with_kind(QuantFormat format, bool wide, F f) {
  switch (format) {
    case QuantFormat::kInt4: return wide ? f(Kind<QuantFormat::kInt4, 64>{}) : f(Kind<QuantFormat::kInt4, 32>{});
    case QuantFormat::kInt8: return wide ? f(Kind<QuantFormat::kInt8, 64>{}) : f(Kind<QuantFormat::kInt8, 32>{});
    case QuantFormat::kFp4: return f(Kind<QuantFormat::kFp4, 64>{});
    case QuantFormat::kNvfp4: return f(Kind<QuantFormat::kNvfp4, 64>{});
    case QuantFormat::kQ4k: return f(Kind<QuantFormat::kQ4k, 64>{});
    default: return f(Kind<QuantFormat::kFp8, 64>{});
  }
}

/// Bytes of `columns` columns of a row of tiles.
__host__ __device__ constexpr int tile_bytes(QuantFormat format, int columns) {
  return columns * (code_bits(format) == 4 ? kTileRows / 2 : kTileRows);
}

/// A stage holds tiles, then the scales of their groups, then the zero points, or the factors of FP4. Q4_K has its
/// units instead.
struct StageLayout {
  int scales, zeros, bytes;
};

inline StageLayout stage_layout(const Matrix& w, QuantFormat format, int chunk) {
  const int most = w.shift == 31 ? 1 : chunk / (1 << w.shift) + 2, groups = most < w.groups ? most : w.groups;
  StageLayout l;
  l.scales = tile_bytes(format, chunk);
  if (is_q4k(format)) {
    const int units = chunk / kUnitColumns + 2, all = units_of(w.k);
    l.zeros = l.scales;
    l.bytes = round_up(l.scales + (units < all ? units : all) * kUnitBytes, 128);
    return l;
  }
  l.zeros = l.scales + round_up(groups * w.scale_bytes, 16) + 16;
  const int rest = is_fp4(format) ? kFp4Factors : w.zeros != nullptr ? 16 * groups : 0;
  l.bytes = round_up(l.zeros + rest, 128);
  return l;
}

/// The consecutive pieces of memory that fill a stage.
struct Pieces {
  const uint8_t* from[3];
  uint32_t to[3], bytes[3];

  __device__ __forceinline__ uint32_t total() const { return bytes[0] + bytes[1] + bytes[2]; }
};

/// Columns [k, k + columns) of a row of tiles.
template <QuantFormat kFormat>
__device__ __forceinline__ Pieces pieces(const Matrix& w, const StageLayout& l, size_t row, int k, int columns) {
  const int first = w.group(k), count = w.group(k + columns - 1) - first + 1;
  if constexpr (is_q4k(kFormat)) {
    const int unit = k / kUnitColumns, units = (k + columns - 1) / kUnitColumns - unit + 1;
    const uint8_t* tiles = w.q + row * tile_bytes(kFormat, w.k) + tile_bytes(kFormat, k);
    const uint8_t* from = w.scales + (row * units_of(w.k) + unit) * kUnitBytes;
    return {{tiles, from, nullptr},
            {0, static_cast<uint32_t>(l.scales), 0},
            {static_cast<uint32_t>(tile_bytes(kFormat, columns)), static_cast<uint32_t>(units * kUnitBytes), 0}};
  }
  if constexpr (is_fp4(kFormat)) {
    const uint8_t* factors = w.scales + row * fp4_row_bytes(w.groups);
    const uint8_t* tiles = w.q + row * tile_bytes(kFormat, w.k) + tile_bytes(kFormat, k);
    const auto bytes = [](int n) { return static_cast<uint32_t>(n); };
    return {{tiles, factors + kFp4Factors + first * kFp4Bytes, factors},
            {0, bytes(l.scales), bytes(l.zeros)},
            {bytes(tile_bytes(kFormat, columns)), bytes(count * kFp4Bytes), bytes(kFp4Factors)}};
  }
  const size_t begin = w.scales_at(row, first), even = begin & ~size_t{15};
  Pieces p;
  p.from[0] = w.q + row * tile_bytes(kFormat, w.k) + tile_bytes(kFormat, k);
  p.from[1] = w.scales + even;
  p.from[2] = w.zeros + (row * w.groups + first) * 16;
  p.to[0] = 0, p.to[1] = l.scales, p.to[2] = l.zeros;
  p.bytes[0] = tile_bytes(kFormat, columns);
  p.bytes[1] = round_up(static_cast<uint32_t>(begin - even) + count * w.scale_bytes, 16);
  p.bytes[2] = w.zeros != nullptr ? 16 * count : 0;
  return p;
}

#if MOE_HAS_TMA
/// Copies the pieces by the copy engine. One thread.
__device__ __forceinline__ void bulk_copy_pieces(uint8_t* stage, const Pieces& p, uint64_t* bar) {
  arrive_expecting(bar, p.total());
#pragma unroll
  for (int i = 0; i < 3; ++i)
    if (p.bytes[i] != 0) bulk_copy(stage + p.to[i], p.from[i], p.bytes[i], bar);
}
#endif

/// Copies the pieces by one warp, as copy_rows does: the barrier is initialised with copy_arrivals().
__device__ __forceinline__ void copy_pieces(uint8_t* stage, const Pieces& p, uint64_t* bar) {
#if MOE_HAS_TMA
  if (elect_one()) bulk_copy_pieces(stage, p, bar);
  __syncwarp();
#else
#pragma unroll
  for (int i = 0; i < 3; ++i)
    for (uint32_t at = threadIdx.x % 32 * 16; at < p.bytes[i]; at += 32 * 16)
      cp_async16(stage + p.to[i] + at, p.from[i] + at);
  cp_async_arrive(bar);
#endif
}

}  // namespace moe::quant
