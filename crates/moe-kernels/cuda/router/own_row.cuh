// Addition and norm of one row by a block that goes on with other work, bit for bit as moe_add_rms_norm: the columns of
// a thread, the order of the sums and the roundings are those of rows/norm.cuh.
#pragma once

#include "rows/norm.cuh"

namespace moe {

/// residual += delta, x = norm(residual).
struct AddNorm {
  const float* delta;  // [T, H]
  float* residual;     // [T, H]
  const bf16* weight;  // [H]
  float eps;
  bf16* x;  // [T, H]
};

/// Loads 16 bytes that another block of this launch may have written.
__device__ __forceinline__ Vec16 load_fresh(const void* p) {
  const uint4 v = __ldcg(static_cast<const uint4*>(p));
  return {{v.x, v.y, v.z, v.w}};
}

/// A row in the registers of a block of kThreads.
class OwnRow {
  static constexpr int kTurns = 4;
  uint4 weight[kTurns];
  float v[kTurns][kVector];

  static __device__ __forceinline__ int column(int turn) { return turn * kTurnColumns + threadIdx.x * kVector; }

 public:
  static constexpr int kMaxHidden = kTurns * kTurnColumns;

  /// What can be loaded before the launch ahead has ended.
  __device__ __forceinline__ OwnRow(const AddNorm& a, int hidden) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i)
      if (column(i) < hidden) weight[i] = __ldg(reinterpret_cast<const uint4*>(a.weight + column(i)));
  }

  /// x = norm(residual + delta).
  __device__ __forceinline__ void make(const AddNorm& a, int row, int hidden) {
    __shared__ float parts[kNormWarps];
    const size_t base = static_cast<size_t>(row) * hidden;
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      if (column(i) >= hidden) continue;
      const float4* stream = reinterpret_cast<const float4*>(a.residual + base + column(i));
      const float4* delta = reinterpret_cast<const float4*>(a.delta + base + column(i));
      const float4 low = __ldcg(stream), high = __ldcg(stream + 1), d = __ldcg(delta), e = __ldcg(delta + 1);
      v[i][0] = low.x + d.x, v[i][1] = low.y + d.y, v[i][2] = low.z + d.z, v[i][3] = low.w + d.w;
      v[i][4] = high.x + e.x, v[i][5] = high.y + e.y, v[i][6] = high.z + e.z, v[i][7] = high.w + e.w;
      add_squares(v[i], squares);
    }
    const float scale = norm_scale(block_sum(squares, parts), hidden, a.eps);
#pragma unroll
    for (int i = 0; i < kTurns; ++i)
      if (column(i) < hidden) *reinterpret_cast<uint4*>(a.x + base + column(i)) = normed(v[i], scale, weight[i]);
  }

  /// residual += delta, after `make`: nobody in this launch waits for it.
  __device__ __forceinline__ void keep(const AddNorm& a, int row, int hidden) const {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      if (column(i) >= hidden) continue;
      float4* stream = reinterpret_cast<float4*>(a.residual + static_cast<size_t>(row) * hidden + column(i));
      stream[0] = {v[i][0], v[i][1], v[i][2], v[i][3]};
      stream[1] = {v[i][4], v[i][5], v[i][6], v[i][7]};
    }
  }
};

}  // namespace moe
