// What kernels that end in an RMS norm of whole rows share. One row per block; each thread keeps 8 consecutive
// elements of every 2,048 and touches only those, so that no barrier is needed around the row.
#pragma once

#include "ptx/common.cuh"
#include "ptx/ptx.cuh"

namespace moe {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // elements per thread and turn

__device__ __forceinline__ void widen(const Vec16& v, float (&x)[kVector]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_bf16(v.word[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

/// Sum over the block, in a fixed order; every thread gets it.
__device__ __forceinline__ float block_sum(float v, float* parts) {
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) sum += parts[i];
  return sum;
}

/// Shared memory of such a kernel: partial sums, the row, the norm's weight.
inline size_t norm_smem(int hidden) {
  return kThreads / 32 * sizeof(float) + static_cast<size_t>(hidden) * (sizeof(float) + sizeof(bf16));
}

/// The norm's weight to shared memory; before pdl_wait().
__device__ __forceinline__ void fetch_norm_weight(uint4* norm_weight, const bf16* weight, int hidden) {
  for (int at = threadIdx.x; at < hidden / kVector; at += kThreads)
    norm_weight[at] = __ldg(reinterpret_cast<const uint4*>(weight) + at);
}

/// out = row / rms(row) * norm_weight; `squares` is this thread's sum of squares.
__device__ __forceinline__ void write_norm(const float* row, const uint4* norm_weight, float squares, float* parts,
                                           float eps, bf16* out, int hidden) {
  const float scale = 1.f / sqrtf(block_sum(squares, parts) / hidden + eps);
  for (int at = threadIdx.x * kVector; at < hidden; at += kThreads * kVector) {
    const uint4 g = norm_weight[at / kVector];
    float w[kVector];
    widen({{g.x, g.y, g.z, g.w}}, w);
    uint4 packed;
    packed.x = pack_bf16(row[at] * scale * w[0], row[at + 1] * scale * w[1]);
    packed.y = pack_bf16(row[at + 2] * scale * w[2], row[at + 3] * scale * w[3]);
    packed.z = pack_bf16(row[at + 4] * scale * w[4], row[at + 5] * scale * w[5]);
    packed.w = pack_bf16(row[at + 6] * scale * w[6], row[at + 7] * scale * w[7]);
    *reinterpret_cast<uint4*>(out + at) = packed;
  }
}

}  // namespace moe
