// A ring of weights that one warp fills and empties. A warp copies what it multiplies itself, so there is no barrier
// between a copy and a product, and warps never wait for each other.
//
// A place of the ring holds a step: up to 128 columns of a row of tiles, then the scales of their groups, then the zero
// points, or the factors of FP4; with Q4_K a unit. Where groups have 128 columns or more, a step's sums are scaled
// once. The overhead of a step also costs instructions; with 64 columns it would cost as many as the products: 190
// instead of 140 for 128 columns.
#pragma once

#include "ptx/policy.cuh"
#include "quant/row_steps.cuh"

namespace moe::quant {

/// Calls f(Kind) of matrices of this format for `WarpRing`; the kind says that all groups have at least kWideStep
/// columns, or 32.
template <class F>
int with_step_kind(QuantFormat format, bool wide, F f) {
  switch (format) {
    case QuantFormat::kInt4: return wide ? f(Kind<QuantFormat::kInt4, 128>{}) : f(Kind<QuantFormat::kInt4, 32>{});
    case QuantFormat::kInt8: return wide ? f(Kind<QuantFormat::kInt8, 128>{}) : f(Kind<QuantFormat::kInt8, 32>{});
    case QuantFormat::kFp4: return f(Kind<QuantFormat::kFp4, 128>{});
    case QuantFormat::kNvfp4: return f(Kind<QuantFormat::kNvfp4, 128>{});
    case QuantFormat::kQ4k: return f(Kind<QuantFormat::kQ4k, 128>{});
    default: return wide ? f(Kind<QuantFormat::kFp8, 128>{}) : cudaErrorInvalidValue;
  }
}
inline bool has_wide_groups(const Matrix& w) { return w.shift >= 7; }

constexpr int kStepZeros = 128, kStepSide = 192;  // bytes from a step's scales to its zero points; bytes of both
static_assert(kWideStep / fp4_group(QuantFormat::kNvfp4) * kFp4Bytes <= kStepZeros &&
              kStepZeros + kFp4Factors <= kStepSide && kUnitBytes <= kStepSide && kUnitColumns == kWideStep);
/// The bytes of a place.
__host__ __device__ constexpr int step_bytes(QuantFormat format) { return tile_bytes(format, kWideStep) + kStepSide; }

/// A lane's part of a row of tiles.
struct TileRow {
  const uint8_t* q = nullptr;
  const uint8_t* side = nullptr;
};

/// A lane's part of all rows of tiles of a matrix. It is computed once: otherwise, starting the copy of a step would
/// take more instructions than multiplying it.
struct TileRows {
  const uint8_t* q = nullptr;  // this lane's weights in the first row of tiles
  // The first lanes copy the scales of a step, the next ones its zero points, 8 bytes each; FP4: the factors of the
  // rows, which are the same for all steps.
  const uint8_t* side = nullptr;
  uint32_t row_bytes = 0, side_row = 0, side_each = 0;
  uint32_t groups = 0;  // this lane copies only if at least this many groups follow from the step's first one on
  int side_to = 0, shift = 0;

  TileRows() = default;
  __device__ __forceinline__ TileRows(const Matrix& w, QuantFormat format)
      : q(w.q + threadIdx.x % 32 * 16), row_bytes(tile_bytes(format, w.k)), shift(w.shift) {
    const int lane = threadIdx.x % 32;
    const int of_step = max(1, kWideStep >> shift), each = w.scale_bytes / 8, scales = of_step * each;
    if (is_q4k(format)) {
      side_row = units_of(w.k) * kUnitBytes;
      if (lane < kUnitBytes / 8) {
        side = w.scales + lane * 8, side_to = lane * 8;
        side_each = kUnitBytes / kUnitGroups, groups = w.groups;
      }
      return;
    }
    if (is_fp4(format)) {
      side_row = fp4_row_bytes(w.groups);
      if (lane < scales) {
        side = w.scales + kFp4Factors + lane * 8, side_to = lane * 8;
        side_each = kFp4Bytes, groups = max(0, w.groups - lane / (kFp4Bytes / 8));
      } else if (lane < scales + kFp4Factors / 8) {
        const int i = lane - scales;
        side = w.scales + i * 8, side_to = kStepZeros + i * 8, side_each = 0, groups = w.groups;
      }
      return;
    }
    // The group of this lane: `each` is 1, 4 or 8, and a division would take longer.
    const int of_lane = lane >> (31 - __clz(each));
    if (lane < scales) {
      side = w.scales + lane * 8, side_to = lane * 8;
      side_each = w.scale_bytes, side_row = w.groups * side_each, groups = max(0, w.groups - of_lane);
    } else if (w.zeros != nullptr && lane < scales + of_step * (kTileRows / 8)) {
      const int i = lane - scales;
      side = w.zeros + i * 8, side_to = kStepZeros + i * 8;
      side_each = kTileRows, side_row = w.groups * kTileRows, groups = max(0, w.groups - i / (kTileRows / 8));
    }
  }

  __device__ __forceinline__ TileRow at(uint32_t row) const {
    return {q + static_cast<uint64_t>(row) * row_bytes, side + static_cast<uint64_t>(row) * side_row};
  }
};

/// What a lane needs to know of a matrix to find its scales.
struct LaneScales {
  uint32_t low, high;  // bytes from a group's first scale to the scales of this lane's rows
  int scale_bytes, shift;
  bool zeros, f16;

  __device__ __forceinline__ explicit LaneScales(const Matrix& w, QuantFormat format)
      : scale_bytes(w.scale_bytes), shift(w.shift), zeros(w.zeros != nullptr), f16(w.f16 != 0) {
    const uint32_t g = threadIdx.x % 32 / 4, size = format == QuantFormat::kFp8 ? 4 : 2;
    if (is_fp4(format)) {
      low = g, high = g + 8;
      return;
    }
    const bool halves = format == QuantFormat::kFp8 && scale_bytes == 8;
    low = halves ? 0 : g * size;
    high = halves ? 4 : low + 8 * size;
  }

  template <QuantFormat kFormat>
  __device__ __forceinline__ float scale(const uint8_t* at) const {
    if constexpr (kFormat == QuantFormat::kFp8) return *reinterpret_cast<const float*>(at);
    else return exact_scale(*reinterpret_cast<const uint16_t*>(at), f16);
  }
};

/// kDepth: the number of steps that are in flight or waiting.
template <class Kind, int kDepth>
struct WarpRing {
  static constexpr QuantFormat kFormat = Kind::kFormat;
  static constexpr int kTileBytes = tile_bytes(kFormat, kWideStep), kPlace = step_bytes(kFormat);
  static constexpr int kHalf = kTileBytes / 2, kBytes = kDepth * kPlace, kWords = step_words(kFormat);

  uint8_t* base;
  uint64_t policy = read_once();
  int filled = 0, taken = 0;  // byte offsets of the next places

  __device__ __forceinline__ explicit WarpRing(uint8_t* base) : base(base) {}

  static __device__ __forceinline__ void advance(int& place) {
    place += kPlace;
    if (place == kBytes) place = 0;
  }

  /// Starts the copy of `columns` columns, at least one, from k on.
  __device__ __forceinline__ void copy(const TileRows& of, const TileRow& row, int k, int columns) {
    uint8_t* to = base + filled;
    const uint8_t* from = row.q + tile_bytes(kFormat, k);
    const uint32_t lane = threadIdx.x % 32 * 16, group = k >> of.shift;
#pragma unroll
    for (int part = 0; part < kTileBytes / 512; ++part)
      if (part * 512 < kHalf || columns > kStep) cp_async16(to + lane + part * 512, from + part * 512, policy);
    if (group < of.groups) cp_async8(to + kTileBytes + of.side_to, row.side + group * of.side_each);
    advance(filled);
    cp_async_commit();
  }

  /// Counts as the copy of a step, but copies nothing.
  __device__ __forceinline__ void skip() { cp_async_commit(); }

  /// Waits for the oldest step. There must be kDepth started copies that have not been taken.
  __device__ __forceinline__ const uint8_t* take() {
    cp_async_wait<kDepth - 1>();
    __syncwarp();
    const uint8_t* step = base + taken;
    advance(taken);
    return step;
  }

  /// A lane's words of half of a step.
  static __device__ __forceinline__ void read(const uint8_t* step, int half, uint32_t (&word)[4 * kWords]) {
#pragma unroll
    for (int part = 0; part < kWords; ++part) {
      const uint4 v = *reinterpret_cast<const uint4*>(step + threadIdx.x % 32 * 16 + half * kHalf + part * 512);
      word[4 * part] = v.x, word[4 * part + 1] = v.y, word[4 * part + 2] = v.z, word[4 * part + 3] = v.w;
    }
  }

  /// sum += the oldest step times up to 128 columns of x. `x` points to the row of the token of this lane's operand;
  /// the row of the token of its results is `to_result` bytes further. sum[0] and sum[1] belong to row g, sum[2] and
  /// sum[3] to row g + 8.
  template <class RowSteps>
  __device__ __forceinline__ void multiply(const LaneScales& w, int columns, const uint8_t* x, int to_result,
                                           float (&sum)[4]) {
    if constexpr (RowSteps::kDigits) multiply_digits(w, x, x + to_result + RowSteps::kSide, sum);
    else multiply_floats(w, columns, x, sum);
  }

 private:
  __device__ __forceinline__ void multiply_digits(const LaneScales& w, const uint8_t* x, const uint8_t* row_side,
                                                  float (&sum)[4]) {
    static_assert(Kind::kShare == kWideStep, "digits' sums are scaled once in a step");
    const uint8_t *step = take(), *side = step + kTileBytes;
    const auto& of = *reinterpret_cast<const digits::Side<1>*>(row_side);
    digits::Factors<kFormat> f;
    f.load(reinterpret_cast<const uint16_t*>(side + w.low), w.f16, side + kStepZeros + threadIdx.x % 32 / 4, w.zeros);
    // Two chains: a product that waits for the one before takes twice as long. If there is no second half, its weights
    // may be anything, because they are multiplied by zeros.
    int acc[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t word[4 * kWords];
      read(step, half, word);
      const uint4 b = *reinterpret_cast<const uint4*>(x + half * 128 + threadIdx.x % 8 * 16);
      uint32_t a[4];
      digits::bytes<kFormat>(word, a);
      digits::mma(acc[0], a, b.x, b.y);
      digits::bytes<kFormat>(word + 2 * kWords, a);
      digits::mma(acc[1], a, b.z, b.w);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      f.add(i, acc[0][2 * i] + acc[1][2 * i], acc[0][2 * i + 1] + acc[1][2 * i + 1], of.sums[0], of.unit, sum[2 * i]);
    __syncwarp();  // all lanes have read it: the place may be filled again
  }

  __device__ __forceinline__ void multiply_floats(const LaneScales& w, int columns, const uint8_t* x, float (&sum)[4]) {
    const uint8_t* step = take();
    const uint8_t* side = step + kTileBytes;
    constexpr int kShares = kWideStep / Kind::kShare;
    float acc[2][4] = {};  // two chains: a product that waits for the one before takes twice as long
    uint32_t zero[2];
    float low = 0, high = 0;
    [[maybe_unused]] uint32_t own[2];  // Q4_K: the operands of a group
    const auto begin = [&](int share) {
      if constexpr (is_q4k(kFormat)) {
        low = high = 1.f;
        return load_q4k_operands<kWideStep>(side, side + kUnitShared, own);
      }
      if constexpr (is_fp4(kFormat)) {
        const uint8_t* factors = side + kStepZeros + w.low * 4;
        low = load_fp4_factor<kFormat>(factors, 0), high = load_fp4_factor<kFormat>(factors, 1);
        return;
      }
      const int group = kShares == 1 ? 0 : share * Kind::kShare >> w.shift;
      const uint8_t* from = side + group * w.scale_bytes;
      low = w.scale<kFormat>(from + w.low), high = w.scale<kFormat>(from + w.high);
      if constexpr (kFormat != QuantFormat::kFp8) {
        zero[0] = zero[1] = zero_operand<kFormat>(kFormat == QuantFormat::kInt4 ? 8 : 128);
        if (w.zeros) {
          const uint8_t* at = side + kStepZeros + group * kTileRows + threadIdx.x % 32 / 4;
          zero[0] = zero_operand<kFormat>(at[0]), zero[1] = zero_operand<kFormat>(at[8]);
        }
      }
    };
    const auto end = [&] {
      sum[0] = fmaf(low, acc[0][0] + acc[1][0], sum[0]), sum[1] = fmaf(low, acc[0][1] + acc[1][1], sum[1]);
      sum[2] = fmaf(high, acc[0][2] + acc[1][2], sum[2]), sum[3] = fmaf(high, acc[0][3] + acc[1][3], sum[3]);
      if constexpr (kShares > 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[0][i] = acc[1][i] = 0;
      }
    };
    if constexpr (kShares == 1) begin(0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && columns <= kStep) break;
      uint32_t word[4 * kWords];
      read(step, half, word);
      Columns of;
      of.load_ordered(x + half * 2 * kStep);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (kShares > 1 && i % 2 == 0) begin(half * 2 + i / 2);
        if constexpr (is_q4k(kFormat)) {
          if (i % 2 == 0) share_q4k_operands(own, half * 2 + i / 2, zero);
        }
        if constexpr (is_fp4(kFormat)) {
          const int k = half * 4 + i;
          if (k % operand_steps(kFormat) == 0)
            load_fp4_operands<kFormat>(side + w.low + k / operand_steps(kFormat) * kFp4Bytes, zero);
        }
        uint32_t a[4];
        unpack<kFormat>(word + i * kWords, zero, a);
        mma_bf16(acc[i % 2], a, of.word[2 * i], of.word[2 * i + 1]);
        if (kShares > 1 && i % 2 == 1) end();
      }
    }
    if constexpr (kShares == 1) end();
    __syncwarp();  // all lanes have read it: the place may be filled again
  }
};

}  // namespace moe::quant
