// Products of Q4_K and digits (digits.cuh): the sums of a group's codes are integers, and so are what multiplies them
// and what multiplies the sum of a row's integers. So all that 128 columns give is added as integers, exactly, and
// becomes f32 twice for each weight row: once for scales, once for minima. This takes 48 instructions for 64 weights of
// a lane and up to 4 rows, where sums that are scaled for each group in f32 would take 80.
//
// No integer overflows: a sum of one digit is at most 32 * 240 * 128, because upper rows are 16 times as large, and
// four of them times 127 are below 2^29; a sum of a row's integers is at most 2^20, and four of them times 127 below
// 2^29.
#pragma once

#include "quant/digits.cuh"

namespace moe::quant::digits {

/// A byte of a word as an integer.
template <int kByte>
__device__ __forceinline__ int byte_of(uint32_t word) {
  return static_cast<int>(__byte_perm(word, 0, 0x4440 + kByte));
}

/// The scales and minima of a lane's two rows for 128 columns. kAgain: they are read again for each group of rows,
/// because all that the compiler would keep of them would fill the registers.
template <bool kAgain>
struct UnitScales {
  const uint8_t* unit;  // the unit's integers of row g

  /// s and m of two groups, in a half of the columns.
  __device__ __forceinline__ uint32_t integers(int i, int half) const {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(unit + 32 * i + half * kUnitHalf);
    return kAgain ? *const_cast<const volatile uint32_t*>(from) : *from;
  }

  /// Adds one group's part to the sums of row g or g + 8.
  template <int kOdd>
  static __device__ __forceinline__ void add(uint32_t integers, int high, int low, int row_sum, int (&sum)[3]) {
    const int s = byte_of<2 * kOdd>(integers), m = byte_of<2 * kOdd + 1>(integers);
    sum[0] += s * high, sum[1] += s * low, sum[2] += m * row_sum;
  }

  /// Adds to `low` and `high`, the results of rows g and g + 8, the products of a lane's weights and digits. `x` points
  /// to the digits of both halves of the columns, and `row` has the unit and the sums of the token's row.
  __device__ __forceinline__ void multiply(const uint32_t (&words)[8], const uint8_t* const (&x)[2],
                                           const Side<kUnitGroups>& row, float& low, float& high) const {
    int sum[2][3] = {};  // of both rows: sums of the high digits, of the low ones, and of the minima
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 of = *reinterpret_cast<const uint4*>(x[half]);
      uint32_t weights[4];
      int even[4] = {}, odd[4] = {};
      bytes<QuantFormat::kQ4k>(words + 4 * half, weights);
      mma(even, weights, of.x, of.y);
      bytes<QuantFormat::kQ4k>(words + 4 * half + 2, weights);
      mma(odd, weights, of.z, of.w);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t v = integers(i, half);
        add<0>(v, even[2 * i], even[2 * i + 1], row.sums[2 * half], sum[i]);
        add<1>(v, odd[2 * i], odd[2 * i + 1], row.sums[2 * half + 1], sum[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& to = i == 0 ? low : high;
      const float2 by = __half22float2(*reinterpret_cast<const __half2*>(unit + 32 * i + kUnitShared));
      const float scale = i == 0 ? by.x : by.x * (1.0f / kUpper<QuantFormat::kQ4k>);
      to = fmaf(fmaf(256.f, static_cast<float>(sum[i][0]), static_cast<float>(sum[i][1])), scale * row.unit, to);
      to = fmaf(static_cast<float>(sum[i][2]), -by.y * row.unit, to);
    }
  }
};

}  // namespace moe::quant::digits
