// Integers of 4 bits with minima, whose scales have two levels (ggml's Q4_K): w = d s q - e m. A group of 32 columns of
// a row has the integers s and m, 0 to 127, and the floats d and e are f16. This file says how a pack holds them and
// how kernels make weights of them. The codes are in the order of int4 (quant/args.cuh); the host packs
// (src/quant/q4k.rs).
//
// The scales of 128 columns of a tile's 16 rows are a unit of 192 bytes: 4.75 bits a weight. It has
//   64 bytes   for each row, s and m of the group of columns 0 to 31 and of the next group
//   64 bytes   the same of columns 64 to 127
//   64 bytes   for each row, d and e
// A row of tiles has a unit for each 128 columns, the last of which may be filled up with zeros.
//
// Scales go into the fragments, as in FP4 (quant/fp4.cuh): then sums go over all columns, and nothing multiplies them.
// The four bits of a code are a number of bf16, q 2^-133 or, four bits higher, 16 q 2^-133, because numbers with an
// exponent of 0 and of 1 have the same distance. So a multiplication and an addition of two weights make (q - 8) / 64
// of it without a shift, exactly, and another one the weight (q - 8) scale + offset, where offset = 8 scale - minimum.
// The weight is rounded once, and so are scale and offset. The offset is small where weights are around zero; with the
// minimum itself instead, its rounding would be the largest error.
//
// The four lanes of a row compute the operands of one group each and give them to each other by shuffles: computing all
// of them in each lane would take 30 instructions more for 64 weights of a lane.
#pragma once

#include <cuda_fp16.h>

#include "codes.cuh"
#include "ptx/common.cuh"

namespace moe {

constexpr int kQ4kGroup = 32;                 // columns with the same integers s and m
constexpr int kUnitColumns = 128;             // columns of a unit
constexpr int kUnitHalf = 64;                 // bytes of the integers of 64 columns
constexpr int kUnitShared = 2 * kUnitHalf;    // bytes from the start of a unit to d and e
constexpr int kUnitBytes = kUnitShared + 64;  // bytes of a unit
constexpr int kUnitGroups = kUnitColumns / kQ4kGroup;

/// Units of a row of tiles.
__host__ __device__ constexpr int units_of(int columns) { return ceil_div(columns, kUnitColumns); }

/// A byte of a word as a float.
template <int kByte>
__device__ __forceinline__ float byte_to_float(uint32_t word) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7540 + kByte)) - 8388608.f;
}

/// Scale and minimum of a group, exactly.
struct ScaleMinimum {
  float scale, minimum;

  /// `integers` has s in its first byte and m in its second one.
  __device__ __forceinline__ ScaleMinimum(uint32_t integers, __half2 shared) {
    const float2 factor = __half22float2(shared);
    scale = byte_to_float<0>(integers) * factor.x, minimum = byte_to_float<1>(integers) * factor.y;
  }
};

/// Scale and minimum of row `row` of a tile, in group `group` of a unit.
__device__ __forceinline__ ScaleMinimum q4k_scale(const uint8_t* unit, int group, int row) {
  const uint8_t* integers = unit + group / 2 * kUnitHalf + row * 4 + group % 2 * 2;
  return {*reinterpret_cast<const uint16_t*>(integers),
          *reinterpret_cast<const __half2*>(unit + kUnitShared + row * 4)};
}

namespace quant {

/// What makes 2^127 q 2^-133 - 8 / 64 of the bits of codes, and the same of codes that are four bits higher.
constexpr uint32_t kQ4kFactor = 0x7f007f00u, kQ4kUpperFactor = 0x7d007d00u, kQ4kMiddle = 0xbe00be00u;
/// The operand that makes the codes themselves: 64 (q - 8) / 64 + 8.
constexpr uint32_t kQ4kCodes = 0x41004280u;

/// The operand of `unpack`: 64 times the scale in the lower half, and the offset in the upper half.
__device__ __forceinline__ uint32_t q4k_operand(const ScaleMinimum& of) {
  return pack_bf16(64.f * of.scale, fmaf(8.f, of.scale, -of.minimum));
}

/// The operands of a lane's rows g and g + 8 in one group, of which each of a row's four lanes has another one: the
/// groups of 128 columns, or twice the groups of 64. `integers` points to the integers of these columns of a block of
/// 16 rows, `shared` to its d and e.
template <int kColumns>
__device__ __forceinline__ void load_q4k_operands(const uint8_t* integers, const uint8_t* shared, uint32_t (&own)[2]) {
  const int lane = threadIdx.x % 32, g = lane / 4, group = lane % (kColumns / kQ4kGroup);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = (g + 8 * i) * 4;
    const uint32_t of = *reinterpret_cast<const uint16_t*>(integers + group / 2 * kUnitHalf + row + group % 2 * 2);
    own[i] = q4k_operand({of, *reinterpret_cast<const __half2*>(shared + row)});
  }
}

/// The operands of a group, out of what the lanes of a row have. All lanes of a warp call it.
__device__ __forceinline__ void share_q4k_operands(const uint32_t (&own)[2], int group, uint32_t (&operand)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) operand[i] = __shfl_sync(0xffffffffu, own[i], group, 4);
}

}  // namespace quant
}  // namespace moe
