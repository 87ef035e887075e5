// Merges the splits of latent attention (latent.cu, latent_decode.cu): a warp, or each half of it, reads the values of
// every 8th or 16th split, four columns a lane, and eight warps add what they have. For a few tokens the product with
// W_UV follows in the same launch.
#include "attention/latent_decode.cuh"
#include "ptx/cluster.cuh"

#include <cmath>

namespace moe::attention_latent {
namespace {

constexpr int kMergeWarps = 8;
constexpr int kBatch = 8;  // splits of a lane that are asked for together

/// A block that merges 64 or 128 columns, four a lane, and its shared memory.
template <int kColumns>
struct Merge {
  static constexpr int kLanes = kColumns / 4;                // of a split
  static constexpr int kAtOnce = kMergeWarps * 32 / kLanes;  // splits
  static constexpr int kBlocks = kValue / kColumns;          // of a row
  float weights[kMaxSplits];
  float4 parts[kMergeWarps][kLanes];
};

/// A row's splits that have written something, from the first on; 0 of padding. Known before the launch ahead has
/// ended.
__device__ __forceinline__ int used_splits(const Args& a, const Splits& splits, uint32_t token) {
  if (token < a.query_start_loc[0] || token >= a.query_start_loc[a.sequences]) return 0;
  if (!splits.by_row) return splits.count;
  return decode::range_of(a.positions[token], a.window, 0, splits.count).used;
}

/// Four columns of a row from `column` on, merged, in the first warp; zeros of padding. All threads.
template <int kColumns>
__device__ __forceinline__ float4 merge_columns(const Splits& splits, size_t row, int column, int used,
                                                Merge<kColumns>& m) {
  constexpr int kLanes = Merge<kColumns>::kLanes, kAtOnce = Merge<kColumns>::kAtOnce;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = threadIdx.x / kLanes;
  const float2* softmax = splits.softmax + row * splits.count;
  const float* values = splits.values + row * splits.count * kValue + column;
  // All loads of a batch, and all maxima and sums, are on their way before anything is asked of them.
  float4 x[kBatch];
  const auto load = [&](int from) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int split = from + j * kAtOnce + first;
      x[j] = split < used ? __ldcg(reinterpret_cast<const float4*>(values + static_cast<size_t>(split) * kValue))
                          : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  };
  float2 mine[kMaxSplits / 32];  // of splits lane, lane + 32, ..
  float top = -INFINITY, sum = 0.f;
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    const int split = i * 32 + lane;
    mine[i] = split < used ? __ldcg(softmax + split) : make_float2(-INFINITY, 0.f);
  }
  load(0);
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) top = fmaxf(top, mine[i].x);
  top = warp_max(top);
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    const float weight = mine[i].x == -INFINITY ? 0.f : exp2f(mine[i].x - top);
    sum += weight * mine[i].y;
    if (i % kMergeWarps == warp) m.weights[i * 32 + lane] = weight;
  }
  sum = warp_sum(sum);
  __syncthreads();
  float4 total = {};
  for (int from = 0; from < used; from += kBatch * kAtOnce) {
    if (from > 0) load(from);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int split = from + j * kAtOnce + first;
      // A split without positions has written no values.
      const float weight = split < used ? m.weights[split] : 0.f;
      if (weight == 0.f) continue;
      total.x += weight * x[j].x, total.y += weight * x[j].y, total.z += weight * x[j].z, total.w += weight * x[j].w;
    }
  }
  if constexpr (kLanes < 32) {
    const auto add_other_half = [](float& v) { v += __shfl_xor_sync(0xffffffffu, v, kLanes); };
    add_other_half(total.x), add_other_half(total.y), add_other_half(total.z), add_other_half(total.w);
  }
  if (lane < kLanes) m.parts[warp][lane] = total;
  __syncthreads();
  if (warp > 0 || used == 0) return {};
#pragma unroll
  for (int i = 1; i < kMergeWarps; ++i) {
    const float4 y = m.parts[i][lane % kLanes];
    total.x += y.x, total.y += y.y, total.z += y.z, total.w += y.w;
  }
  const float share = 1.f / sum;
  return make_float4(total.x * share, total.y * share, total.z * share, total.w * share);
}

/// A block per (token, head) row and kColumns columns.
template <int kColumns>
__global__ void __launch_bounds__(kMergeWarps * 32)
    merge_kernel(const __grid_constant__ Args a, const __grid_constant__ Splits splits) {
  __shared__ Merge<kColumns> merge;
  constexpr int kLanes = Merge<kColumns>::kLanes;
  pdl_launch_dependents();
  const size_t row = blockIdx.x;
  const int column = blockIdx.y * kColumns + threadIdx.x % kLanes * 4, used = used_splits(a, splits, row / a.heads);
  pdl_wait();
  const float4 x = merge_columns(splits, row, column, used, merge);
  if (threadIdx.x >= kLanes || used == 0) return;  // padding has been written, as zeros
  *reinterpret_cast<uint2*>(a.out + row * kValue + column) = make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
}

constexpr int kValueDim = 128;  // of a head

__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

/// The same with the product that follows, values = W_UV of the row's head times the merged row. A cluster per row:
/// each block merges kColumns columns for all, and has its rows of W_UV, 16 or 32 KB, in registers before there is
/// anything to merge.
template <int kColumns>
__global__ void __launch_bounds__(kMergeWarps * 32)
    merge_values_kernel(const __grid_constant__ Args a, const __grid_constant__ Splits splits,
                        const bf16* __restrict__ w_uv, bf16* values) {
  constexpr int kCluster = Merge<kColumns>::kBlocks, kLanes = Merge<kColumns>::kLanes;
  constexpr int kOutputs = kValueDim / kCluster, kEach = kOutputs / kMergeWarps;  // of a block, of a warp
  __shared__ Merge<kColumns> merge;
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
  const int column = part * kColumns + lane % kLanes * 4, used = used_splits(a, splits, row / a.heads);
  pdl_wait();
  cluster_wait();  // every block of the cluster runs: its shared memory may be written to
  float4 x = merge_columns(splits, row, column, used, merge);
  if (warp == 0) {
    x = make_float4(rounded(x.x), rounded(x.y), rounded(x.z), rounded(x.w));
    // Where half a warp has the columns, each half writes to every other block.
#pragma unroll
    for (int to = 0; to < kCluster; to += 32 / kLanes) cluster_store4(latent + column, to + lane / kLanes, x);
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

cudaError_t launch_merge(const Args& a, const Splits& splits, void* stream) {
  const auto run = [&](auto kernel, int blocks) {
    const dim3 grid(static_cast<unsigned>(a.tokens) * a.heads, blocks);
    return launch(kernel, {grid, dim3(kMergeWarps * 32), stream}, a, splits);
  };
  return splits.by_row ? run(merge_kernel<64>, Merge<64>::kBlocks) : run(merge_kernel<128>, Merge<128>::kBlocks);
}

cudaError_t launch_merge_values(const Args& a, const Splits& splits, const bf16* w_uv, bf16* values, void* stream) {
  const auto run = [&](auto kernel, int blocks) {
    Launch l = {dim3(static_cast<unsigned>(a.tokens) * a.heads * blocks), dim3(kMergeWarps * 32), stream};
    l.cluster = blocks;
    return launch(kernel, l, a, splits, w_uv, values);
  };
  return splits.by_row ? run(merge_values_kernel<64>, Merge<64>::kBlocks)
                       : run(merge_values_kernel<128>, Merge<128>::kBlocks);
}

}  // namespace moe::attention_latent
