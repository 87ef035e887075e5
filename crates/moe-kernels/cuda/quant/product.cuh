// Products of quantised tiles in shared memory with up to 8 rows of x: 64 columns at a time, and scales multiply the
// sums.
#pragma once

#include "quant/matrix.cuh"

namespace moe::quant {

constexpr int kStep = 64;  // columns that a warp takes at a time

/// 64 columns of a row of x as column operands of four products; lane 4g + t has its part of the row of token g.
struct Columns {
  uint32_t word[8];

  /// `x`: the first of the columns in shared memory, bf16.
  __device__ __forceinline__ void load(const uint8_t* x) {
    const uint8_t* from = x + threadIdx.x % 4 * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) word[i] = *reinterpret_cast<const uint32_t*>(from + i * 16);
  }

  /// The same as load, for rows in which a lane's words are next to each other: `word_at` (quant/row_steps.cuh).
  __device__ __forceinline__ void load_ordered(const uint8_t* x) {
    const uint4* from = reinterpret_cast<const uint4*>(x + threadIdx.x % 4 * 32);
    const uint4 p = from[0], q = from[1];
    word[0] = p.x, word[1] = p.y, word[2] = p.z, word[3] = p.w;
    word[4] = q.x, word[5] = q.y, word[6] = q.z, word[7] = q.w;
  }
};

/// The scales of a lane's two rows in a group, and their zero points as operands. FP4: the factors of the rows, and the
/// scales in the group as operands. Q4_K: 1, and the operands of the group of this lane.
struct Factors {
  float low, high;
  uint32_t zero[2];
};

/// A lane's weights of a step as row operands of four products, and the scales of its two rows.
template <class Kind>
struct Operands {
  static constexpr int kShares = kStep / Kind::kShare;
  static constexpr int kSteps = 4 / kShares;  // of 16 columns in a share

  uint32_t a[4][4];
  float low[kShares], high[kShares];

  /// sum += weights times x: rows g and g + 8 of columns 2t and 2t + 1, as mma.sync has them.
  __device__ __forceinline__ void multiply(const Columns& x, float (&sum)[4]) const {
#pragma unroll
    for (int share = 0; share < kShares; ++share) {
      float acc[2][4] = {};  // two chains: a product that waits for the one before takes twice as long
#pragma unroll
      for (int step = share * kSteps; step < (share + 1) * kSteps; ++step)
        mma_bf16(acc[step % 2], a[step], x.word[2 * step], x.word[2 * step + 1]);
      sum[0] = fmaf(low[share], acc[0][0] + acc[1][0], sum[0]),
      sum[1] = fmaf(low[share], acc[0][1] + acc[1][1], sum[1]);
      sum[2] = fmaf(high[share], acc[0][2] + acc[1][2], sum[2]);
      sum[3] = fmaf(high[share], acc[0][3] + acc[1][3], sum[3]);
    }
  }
};

/// Reads a stage.
template <class Kind>
struct Stage {
  static constexpr QuantFormat kFormat = Kind::kFormat;
  static constexpr int kWords = step_words(kFormat);

  const uint8_t *tiles, *scales, *zeros;
  uint32_t low, high;  // bytes from a group's first scale to this lane's scales
  int shift, first_group, scale_bytes, f16;

  /// `row` and `k`: the row and the column of the matrix at which the stage begins.
  __device__ __forceinline__ Stage(const Matrix& w, const StageLayout& l, const uint8_t* stage, size_t row, int k)
      : tiles(stage + threadIdx.x % 32 * 16),
        scales(stage + l.scales),
        zeros(w.zeros != nullptr || is_fp4(kFormat) ? stage + l.zeros : nullptr),
        shift(w.shift),
        first_group(is_q4k(kFormat) ? k / kUnitColumns : w.group(k)),
        scale_bytes(w.scale_bytes),
        f16(w.f16) {
    const uint32_t g = threadIdx.x % 32 / 4;
    const bool halves = kFormat == QuantFormat::kFp8 && scale_bytes == 8;
    low = halves ? 0 : g * (kFormat == QuantFormat::kFp8 ? 4 : 2);
    high = halves ? 4 : low + 8 * (kFormat == QuantFormat::kFp8 ? 4 : 2);
    if (halves) scales += w.scales_at(row, first_group) & 15;
  }

  __device__ __forceinline__ float scale(const uint8_t* at) const {
    if constexpr (kFormat == QuantFormat::kFp8) {
      return *reinterpret_cast<const float*>(at);
    } else {
      return exact_scale(*reinterpret_cast<const uint16_t*>(at), f16 != 0);
    }
  }

  /// This lane's scales and zero points for a column of the matrix.
  __device__ __forceinline__ Factors factors(int column) const {
    if constexpr (is_q4k(kFormat)) {
      const uint8_t* unit = scales + (column / kUnitColumns - first_group) * kUnitBytes;
      Factors f = {1.f, 1.f, {}};
      load_q4k_operands<kStep>(unit + column / kStep % 2 * kUnitHalf, unit + kUnitShared, f.zero);
      return f;
    }
    const int group = (column >> shift) - first_group;
    const uint8_t* from = scales + group * scale_bytes;
    if constexpr (is_fp4(kFormat)) {
      const uint32_t g = threadIdx.x % 32 / 4;
      Factors f = {load_fp4_factor<kFormat>(zeros + g * 4, 0), load_fp4_factor<kFormat>(zeros + g * 4, 1), {}};
      load_fp4_operands<kFormat>(from + g, f.zero);
      return f;
    }
    Factors f = {scale(from + low), scale(from + high), {}};
    if constexpr (kFormat != QuantFormat::kFp8) {
      f.zero[0] = f.zero[1] = zero_operand<kFormat>(kFormat == QuantFormat::kInt4 ? 8 : 128);
      if (zeros != nullptr) {
        const uint8_t* zero = zeros + group * kTileRows + threadIdx.x % 32 / 4;
        f.zero[0] = zero_operand<kFormat>(zero[0]), f.zero[1] = zero_operand<kFormat>(zero[8]);
      }
    }
    return f;
  }

  /// Operands of the stage's i-th step, which begins at `column` of the matrix.
  __device__ __forceinline__ Operands<Kind> operands(int i, int column) const {
    uint32_t word[4 * kWords];
#pragma unroll
    for (int part = 0; part < kWords; ++part) {
      const uint4 v = *reinterpret_cast<const uint4*>(tiles + (i * kWords + part) * 512);
      word[4 * part] = v.x, word[4 * part + 1] = v.y, word[4 * part + 2] = v.z, word[4 * part + 3] = v.w;
    }
    Operands<Kind> out;
#pragma unroll
    for (int share = 0; share < out.kShares; ++share) {
      Factors f = factors(column + share * Kind::kShare);
      out.low[share] = f.low, out.high[share] = f.high;
#pragma unroll
      for (int step = share * out.kSteps; step < (share + 1) * out.kSteps; ++step) {
        if (is_fp4(kFormat) && step > 0 && step % operand_steps(kFormat) == 0) f = factors(column + step * 16);
        if constexpr (is_q4k(kFormat)) {
          uint32_t operand[2];
          share_q4k_operands(f.zero, step / 2, operand);
          unpack<kFormat>(word + step * kWords, operand, out.a[step]);
          continue;
        }
        unpack<kFormat>(word + step * kWords, f.zero, out.a[step]);
      }
    }
    return out;
  }
};

}  // namespace moe::quant
