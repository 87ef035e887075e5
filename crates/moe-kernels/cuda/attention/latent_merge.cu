// Merges the splits of latent attention (latent.cu): a warp reads the values of every eighth split that has any, four
// columns a lane, and eight warps add what they have.
#include "attention/latent.cuh"

#include <cmath>

namespace moe::attention_latent {
namespace {

constexpr int kMergeWarps = 8;
constexpr int kColumns = 128;  // of a block: four of each lane

/// A block per (token, head) row and kColumns columns.
__global__ void __launch_bounds__(kMergeWarps * 32)
    merge_kernel(const __grid_constant__ Args a, const __grid_constant__ Splits splits) {
  __shared__ float4 parts[kMergeWarps][32];
  pdl_launch_dependents();
  pdl_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.y * kColumns + lane * 4;
  const size_t row = blockIdx.x;
  const uint32_t token = blockIdx.x / a.heads;
  const uint32_t begin = a.query_start_loc[0], end = a.query_start_loc[a.sequences];
  const float2* softmax = splits.softmax + row * splits.count;
  float2 mine[kMaxSplits / 32];  // of splits lane, lane + 32, ..
  float top = -INFINITY, sum = 0.f;
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    const int split = i * 32 + lane;
    mine[i] = split < splits.count ? __ldcg(softmax + split) : make_float2(-INFINITY, 0.f);
    top = fmaxf(top, mine[i].x);
  }
  if (token < begin || token >= end) return;  // padding, whose rows are zero; asked when all loads are on their way
  top = warp_max(top);
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    mine[i].x = mine[i].x == -INFINITY ? 0.f : exp2f(mine[i].x - top);  // now the weight
    sum += mine[i].x * mine[i].y;
  }
  sum = warp_sum(sum);
  const float* values = splits.values + row * splits.count * kValue + column;
  float4 total = {};
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    if (i * 32 >= splits.count) break;
    float4 x[32 / kMergeWarps];
    float weight[32 / kMergeWarps];
#pragma unroll
    for (int j = 0; j < 32 / kMergeWarps; ++j) {
      const int split = i * 32 + j * kMergeWarps + warp;
      weight[j] = __shfl_sync(0xffffffffu, mine[i].x, j * kMergeWarps + warp);
      // A split without positions has written no values.
      x[j] = weight[j] > 0.f ? __ldcg(reinterpret_cast<const float4*>(values + static_cast<size_t>(split) * kValue))
                             : make_float4(0.f, 0.f, 0.f, 0.f);
    }
#pragma unroll
    for (int j = 0; j < 32 / kMergeWarps; ++j) {
      total.x += weight[j] * x[j].x, total.y += weight[j] * x[j].y;
      total.z += weight[j] * x[j].z, total.w += weight[j] * x[j].w;
    }
  }
  parts[warp][lane] = total;
  __syncthreads();
  if (warp != 0) return;
#pragma unroll
  for (int i = 1; i < kMergeWarps; ++i) {
    const float4 x = parts[i][lane];
    total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
  }
  const float share = 1.f / sum;
  *reinterpret_cast<uint2*>(a.out + row * kValue + column) =
      make_uint2(pack_bf16(total.x * share, total.y * share), pack_bf16(total.z * share, total.w * share));
}

}  // namespace

/// out = the weighted mean of the splits.
cudaError_t launch_merge(const Args& a, const Splits& splits, void* stream) {
  const dim3 grid(static_cast<unsigned>(a.tokens) * a.heads, kValue / kColumns);
  return launch(merge_kernel, {grid, dim3(kMergeWarps * 32), stream}, a, splits);
}

}  // namespace moe::attention_latent
