// How rows of x lie in shared memory for the products of warp_ring.cuh, a step of 128 columns at a time: as bf16, or,
// beside integers in groups of 128 and more, as digits (digits.cuh) with their unit and sum.
#pragma once

#include <type_traits>

#include "quant/digits.cuh"
#include "quant/product.cuh"

namespace moe::quant {

/// The sum of four squares, with the same roundings wherever it stands: left to the compiler, a token alone and one of
/// four had different ones.
__device__ __forceinline__ float sum_of_squares(float4 v) {
  return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, v.x * v.x)));
}

constexpr int kWideStep = 2 * kStep;  // columns

/// Where a row of bf16 has the word of columns `column` and `column + 1`: what a lane needs of 64 columns lies in 32
/// bytes.
__device__ __forceinline__ int word_at(int column) {
  return column / kStep * (2 * kStep) + column % 8 / 2 * 32 + column % kStep / 8 * 4;
}

/// bf16: the 8 columns of a product are 8 tokens.
struct FloatSteps {
  static constexpr bool kDigits = false;
  static constexpr int kBytes = 2 * kWideStep;  // of a step
  static constexpr int kEach = 2;               // tokens whose results a lane has

  /// The token of a lane's operand, and the token of its i-th result of a row.
  static __device__ __forceinline__ int operand_token() { return threadIdx.x % 32 / 4; }
  static __device__ __forceinline__ int result_token(int i) { return threadIdx.x % 4 * 2 + i; }

  /// Four columns from `column` on.
  static __device__ __forceinline__ void store(uint8_t* row, int column, uint2 words) {
    uint8_t* to = row + word_at(column);
    *reinterpret_cast<uint32_t*>(to) = words.x;
    *reinterpret_cast<uint32_t*>(to + 32) = words.y;
  }
  /// Keeps four columns as bf16 until the same lanes store them: here both do the same.
  static __device__ __forceinline__ void keep(uint8_t* row, int column, uint2 words) { store(row, column, words); }
  static __device__ __forceinline__ uint2 kept(const uint8_t* row, int column) {
    const uint8_t* from = row + word_at(column);
    return {*reinterpret_cast<const uint32_t*>(from), *reinterpret_cast<const uint32_t*>(from + 32)};
  }

  /// The piece of a row that is this lane's; in the order of `word_at`, a piece is the two words at 2 `piece`.
  static __device__ __forceinline__ int own_piece() { return threadIdx.x % 32; }
  static __device__ __forceinline__ void store_piece(uint8_t* row, int piece, uint2 words) {
    *reinterpret_cast<uint2*>(row + piece * 8) = words;
  }
};

/// Digits: the 8 columns of a product are both digits of 4 tokens. A step's two halves have the high digits of 64
/// columns, then the low ones, the four k-steps of a pair one after the other. Steps are made by whole warps, columns
/// beyond the last one zero.
struct DigitSteps {
  using Side = digits::Side<1>;
  static constexpr bool kDigits = true;
  static constexpr int kSide = 2 * kWideStep, kBytes = kSide + 32;
  static constexpr int kEach = 1;
  static_assert(sizeof(Side) <= kBytes - kSide, "what goes with the digits has its place behind them");

  static __device__ __forceinline__ int operand_token() { return threadIdx.x % 32 / 8; }
  static __device__ __forceinline__ int result_token(int) { return threadIdx.x % 4; }

  /// As FloatSteps; lane i has columns 4 i to 4 i + 3 of a step. A lane's digits are of two pairs 8 columns apart, so
  /// neighbours exchange one.
  static __device__ __forceinline__ void store(uint8_t* row, int column, uint2 words) {
    const bool upper = threadIdx.x & 2;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? words.x : words.y, 2);
    store_pairs(row + column / kWideStep * kBytes, upper ? other : words.x, upper ? words.y : other);
  }

  /// Keeps four columns as bf16 until the same lanes store them.
  static __device__ __forceinline__ void keep(uint8_t* row, int column, uint2 words) {
    *reinterpret_cast<uint2*>(row + column / kWideStep * kBytes + column % kWideStep * 2) = words;
  }
  static __device__ __forceinline__ uint2 kept(const uint8_t* row, int column) {
    return *reinterpret_cast<const uint2*>(row + column / kWideStep * kBytes + column % kWideStep * 2);
  }

  /// Two words are two pairs 8 columns apart.
  static __device__ __forceinline__ int own_piece() {
    const int lane = threadIdx.x % 32;
    return lane / 16 * 16 + own_pair() * 4 + lane / 4 % 4;
  }
  static __device__ __forceinline__ void store_piece(uint8_t* row, int piece, uint2 words) {
    store_pairs(row + piece / 32 * kBytes, words.x, words.y);
  }

 private:
  /// The t of this lane, which has columns 2t, 2t + 1, 2t + 8, 2t + 9 of k-step lane / 4 of each step.
  static __device__ __forceinline__ int own_pair() { return threadIdx.x % 2 * 2 + threadIdx.x / 2 % 2; }

  static __device__ __forceinline__ void store_pairs(uint8_t* step, uint32_t first, uint32_t second) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t top = __vmaxu2(first & 0x7fff7fffu, second & 0x7fff7fffu);
    const digits::Scale scale(__reduce_max_sync(0xffffffffu, max(top & 0xffffu, top >> 16)));
    const digits::Word w(first, second, scale.factor);
    uint8_t* to = step + lane / 16 * 128 + own_pair() * 16 + lane / 4 % 4 * 4;
    *reinterpret_cast<uint32_t*>(to) = w.high;
    *reinterpret_cast<uint32_t*>(to + 64) = w.low;
    const int own = digits::sum_of_bytes(w.high, 0) * 256 + digits::sum_of_bytes(w.low, 0);
    const int sum = __reduce_add_sync(0xffffffffu, own);
    if (lane == 0) *reinterpret_cast<Side*>(step + kSide) = {scale.unit(), {sum}};
  }
};

/// Whether rows beside weights of this format may be digits.
__host__ __device__ constexpr bool has_digits(QuantFormat format) { return format != QuantFormat::kFp8; }

/// Whether they are: a scale for each 32 columns costs more than digits save.
template <class Kind>
constexpr bool kTakesDigits = has_digits(Kind::kFormat) && Kind::kShare == kWideStep;

template <bool kDigits>
using RowSteps = std::conditional_t<kDigits, DigitSteps, FloatSteps>;

/// Bytes from a row of so many columns to the next, padded against bank conflicts.
__host__ __device__ constexpr int row_pitch(int columns, bool digits) {
  constexpr int kPad = 16;
  return (digits ? ceil_div(columns, kWideStep) * DigitSteps::kBytes : 2 * columns) + kPad;
}

}  // namespace moe::quant
