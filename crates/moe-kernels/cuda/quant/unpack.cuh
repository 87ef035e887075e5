// Quantised weights to A fragments of bf16 in registers, a k-step of 16 columns at a time. quant/args.cuh says how a
// lane's words hold them.
//
// Integers: the bits of q combined by `or` with the bits of 128.0 are the bf16 number 128 + q (7 bits of mantissa), so
// q - zero costs a mask and a subtraction for two weights, without rounding. int8 has one bit more than the mantissa,
// which is added separately. e4m3: its exponent and mantissa, moved to their places in bf16, are the number times
// 2^-120. 0x7f and 0xff, which are NaN, become 480. FP4: the same with 2^-126, and the scale in the factor (fp4.cuh).
// Q4_K: q4k.cuh.
#pragma once

#include <cuda_fp16.h>

#include "codes.cuh"
#include "ptx/common.cuh"
#include "quant/fp4.cuh"
#include "quant/q4k.cuh"

namespace moe::quant {

/// Columns of a tile of 512 bytes.
constexpr int tile_columns(QuantFormat format) { return code_bits(format) == 4 ? 64 : 32; }
/// Words of a lane in a k-step.
constexpr int step_words(QuantFormat format) { return code_bits(format) == 4 ? 1 : 2; }
/// K-steps of 16 columns with one operand of `unpack`, where this is the scale.
__host__ __device__ constexpr int operand_steps(QuantFormat format) { return fp4_group(format) / 16; }

// ---- two bf16 in a word

__device__ __forceinline__ __nv_bfloat162 as_pair(uint32_t v) { return *reinterpret_cast<const __nv_bfloat162*>(&v); }
__device__ __forceinline__ uint32_t as_word(__nv_bfloat162 v) { return *reinterpret_cast<const uint32_t*>(&v); }
__device__ __forceinline__ uint32_t add2(uint32_t a, uint32_t b) { return as_word(__hadd2_rn(as_pair(a), as_pair(b))); }
__device__ __forceinline__ uint32_t sub2(uint32_t a, uint32_t b) { return as_word(__hsub2_rn(as_pair(a), as_pair(b))); }
__device__ __forceinline__ uint32_t mul2(uint32_t a, uint32_t b) { return as_word(__hmul2_rn(as_pair(a), as_pair(b))); }
__device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  return as_word(__hfma2(as_pair(a), as_pair(b), as_pair(c)));
}
/// One half in both halves. Instructions read halves of a word as such operands, so this costs nothing before `fma2`.
__device__ __forceinline__ uint32_t lower_twice(uint32_t v) { return as_word(__low2bfloat162(as_pair(v))); }
__device__ __forceinline__ uint32_t upper_twice(uint32_t v) { return as_word(__high2bfloat162(as_pair(v))); }
/// The lower half in both halves.
__device__ __forceinline__ uint32_t both(uint32_t low) { return __byte_perm(low, 0, 0x1010); }

/// (v & mask) | bits in one instruction; with two constants the compiler would use two.
__device__ __forceinline__ uint32_t and_or(uint32_t v, uint32_t mask, uint32_t bits) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(v), "r"(mask), "r"(bits));
  return r;
}

constexpr uint32_t kPair128 = 0x43004300u, kPair256 = 0x43804380u, kPair2To120 = 0x7b807b80u;

// ---- a row's zero point and scale as operands, which are in both halves of a word

/// The zero point in the form that `unpack` subtracts: 128 + zero for int4, zero for int8.
template <QuantFormat kFormat>
__device__ __forceinline__ uint32_t zero_operand(uint32_t zero) {
  if constexpr (kFormat == QuantFormat::kInt4) return zero * 0x00010001u + kPair128;
  return pack_bf16(static_cast<float>(zero), static_cast<float>(zero));
}

/// A scale of 16 bits, rounded to bf16 if it is f16.
__device__ __forceinline__ uint32_t scale_operand(uint16_t scale, bool is_f16) {
  if (!is_f16) return both(scale);
  const float v = __half2float(__ushort_as_half(scale));
  return pack_bf16(v, v);
}

/// A scale of 16 bits in f32, exactly.
__device__ __forceinline__ float exact_scale(uint16_t scale, bool is_f16) {
  return is_f16 ? __half2float(__ushort_as_half(scale)) : __uint_as_float(static_cast<uint32_t>(scale) << 16);
}

/// An f32 scale as the sum of two bf16.
__device__ __forceinline__ uint2 scale_operands(float scale) {
  const uint32_t high = pack_bf16(scale, scale);
  const float rest = scale - __uint_as_float(high << 16);
  return {high, pack_bf16(rest, rest)};
}

/// The operands of FP4 for rows g and g + 8; `scales` points to the scale of row g in a group.
template <QuantFormat kFormat>
__device__ __forceinline__ void load_fp4_operands(const uint8_t* scales, uint32_t (&operand)[2]) {
  operand[0] = fp4_operand<kFormat>(scales[0]), operand[1] = fp4_operand<kFormat>(scales[8]);
}
/// What multiplies the sums of row g, or of row g + 8; `factors` points to the factor of row g.
template <QuantFormat kFormat>
__device__ __forceinline__ float load_fp4_factor(const uint8_t* factors, int half) {
  return reinterpret_cast<const float*>(factors)[8 * half] * fp4_unit<kFormat>();
}

// ---- weights

/// a = q - zero[0] of row g (a0, a2) and q - zero[1] of row g + 8 (a1, a3), or e4m3(q), exact, of the k-step whose
/// words are v[0 .. step_words). FP4: e2m1(q) times the scale, for which `zero` has the operand. Q4_K: the weight.
template <QuantFormat kFormat>
__device__ __forceinline__ void unpack(const uint32_t* v, const uint32_t (&zero)[2], uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i % 2;
    if constexpr (kFormat == QuantFormat::kInt4) {
      a[i] = sub2(and_or(v[0] >> (4 * i), 0x000f000fu, kPair128), zero[row]);
    } else if constexpr (kFormat == QuantFormat::kInt8) {
      const uint32_t q = v[i / 2] >> (8 * row);
      const uint32_t low = and_or(q, 0x007f007fu, kPair128), top = and_or(q, 0x00800080u, kPair128);
      a[i] = add2(sub2(low, zero[row]), sub2(top, kPair256));
    } else if constexpr (is_fp4(kFormat)) {
      a[i] = mul2(fp4_bits(v[0], i), zero[row]);
    } else if constexpr (is_q4k(kFormat)) {
      const uint32_t q = (i < 2 ? v[0] : v[0] >> 8) & (row == 0 ? 0x000f000fu : 0x00f000f0u);
      const uint32_t centred = fma2(q, row == 0 ? kQ4kFactor : kQ4kUpperFactor, kQ4kMiddle);
      a[i] = fma2(centred, lower_twice(zero[row]), upper_twice(zero[row]));
    } else {
      // Both shifts start from the word: shifting an already shifted value would need one more mask.
      const uint32_t q = v[i / 2], rest = row == 0 ? q << 4 : q >> 4, sign = row == 0 ? q << 8 : q;
      a[i] = mul2(and_or(rest, 0x07f007f0u, sign & 0x80008000u), kPair2To120);
    }
  }
}

}  // namespace moe::quant
