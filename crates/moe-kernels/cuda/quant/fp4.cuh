// Floats of 4 bits, E2M1, in a pack: MXFP4 (kFp4) has a scale for 32 columns of a row, NVFP4 (kNvfp4) for 16. This file
// says how a word holds 8 codes and what the bytes of scales stand for. The host packs (src/quant/fp4.rs and
// fp4_scales.rs).
//
// Scales multiply the weights and not their sums. The three bits of a magnitude, moved to the lowest bits of a bf16
// exponent and the highest bit of its mantissa, are the number times 2^-126. It has to be multiplied by 2^126 anyway,
// so a factor 2^126 scale costs nothing more. The result is exact: a scale of MXFP4 is a power of two, and a scale of
// NVFP4 has 4 significant bits where a code has 2 and bf16 has 8. So sums go over all columns of a row, whatever the
// groups, and are multiplied once, by a factor of the row. Scales that multiply sums would take 4 instructions for each
// 8 token rows and 32 columns, and a second set of accumulators in the products of warpgroups.
//
// So that neither the operand nor the weights leave the range of bf16, scales are relative to the factor of their row:
//   MXFP4   factor = the largest scale of the row; byte b: scale = factor 2^(b - 254)
//   NVFP4   factor = the scale of the matrix; byte b: scale = factor 2^(b / 8 - 10) (1 + b % 8 / 8), which are the
//           positive numbers of E4M3 with one more bit of exponent instead of subnormal numbers
// The sign of a scale is in the codes. Where a scale is zero or NaN, the host makes all codes of the group zeros: zero
// times any scale is zero, and zero times infinity, which is what the byte of NaN becomes, is NaN. NVFP4 has no NaN.
//
// The order of bits in a word is such that unpacking takes as many instructions of the integer pipe as for int4, 7 for
// 8 weights: three of a lane's four pairs come into place by one shift or rotation and one mask, the fourth by two
// masks and a shift. The low half of a word has the even columns (w0 w2 w4 w6 of quant/args.cuh), the high half the odd
// ones. In each half, pairs 0 to 3 are, from the lowest bit of a magnitude:
//   0   bits 0 1 2, sign 9        1   bits 4 5 6, sign 13
//   2   bits 10 11 12, sign 3 of the other half
//   3   bits 14 7 8, sign 15
#pragma once

#include "codes.cuh"

namespace moe {

/// Columns with one scale.
__host__ __device__ constexpr int fp4_group(QuantFormat format) { return format == QuantFormat::kNvfp4 ? 16 : 32; }

constexpr int kFp4Bytes = 16;  // of the scales of a group in a row of tiles: one for each row
constexpr int kFp4Factors =
    64;  // bytes of the f32 factors of a tile's rows, which come before the scales of all groups
/// Bytes of the scales of a row of tiles.
__host__ __device__ constexpr int fp4_row_bytes(int groups) { return kFp4Factors + groups * kFp4Bytes; }

/// The byte of the scale NaN in MXFP4.
constexpr uint32_t kFp4Nan = 255;

/// The scale of a group in f32.
template <QuantFormat kFormat>
__device__ __forceinline__ float fp4_scale(uint32_t byte, float factor) {
  if constexpr (kFormat == QuantFormat::kNvfp4) return __uint_as_float((byte << 20) + (117u << 23)) * factor;
  if (byte == kFp4Nan) return __uint_as_float(0x7fffffffu);
  // Nearly every scale is this near to the largest one of its row.
  if (byte >= 128) return __uint_as_float((byte - 127) << 23) * factor;
  return ldexpf(factor, static_cast<int>(byte) - 254);
}

/// What the bits of weights are multiplied by, in both halves of a word: 2^126 / fp4_unit times scale / factor.
template <QuantFormat kFormat>
__device__ __forceinline__ uint32_t fp4_operand(uint32_t byte) {
  return kFormat == QuantFormat::kNvfp4 ? byte * 0x00100010u + 0x75807580u : byte * 0x00800080u;
}
/// What a sum of the products is multiplied by, together with the factor of its row.
template <QuantFormat kFormat>
__host__ __device__ constexpr float fp4_unit() {
  return kFormat == QuantFormat::kNvfp4 ? 256.f : 0.5f;
}

/// The code of a lane's weight wi in a word.
__device__ __forceinline__ uint32_t fp4_code(uint32_t word, int i) {
  const int half = 16 * (i % 2);
  switch (i / 2) {
    case 0: return (word >> half & 7) | (word >> (half + 9) & 1) << 3;
    case 1: return (word >> (half + 4) & 7) | (word >> (half + 13) & 1) << 3;
    case 2: return (word >> (half + 10) & 7) | (word >> ((half ^ 16) + 3) & 1) << 3;
    default: return (word >> (half + 14) & 1) | (word >> (half + 7) & 3) << 1 | (word >> (half + 15) & 1) << 3;
  }
}

/// The bits of a lane's i-th pair of weights as two bf16, which are 2^-126 times what the codes stand for.
__device__ __forceinline__ uint32_t fp4_bits(uint32_t word, int i) {
  switch (i) {
    case 0: return word << 6 & 0x81c081c0u;
    case 1: return word << 2 & 0x81c081c0u;
    case 2: return __funnelshift_r(word, word, 4) & 0x81c081c0u;
    default: return (word & 0x81808180u) | (word >> 8 & 0x00400040u);
  }
}

}  // namespace moe
