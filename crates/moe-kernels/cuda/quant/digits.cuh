// Rows of bf16 as fixed-point numbers of two digits of 8 bits each. Integer products multiply them by weights of 4 or 8
// bits, which need no unpacking to bf16 then.
//
// Unpacking integers to bf16 bounds products of few rows: 135 instructions for 64 weights of a lane, most of them on
// the integer pipe, which runs at half of the issue rate. As bytes, weights of 4 bits cost one mask for four. So 128
// columns of a row become integers, x = 2^(e - 14) (256 high + low) where 2^e .. 2^(e + 1) has the largest
// magnitude, and both digits of a row are columns of the same integer product: 4 rows are the 8 columns of an mma.
// Sums are exact until they are scaled.
//
// A value that is at least 2^-7 of the largest of its 128 columns is exact. A smaller one has an error of at most 2^-15
// of the largest. Rounding to bf16 gave the largest value itself an error of up to 2^-9. The CPU does the same.
//
// The digits are stored in the order in which lanes read them. For each half of the columns, a k-step holds 4 rows x 2
// digits x 4 pairs (of columns 2t, 2t + 8, 2t + 1, 2t + 9, as in a pack's words), and the 4 k-steps follow each other
// in 16 bytes. The 16-byte chunks are permuted so that there are no bank conflicts, neither when lanes write (a lane
// has one k-step of a row) nor when they read.
#pragma once

#include "ptx/common.cuh"
#include "ptx/ptx.cuh"
#include "quant/unpack.cuh"

namespace moe::quant::digits {

constexpr int kColumns = 128;      // columns of a stage
constexpr int kGroup = 4;          // rows of a product
constexpr int kGroupBytes = 1024;  // bytes of a group's digits

/// What a stage holds for each row in addition to its digits: its unit, and the sums of its integers over the columns
/// of each scale.
template <int kShares>
struct Side {
  float unit;
  int sums[kShares];
};

/// Bytes from the start of a group's digits to the ones that this lane multiplies, in a half of the columns: lane 4n +
/// t has column n of the product, which is digit n % 2 of row n / 2.
__device__ __forceinline__ uint32_t lane_offset(uint32_t half) {
  const uint32_t lane = threadIdx.x % 32, row = lane / 8;
  return half * 512 + row * 128 + ((lane % 8 ^ row ^ half << 2) << 4);
}

/// bf16 bits in the upper half of a word as an integer, in the lower 16 bits of the result, plus 128.
__device__ __forceinline__ uint32_t integer(uint32_t upper, float factor) {
  return __float_as_uint(fmaf(__uint_as_float(upper), factor, 12582912.f + 128.f));
}

/// What turns a row's values into integers, from the largest magnitudes (bf16 bits) of both halves of a word.
struct Scale {
  uint32_t largest, exponent;
  float factor;

  __device__ __forceinline__ explicit Scale(uint32_t top) {
    largest = max(top & 0xffffu, top >> 16);
    // A largest value with all bits set would become 32,640, which is above what two digits hold. So its unit is twice
    // as large.
    exponent = max((largest + 1) >> 7, 15u);
    factor = __uint_as_float((268u - exponent) << 23);
  }
  /// The value of the integer 1. It is NaN where the largest value is infinite or NaN, and then every sum of the row is
  /// NaN.
  __device__ __forceinline__ float unit() const {
    return __uint_as_float(largest >= 0x7f80u ? 0x7fffffffu : (exponent - 14) << 23);
  }
};

/// Digits of columns 2t, 2t + 8, 2t + 1, 2t + 9 of a k-step, which come as two words.
struct Word {
  uint32_t high, low;

  __device__ __forceinline__ Word(uint32_t first, uint32_t second, float factor) {
    const uint32_t a = __byte_perm(integer(first << 16, factor), integer(second << 16, factor), 0x5410);
    const uint32_t b = __byte_perm(integer(first & 0xffff0000u, factor), integer(second & 0xffff0000u, factor), 0x5410);
    high = __byte_perm(a, b, 0x7531), low = __byte_perm(a, b, 0x6420) ^ 0x80808080u;
  }
};
__device__ __forceinline__ int sum_of_bytes(uint32_t v, int sum) {
  return __dp4a(static_cast<int>(v), 0x01010101, sum);
}

/// Digits of four rows of 128 columns, a k-step of a row in each lane: lane 8r + s has columns 16s to 16s + 15 of row
/// r.
template <int kShares>
__device__ __forceinline__ void store(const uint4& first, const uint4& second, uint8_t* to, Side<kShares>* sides) {
  const uint32_t lane = threadIdx.x % 32, step = lane % 8, row = lane / 8;
  const uint32_t x[2][4] = {{first.x, first.y, first.z, first.w}, {second.x, second.y, second.z, second.w}};
  uint32_t top = 0;  // the largest magnitudes in both halves of the words
#pragma unroll
  for (int i = 0; i < 8; ++i) top = __vmaxu2(top, x[i / 4][i % 4] & 0x7fff7fffu);
#pragma unroll
  for (int apart = 4; apart > 0; apart /= 2) top = __vmaxu2(top, __shfl_xor_sync(0xffffffffu, top, apart));
  const Scale scale(top);
  int high_sum = 0, low_sum = 0;
  // The address of the first chunk of 16 bytes; the addresses of the others differ only in bits 4 to 6.
  const uint32_t at = smem_addr(to) + step / 4 * 512 + row * 128 + ((row | step & 4) << 4) + step % 4 * 4;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const Word w(x[0][t], x[1][t], scale.factor);
    high_sum = sum_of_bytes(w.high, high_sum), low_sum = sum_of_bytes(w.low, low_sum);
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at ^ t << 4), "r"(w.high) : "memory");
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at ^ (t | 4) << 4), "r"(w.low) : "memory");
  }
  int sum = high_sum * 256 + low_sum;
  constexpr int kLanes = 8 / kShares;  // lanes that share the columns of one scale
#pragma unroll
  for (int apart = kLanes / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
  Side<kShares>& side = sides[row];
  if (step % kLanes == 0) side.sums[step / kLanes] = sum;
  if (step == 0) side.unit = scale.unit();
}

/// c[16 x 8] += a[16 x 32] b[32 x 8], of unsigned and signed bytes. Lane 4g + t holds c[g][2t], c[g][2t + 1], c[g +
/// 8][2t], c[g + 8][2t + 1].
__device__ __forceinline__ void mma(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// For 4-bit weights, the numbers of rows g + 8 are 16 times as large as the weights: they are the upper four bits of
/// each byte, which are masked but not shifted.
template <QuantFormat kFormat>
constexpr int kUpper = code_bits(kFormat) == 4 ? 16 : 1;

/// Weights of two k-steps as bytes: the row operand of `mma`.
template <QuantFormat kFormat>
__device__ __forceinline__ void bytes(const uint32_t* words, uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (code_bits(kFormat) == 4) {
      a[2 * i] = words[i] & 0x0f0f0f0fu, a[2 * i + 1] = words[i] & 0xf0f0f0f0u;
    } else {
      a[2 * i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x6240);
      a[2 * i + 1] = __byte_perm(words[2 * i], words[2 * i + 1], 0x7351);
    }
  }
}

/// The scales and zero points of a lane's two rows, in the form in which its sums need them.
template <QuantFormat kFormat>
struct Factors {
  float scale[2];
  int zero[2];

  /// Loads the scales of 16 bits and, if there are any, the zero points. The pointers are to the first row's; the
  /// second row's are 8 elements further.
  __device__ __forceinline__ void load(const uint16_t* scales, bool f16, const uint8_t* zeros, bool has_zeros) {
    scale[0] = exact_scale(scales[0], f16), scale[1] = exact_scale(scales[8], f16) * (1.0f / kUpper<kFormat>);
    constexpr int kMiddle = kFormat == QuantFormat::kInt4 ? 8 : 128;
    zero[0] = kMiddle, zero[1] = kMiddle * kUpper<kFormat>;
    if (has_zeros) zero[0] = zeros[0], zero[1] = zeros[8] * kUpper<kFormat>;
  }

  /// Adds to `total` what a lane's sums of both digits of row i stand for. `row_sum` and `unit` are the sum of the
  /// integers of the token's row and its unit.
  __device__ __forceinline__ void add(int i, int high, int low, int row_sum, float unit, float& total) const {
    total = fmaf(static_cast<float>(high * 256 + low - zero[i] * row_sum), scale[i] * unit, total);
  }
};

}  // namespace moe::quant::digits
