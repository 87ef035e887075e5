// Merges the splits of latent attention (latent.cu, latent_decode.cu). Teams of a warp or of half a warp merge every
// 8th or 16th split, four columns a lane. Each team has its own maximum, so that one barrier is enough. For a few
// tokens the product with W_UV follows in the same launch.
#include "attention/latent_decode.cuh"
#include "ptx/cluster.cuh"

#include <cmath>

namespace moe::attention_latent {
namespace {

constexpr int kMergeWarps = 8;
constexpr int kBatch = 8;  // splits of a team that are loaded together

/// A block that merges 64 or 128 columns, four a lane, and its shared memory: what each team of lanes has merged.
template <int kColumns>
struct Merge {
  static constexpr int kLanes = kColumns / 4;               // lanes of a team, which merges one split at a time
  static constexpr int kTeams = kMergeWarps * 32 / kLanes;  // splits that are merged at the same time
  static constexpr int kBlocks = kValue / kColumns;         // blocks of a row
  float2 softmax[kTeams];
  float4 values[kTeams][kLanes];
};

/// Values and sum under a running maximum.
struct Merged {
  float4 values = {0.f, 0.f, 0.f, 0.f};
  float max = -INFINITY, sum = 0.f;

  /// Adds N parts. A part without positions has written no values.
  template <int N>
  __device__ __forceinline__ void add(const float2 (&softmax)[N], const float4 (&x)[N]) {
    const float before = max;
#pragma unroll
    for (int j = 0; j < N; ++j) max = fmaxf(max, softmax[j].x);
    const float base = max == -INFINITY ? 0.f : max, factor = exp2_approx(before - base);
    sum *= factor, values.x *= factor, values.y *= factor, values.z *= factor, values.w *= factor;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float weight = exp2_approx(softmax[j].x - base);
      if (weight == 0.f) continue;
      sum = fmaf(weight, softmax[j].y, sum);
      values.x = fmaf(weight, x[j].x, values.x), values.y = fmaf(weight, x[j].y, values.y);
      values.z = fmaf(weight, x[j].z, values.z), values.w = fmaf(weight, x[j].w, values.w);
    }
  }
};

/// The number of a row's splits that have written something, counted from the first; 0 for padding. It is known before
/// the launch ahead has ended.
__device__ __forceinline__ int used_splits(const Args& a, const Splits& splits, uint32_t token) {
  if (token < a.query_start_loc[0] || token >= a.query_start_loc[a.sequences]) return 0;
  if (!splits.by_row) return splits.count;
  return decode::range_of(a.positions[token], a.window, 0, splits.count).used;
}

/// Four merged columns of a row from `column` on, in the first team; zeros for padding. All threads call it.
template <int kColumns>
__device__ __forceinline__ float4 merge_columns(const Splits& splits, size_t row, int column, int used,
                                                Merge<kColumns>& m) {
  constexpr int kTeams = Merge<kColumns>::kTeams, kLanes = Merge<kColumns>::kLanes;
  const int team = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const float2* softmax = splits.softmax + row * splits.count;
  const float* values = splits.values + row * splits.count * kValue + column;
  Merged own;
  for (int from = 0; from < used; from += kBatch * kTeams) {
    // All loads are issued before their results are used.
    float2 s[kBatch];
    float4 x[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int split = from + j * kTeams + team;
      s[j] = split < used ? __ldcg(softmax + split) : make_float2(-INFINITY, 0.f);
      x[j] = split < used ? __ldcg(reinterpret_cast<const float4*>(values + static_cast<size_t>(split) * kValue))
                          : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    own.add(s, x);
  }
  if (lane == 0) m.softmax[team] = make_float2(own.max, own.sum);
  m.values[team][lane] = own.values;
  __syncthreads();
  if (team > 0 || used == 0) return {};
  float2 s[kTeams];
  float4 x[kTeams];
#pragma unroll
  for (int i = 0; i < kTeams; ++i) s[i] = m.softmax[i], x[i] = m.values[i][lane];
  Merged all;
  all.add(s, x);
  const float share = 1.f / all.sum;
  return make_float4(all.values.x * share, all.values.y * share, all.values.z * share, all.values.w * share);
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

/// The same as merge_kernel with the product that follows: values = W_UV of the row's head times the merged row. A row
/// has a cluster: each block merges kColumns columns for all blocks, and loads its rows of W_UV, 16 or 32 KB, into
/// registers before there is anything to merge.
template <int kColumns>
__global__ void __launch_bounds__(kMergeWarps * 32)
    merge_values_kernel(const __grid_constant__ Args a, const __grid_constant__ Splits splits,
                        const bf16* __restrict__ w_uv, bf16* values) {
  constexpr int kCluster = Merge<kColumns>::kBlocks, kLanes = Merge<kColumns>::kLanes;
  constexpr int kOutputs = kValueDim / kCluster, kEach = kOutputs / kMergeWarps;  // outputs of a block, of a warp
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
  if (threadIdx.x < kLanes) {
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

/// Whether a block takes 64 columns: with few rows more blocks use SMs that would be idle. With more rows the
/// additional blocks cost time.
bool is_narrow(const Args& a) { return a.tokens * a.heads <= 16; }

}  // namespace

cudaError_t launch_merge(const Args& a, const Splits& splits, void* stream) {
  const auto run = [&](auto kernel, int blocks) {
    const dim3 grid(static_cast<unsigned>(a.tokens) * a.heads, blocks);
    return launch(kernel, {grid, dim3(kMergeWarps * 32), stream}, a, splits);
  };
  return is_narrow(a) ? run(merge_kernel<64>, Merge<64>::kBlocks) : run(merge_kernel<128>, Merge<128>::kBlocks);
}

cudaError_t launch_merge_values(const Args& a, const Splits& splits, const bf16* w_uv, bf16* values, void* stream) {
  const auto run = [&](auto kernel, int blocks) {
    Launch l = {dim3(static_cast<unsigned>(a.tokens) * a.heads * blocks), dim3(kMergeWarps * 32), stream};
    l.cluster = blocks;
    return launch(kernel, l, a, splits, w_uv, values);
  };
  return is_narrow(a) ? run(merge_values_kernel<64>, Merge<64>::kBlocks)
                      : run(merge_values_kernel<128>, Merge<128>::kBlocks);
}

}  // namespace moe::attention_latent
