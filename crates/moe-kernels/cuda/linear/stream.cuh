// Loads rows of x for the streaming products with few rows, for any kind of weights, with the norm in the prologue.
#pragma once

#include "linear/linear.cuh"

namespace moe {

constexpr int kWarps = 8;  // the first warps of a block, which multiply
constexpr int kConsumers = kWarps * 32;
constexpr int kTokens = 8;

struct StreamInput {
  const void* x;     // [m, k] bf16; f32 where `norm` is given
  const bf16* norm;  // [k] weight of the RMS norm of x, or null
  float eps;
  int m, k;
};

/// Writes rows of x (f32), times the norm's weight, to shared memory as bf16, `pitch` bytes apart. Each warp writes its
/// part of every row's sum of squares to `squares[row][warp]`. Four rows are processed at a time, with all their loads
/// before the first use. `norm_weight` contains the weight of this thread's first columns.
__device__ __forceinline__ void stage_normed(const StreamInput& a, Vec16 norm_weight, uint8_t* to, int pitch,
                                             float* squares) {
  float sum[kTokens] = {};
  for (int at = threadIdx.x * 8; at < a.k; at += kConsumers * 8) {
    if (at >= kConsumers * 8) norm_weight = load_const(a.norm + at);
    float g[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_bf16(norm_weight.word[i]);
      g[2 * i] = pair.x, g[2 * i + 1] = pair.y;
    }
#pragma unroll
    for (int first = 0; first < kTokens; first += 4) {
      if (first >= a.m) break;
      float4 x[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i][0] = x[i][1] = {};
        if (first + i >= a.m) continue;
        const size_t row = first + i;
        const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(a.x) + row * a.k + at);
        x[i][0] = __ldcg(from);
        x[i][1] = __ldcg(from + 1);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i >= a.m) break;
        const float4 p = x[i][0], q = x[i][1];
        sum[first + i] += p.x * p.x + p.y * p.y + p.z * p.z + p.w * p.w;
        sum[first + i] += q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w;
        const uint4 packed = {pack_bf16(p.x * g[0], p.y * g[1]), pack_bf16(p.z * g[2], p.w * g[3]),
                              pack_bf16(q.x * g[4], q.y * g[5]), pack_bf16(q.z * g[6], q.w * g[7])};
        *reinterpret_cast<uint4*>(to + static_cast<size_t>(first + i) * pitch + at * 2) = packed;
      }
    }
  }
#pragma unroll
  for (int row = 0; row < kTokens; ++row) {
    if (row >= a.m) break;
    const float part = warp_sum(sum[row]);
    if (threadIdx.x % 32 == 0) squares[row * kWarps + threadIdx.x / 32] = part;
  }
}

/// The factor for the sums of a row that `stage_normed` wrote.
__device__ __forceinline__ float norm_factor(const StreamInput& a, const float* squares, int row) {
  float sum = 0.f;
  for (int i = 0; i < kWarps; ++i) sum += squares[row * kWarps + i];
  return 1.f / sqrtf(sum / a.k + a.eps);
}

}  // namespace moe
