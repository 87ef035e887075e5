// Rows in FP8 (E4M3) with one scale for each row and 128 columns, as fp8_quantise.cu defines them, and how launches
// that make rows write them in this form. The numbers are rounded to bf16 first, so that the bits are the same as when
// rows in bf16 are quantised afterwards. The 128 columns of a row are in sixteen lanes, 8 consecutive ones each
// (`store_group`), in four lanes in the order in which tensor cores leave them (`store_fragments`), or in four lanes of
// each of two blocks (fp8_experts.cu).
#pragma once

#include "ptx/common.cuh"
#include "ptx/ptx.cuh"

namespace moe::fp8 {

constexpr int kGroup = 128;          // columns that share a scale
constexpr int kGroupLanes = 16;      // lanes that have these columns, 8 each
constexpr float kMost = 448.f;       // the largest E4M3
constexpr float kLeast = 0x1p-126f;  // the smallest scale: all numbers of a row with a smaller one become zero

/// Where rows [rows, columns] are written.
struct RowsOut {
  uint8_t* q;
  float* scales;  // [columns / 128, lines]; null: rows stay bf16
  int lines;      // a multiple of 4, and at least the number of rows
  bool quads;     // whether columns are ordered by quads (fp8_quantise.cu)

  __device__ __forceinline__ float* scale(int row, int group) const {
    return scales + static_cast<size_t>(group) * lines + row;
  }

  /// Whether there is room for this many rows.
  bool holds(int rows, int columns) const {
    return scales != nullptr && lines >= rows && lines % 4 == 0 && columns % kGroup == 0;
  }
};

/// Four numbers as bytes, the first one lowest.
__device__ __forceinline__ uint32_t pack_e4m3([[maybe_unused]] float a, [[maybe_unused]] float b,
                                              [[maybe_unused]] float c, [[maybe_unused]] float d) {
#if MOE_HAS_FP8
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return low | static_cast<uint32_t>(high) << 16;
#else
  return 0;
#endif
}

/// The scale of columns whose largest magnitude is `most`, and the factor that they are multiplied by.
struct Scale {
  float scale, inverse;
};

__device__ __forceinline__ Scale scale_of(float most) {
  // The quotient with one correction is most / 448 rounded once, if it is a normal number.
  constexpr float kPart = 1.f / kMost;
  const float near = most * kPart, scale = fmaf(fmaf(-kMost, near, most), kPart, near);
  if (scale >= 2 * kLeast) return {scale, __frcp_rn(scale)};
  const float exact = __fdiv_rn(most, kMost);
  return {exact, exact >= kLeast ? __fdiv_rn(1.f, exact) : 0.f};
}

/// The larger magnitude of each half of two words of bf16.
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
  uint32_t most;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
  return most;
}

/// The larger half of a word.
__device__ __forceinline__ float larger_half(uint32_t word) {
  const float2 pair = unpack_bf16(word);
  return fmaxf(pair.x, pair.y);
}

/// Four columns of a row in FP8.
__device__ __forceinline__ uint32_t scaled(uint32_t low, uint32_t high, float inverse) {
  const float2 a = unpack_bf16(low), b = unpack_bf16(high);
  return pack_e4m3(a.x * inverse, a.y * inverse, b.x * inverse, b.y * inverse);
}

/// Stores a row's 128 columns at `q` in FP8, and their scale. Each lane has 8 columns in bf16. All lanes of a warp call
/// it; `present` is false in lanes without a row.
__device__ __forceinline__ void store_group(uint8_t* q, float* scale_at, const uint4& columns, bool present,
                                            bool quads) {
  const uint32_t word[4] = {columns.x, columns.y, columns.z, columns.w};
  uint32_t most = larger(larger(word[0], word[1]), larger(word[2], word[3]));
#pragma unroll
  for (int step = 1; step < kGroupLanes; step *= 2) most = larger(most, __shfl_xor_sync(0xffffffffu, most, step));
  const Scale scale = scale_of(larger_half(most));
  // Columns 0 to 3 and 4 to 7: four pairs.
  const uint32_t own[2] = {scaled(word[0], word[1], scale.inverse), scaled(word[2], word[3], scale.inverse)};
  // Lane 8 h + 2 j + u has the 8 columns from 8 u on of the j-th 16 of the 64 columns h. In either order a word holds
  // pair c of u = 0 and the same pair of u = 1. So neighbours exchange two pairs, and u = 0 has the words of pairs 0
  // and 1.
  const int lane = threadIdx.x % kGroupLanes;
  const bool odd = lane & 1;
  const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? own[0] : own[1], 1);
  const uint32_t low = odd ? got : own[0], high = odd ? own[1] : got;
  uint32_t words[2] = {__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632)};
  int at = lane * 8;
  if (!quads) {
    // Chunk c holds the words of pair c of all four j: the words of two neighbouring j are next to each other.
    const bool upper = lane & 2;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? words[0] : words[1], 2);
    (upper ? words[0] : words[1]) = other;
    const int h = lane / 8, j = lane / 2 % 4, pair = 2 * (lane & 1) + (j & 1);
    at = 16 * (2 * pair + h) + 4 * (j & 2);
  }
  if (!present) return;
  *reinterpret_cast<uint2*>(q + at) = {words[0], words[1]};
  if (lane == 0) *scale_at = scale.scale;
}

/// The same as store_group for results of tensor cores: four lanes have a row's 128 columns, each a pair of every 8. In
/// either order, two words of neighbouring 8 columns make a word.
__device__ __forceinline__ void store_fragments(uint8_t* q, float* scale_at, const uint32_t (&word)[16], bool present,
                                                bool quads) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) most = larger(most, word[i]);
  most = larger(most, __shfl_xor_sync(0xffffffffu, most, 1));
  most = larger(most, __shfl_xor_sync(0xffffffffu, most, 2));
  if (!present) return;
  const Scale scale = scale_of(larger_half(most));
  const int t = threadIdx.x % 4;
  uint32_t own[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) own[i] = scaled(word[2 * i], word[2 * i + 1], scale.inverse);
  if (quads) {
#pragma unroll
    for (int i = 0; i < 8; ++i) reinterpret_cast<uint32_t*>(q)[4 * i + t] = own[i];
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      reinterpret_cast<uint4*>(q)[2 * t + i] = {own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3]};
  }
  if (t == 0) *scale_at = scale.scale;
}

}  // namespace moe::fp8
