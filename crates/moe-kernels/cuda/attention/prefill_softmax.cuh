// The softmax of prompt attention on warpgroup products (prefill_wgmma.cu): what a thread keeps of its rows.
//
// A row's weights are 2^(score - base), and the results are divided by their sum. So any base gives the same result, as
// long as nothing overflows. A row's base is the maximum of the first tile of which it sees a position, and it stays:
// sums and weights are floating-point numbers, which are as precise above 1 as below. So tiles need no maximum, and
// what was added before a tile is not scaled again. Only if a weight exceeds kLimit does the warp compute the tile's
// scores once more and raise the base of the rows concerned. FlashAttention-4
// (https://www.together.ai/blog/flashattention-4) scales as rarely, but computes every maximum.
//
// Bases and weights depend only on the row's own scores, so its bits do not depend on the other rows.
#pragma once

#include "attention/prefill_wgmma.cuh"

#include <cmath>

namespace moe::attention_prefill {

#if MOE_HAS_WGMMA

constexpr float kLimit = 4294967296.f;  // 2^32: values of 2^80 and 2^15 positions still fit f32
// Below every score, and not -infinity, so that a score of -infinity has weight zero.
constexpr float kUnset = -3e38f;

/// A thread's part of a warpgroup's 64 rows: rows g and g + 8 of its warp's 16. Of every 8 positions of a tile it has
/// two of each row, scores[4 j + 2 h + e] for position 8 j + 2 t + e.
template <class D>
struct Rows {
  static constexpr int kTile = D::kTile, kValue = D::kValue;
  float base[2] = {kUnset, kUnset};  // log2
  float sum[2] = {};
  float factor[2];  // the factor by which a row's new base scales its sums
  int position[2];
  float values[kValue / 2] = {};

  /// The positions of a tile from `begin` on that row h sees: the positions after `lower` up to `upper`,
  /// counted from the thread's first position.
  struct Seen {
    int lower, upper;
    __device__ __forceinline__ bool operator()(int column) const { return column > lower && column <= upper; }
  };
  __device__ __forceinline__ Seen seen(int h, int begin, int window) const {
    const int upper = position[h] - begin - threadIdx.x % 4 * 2;
    return {window > 0 ? upper - window : -kTile, upper};
  }

  /// Turns scores into weights, and stores their sums in `part`. `kMasked`: some row may not see some position, or have
  /// no base yet.
  template <bool kMasked>
  __device__ __forceinline__ void weigh(float (&s)[kTile / 2], float (&part)[2], int begin, float scale, int window) {
    if (kMasked) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Seen sees = seen(h, begin, window);
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < kTile / 4; ++i) {
          float& x = s[i / 2 * 4 + 2 * h + i % 2];
          if (!sees(i / 2 * 8 + i % 2)) x = -INFINITY;
          top = fmaxf(top, x);
        }
        top = quad_max(top);
        if (base[h] == kUnset && top > -INFINITY) base[h] = top * scale;
      }
    }
    float sums[4] = {};  // four chains of additions
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) {
      s[i] = exp2_approx(fmaf(s[i], scale, -base[i / 2 % 2]));
      sums[i % 4] += s[i];
    }
    part[0] = sums[0] + sums[1], part[1] = sums[2] + sums[3];
  }

  /// Computes the bases of this tile and new weights for the rows whose weights exceeded the limit. The scores come
  /// from products of this warp alone: the scores of the warpgroup were overwritten, and its other warps may be
  /// elsewhere.
  template <class Query>
  __device__ __forceinline__ void raise(float (&s)[kTile / 2], float (&part)[2], const Query& q, const uint8_t* k,
                                        int begin, float scale, int window) {
    const int lane = threadIdx.x % 32;
    bool own[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t lanes = __ballot_sync(0xffffffffu, part[h] > kLimit);
      own[h] = (lanes >> (lane & ~3) & 15) != 0;
    }
    const Seen sees[2] = {seen(0, begin, window), seen(1, begin, window)};
    volatile float scores[kTile / 2];                             // in local memory: registers are full
    constexpr int kSteps = D::kSharedQueries ? 1 : D::kKey / 16;  // at once
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll 1
    for (int j = 0; j < kTile / 8; ++j) {
      float c[4] = {};
#pragma unroll kSteps
      for (int step = 0; step < D::kKey / 16; ++step) {
        const int row = j * 8 + lane % 8, chunk = step % 4 * 2 + lane / 8 % 2;
        uint32_t a[4], b[2];
        q.operand(step, a);
        ldmatrix_x2(b, k + step / 4 * D::kHalfBytes + row * 128 + ((chunk ^ row % 8) << 4));
        mma_bf16(c, a, b[0], b[1]);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float x = sees[e / 2](j * 8 + e % 2) ? c[e] : -INFINITY;
        top[e / 2] = fmaxf(top[e / 2], x);
        scores[4 * j + e] = x;
      }
    }
    fence_async_shared();  // the copy that overwrites these keys must come after the reads
    __syncwarp();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = quad_max(top[h]) * scale;
      factor[h] = own[h] ? exp2_approx(base[h] - top[h]) : 1.f;
      if (!own[h]) continue;
      base[h] = top[h];
      sum[h] *= factor[h];
      part[h] = 0.f;
#pragma unroll
      for (int i = 0; i < kTile / 4; ++i) {
        const int at = i / 2 * 4 + 2 * h + i % 2;
        s[at] = exp2_approx(fmaf(scores[at], scale, -base[h]));
        part[h] += s[at];
      }
    }
  }

  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int i = 0; i < kValue / 2; ++i) values[i] *= factor[i / 2 % 2];
  }

  /// Turns values into results. `sinks`: the rows' sinks, log2; -infinity for none.
  __device__ __forceinline__ void divide(const float (&sinks)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float all = sum[h];
      all += __shfl_xor_sync(0xffffffffu, all, 1);
      all += __shfl_xor_sync(0xffffffffu, all, 2);
      factor[h] = 1.f / (all + exp2_approx(sinks[h] - base[h]));
    }
    rescale();
  }

 private:
  /// The maximum over the four lanes that share a row.
  static __device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
  }
};

#endif  // MOE_HAS_WGMMA

}  // namespace moe::attention_prefill
