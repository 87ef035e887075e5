// How rows of x are stored in shared memory for the products of warp_ring.cuh, in steps of 128 columns: as bf16, or,
// with integer weights in groups of 128 and more, as digits (digits.cuh) with their unit and sum.
#pragma once

#include <type_traits>

#include "quant/digits.cuh"
#include "quant/product.cuh"

namespace moe::quant {

/// The sum of four squares, with the same roundings in every caller. Left to the compiler, the roundings for a single
/// token differed from the roundings for one of four tokens.
__device__ __forceinline__ float sum_of_squares(float4 v) {
  return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, v.x * v.x)));
}

constexpr int kWideStep = 2 * kStep;  // columns

/// The index of the word with columns `column` and `column + 1` in a row of bf16. In this order, the words that a lane
/// needs of 64 columns are 32 consecutive bytes.
__device__ __forceinline__ int word_at(int column) {
  return column / kStep * (2 * kStep) + column % 8 / 2 * 32 + column % kStep / 8 * 4;
}

/// bf16: the 8 columns of a product are 8 tokens.
struct FloatSteps {
  static constexpr bool kDigits = false;
  static constexpr int kBytes = 2 * kWideStep;  // bytes of a step
  static constexpr int kEach = 2;               // tokens whose results a lane has

  /// The token of a lane's operand, and the token of its i-th result of a row.
  static __device__ __forceinline__ int operand_token() { return threadIdx.x % 32 / 4; }
  static __device__ __forceinline__ int result_token(int i) { return threadIdx.x % 4 * 2 + i; }

  /// Stores four columns from `column` on.
  static __device__ __forceinline__ void store(uint8_t* row, int column, uint2 words) {
    uint8_t* to = row + word_at(column);
    *reinterpret_cast<uint32_t*>(to) = words.x;
    *reinterpret_cast<uint32_t*>(to + 32) = words.y;
  }
  /// Keeps four columns as bf16 until the same lanes store them. Here `keep` and `store` do the same.
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

/// Digits: the 8 columns of a product are the two digits of 4 tokens. Each half of a step has the high digits of 64
/// columns and then the low ones; the four k-steps of a pair are next to each other. Whole warps make a step; columns
/// after the last one are zero.
struct DigitSteps {
  using Side = digits::Side<1>;
  static constexpr bool kDigits = true;
  static constexpr int kSide = 2 * kWideStep, kBytes = kSide + 32;
  static constexpr int kEach = 1;
  static_assert(sizeof(Side) <= kBytes - kSide, "what goes with the digits has its place behind them");

  static __device__ __forceinline__ int operand_token() { return threadIdx.x % 32 / 8; }
  static __device__ __forceinline__ int result_token(int) { return threadIdx.x % 4; }

  /// The same as in FloatSteps; lane i has columns 4 i to 4 i + 3 of a step. The digits that a lane stores belong to
  /// two pairs that are 8 columns apart, so neighbours exchange one pair.
  static __device__ __forceinline__ void store(uint8_t* row, int column, uint2 words) {
    const bool upper = threadIdx.x & 2;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? words.x : words.y, 2);
    store_pairs(row + column / kWideStep * kBytes, upper ? other : words.x, upper ? words.y : other);
  }

  /// Keeps four columns as bf16 until the same lanes store them as digits.
  static __device__ __forceinline__ void keep(uint8_t* row, int column, uint2 words) {
    *reinterpret_cast<uint2*>(row + column / kWideStep * kBytes + column % kWideStep * 2) = words;
  }
  static __device__ __forceinline__ uint2 kept(const uint8_t* row, int column) {
    return *reinterpret_cast<const uint2*>(row + column / kWideStep * kBytes + column % kWideStep * 2);
  }

  /// The piece of a row that is this lane's. Its two words are two pairs of columns that are 8 columns apart.
  static __device__ __forceinline__ int own_piece() {
    const int lane = threadIdx.x % 32;
    return lane / 16 * 16 + own_pair() * 4 + lane / 4 % 4;
  }
  static __device__ __forceinline__ void store_piece(uint8_t* row, int piece, uint2 words) {
    store_pairs(row + piece / 32 * kBytes, words.x, words.y);
  }

 private:
  /// The number t of this lane, which has columns 2t, 2t + 1, 2t + 8, 2t + 9 of k-step lane / 4 of each step.
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

/// Whether rows may be digits with weights of this format.
__host__ __device__ constexpr bool has_digits(QuantFormat format) { return is_integer(format); }

/// Whether rows are digits: with a scale for each 32 columns they cost more than they save.
template <class Kind>
constexpr bool kTakesDigits = has_digits(Kind::kFormat) && Kind::kShare == kWideStep;

template <bool kDigits>
using RowSteps = std::conditional_t<kDigits, DigitSteps, FloatSteps>;

/// Bytes from one row of `columns` columns to the next, padded against bank conflicts.
__host__ __device__ constexpr int row_pitch(int columns, bool digits) {
  constexpr int kPad = 16;
  return (digits ? ceil_div(columns, kWideStep) * DigitSteps::kBytes : 2 * columns) + kPad;
}

}  // namespace moe::quant
