// Merges the splits of latent attention (latent.cu): a warp reads the values of every eighth split that has any, four
// columns a lane, and eight warps add what they have. For a few tokens the product with W_UV follows in the same
// launch.
#include "attention/latent.cuh"
#include "ptx/cluster.cuh"

#include <cmath>

namespace moe::attention_latent {
namespace {

constexpr int kMergeWarps = 8;
constexpr int kColumns = 128;  // of a block: four of each lane

/// Four columns of a row from `column` on, merged: in the first warp, where each lane has its own columns. `live`: the
/// row is no padding, whose mean is zero. All threads of a block.
__device__ __forceinline__ float4 merge_columns(const Splits& splits, size_t row, int column, bool live,
                                                float4 (*parts)[32]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float2* softmax = splits.softmax + row * splits.count;
  float2 mine[kMaxSplits / 32];  // of splits lane, lane + 32, ..
  float top = -INFINITY, sum = 0.f;
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    const int split = i * 32 + lane;
    mine[i] = split < splits.count ? __ldcg(softmax + split) : make_float2(-INFINITY, 0.f);
    top = fmaxf(top, mine[i].x);
  }
  if (!live) return {};  // asked when all loads are on their way
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
#pragma unroll
  for (int i = 1; i < kMergeWarps; ++i) {
    const float4 x = parts[i][lane];
    if (warp == 0) total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
  }
  const float share = 1.f / sum;
  return make_float4(total.x * share, total.y * share, total.z * share, total.w * share);
}

/// Whether a token is one of the step's sequences, and no padding.
__device__ __forceinline__ bool is_live(const Args& a, uint32_t token) {
  return token >= a.query_start_loc[0] && token < a.query_start_loc[a.sequences];
}

/// A block per (token, head) row and kColumns columns.
__global__ void __launch_bounds__(kMergeWarps * 32)
    merge_kernel(const __grid_constant__ Args a, const __grid_constant__ Splits splits) {
  __shared__ float4 parts[kMergeWarps][32];
  pdl_launch_dependents();
  pdl_wait();
  const int column = blockIdx.y * kColumns + threadIdx.x % 32 * 4;
  const size_t row = blockIdx.x;
  const bool live = is_live(a, blockIdx.x / a.heads);
  const float4 x = merge_columns(splits, row, column, live, parts);
  if (threadIdx.x >= 32 || !live) return;  // padding has been written, as zeros
  *reinterpret_cast<uint2*>(a.out + row * kValue + column) = make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
}

constexpr int kCluster = kValue / kColumns;     // blocks of a row
constexpr int kValueDim = 128;                  // of a head
constexpr int kOutputs = kValueDim / kCluster;  // of a block
constexpr int kEach = kOutputs / kMergeWarps;   // of a warp

__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

/// The same with the product that follows, values = W_UV of the row's head times the merged row. A cluster per row:
/// each block merges kColumns columns for all, and has its rows of W_UV, 32 KB, in registers before there is anything
/// to merge.
__global__ void __launch_bounds__(kMergeWarps * 32)
    merge_values_kernel(const __grid_constant__ Args a, const __grid_constant__ Splits splits,
                        const bf16* __restrict__ w_uv, bf16* values) {
  __shared__ float4 parts[kMergeWarps][32];
  __shared__ __align__(16) float latent[kValue];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = cluster_rank();
  const size_t row = blockIdx.x / kCluster;
  const int first = part * kOutputs + warp * kEach;
  Vec16 w[kEach][2];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const bf16* from = w_uv + (static_cast<size_t>(row % a.heads) * kValueDim + first + j) * kValue + lane * 8;
    w[j][0] = load_const(from), w[j][1] = load_const(from + kValue / 2);
  }
  cluster_arrive();
  pdl_launch_dependents();
  pdl_wait();
  cluster_wait();  // every block of the cluster runs: its shared memory may be written to
  const int column = part * kColumns + lane * 4;
  float4 x = merge_columns(splits, row, column, is_live(a, static_cast<uint32_t>(row / a.heads)), parts);
  if (warp == 0) {
    x = make_float4(rounded(x.x), rounded(x.y), rounded(x.z), rounded(x.w));
#pragma unroll
    for (int to = 0; to < kCluster; ++to) cluster_store4(latent + column, to, x);
  }
  cluster_sync();
  float own = 0.f;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    float sum = 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = unpack_bf16(w[j][half].word[i]);
        const float* from = latent + half * (kValue / 2) + lane * 8 + 2 * i;
        sum = fmaf(v.x, from[0], fmaf(v.y, from[1], sum));
      }
    }
    sum = warp_sum(sum);
    if (lane == j) own = sum;
  }
  if (lane < kEach) values[row * kValueDim + first + lane] = __float2bfloat16_rn(own);
}

}  // namespace

/// out = the weighted mean of the splits.
cudaError_t launch_merge(const Args& a, const Splits& splits, void* stream) {
  const dim3 grid(static_cast<unsigned>(a.tokens) * a.heads, kValue / kColumns);
  return launch(merge_kernel, {grid, dim3(kMergeWarps * 32), stream}, a, splits);
}

/// values [tokens, heads, 128] = w_uv [heads, 128, kValue] times that.
cudaError_t launch_merge_values(const Args& a, const Splits& splits, const bf16* w_uv, bf16* values, void* stream) {
  Launch l = {dim3(static_cast<unsigned>(a.tokens) * a.heads * kCluster), dim3(kMergeWarps * 32), stream};
  l.cluster = kCluster;
  return launch(merge_values_kernel, l, a, splits, w_uv, values);
}

}  // namespace moe::attention_latent
