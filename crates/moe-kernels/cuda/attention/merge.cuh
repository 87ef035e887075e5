// Merging parts of a softmax: a part is a maximum, a sum of weights under it, and weighted values. Every sum here has a
// fixed order; all loads of a merge are issued together, since each costs a trip to another SM or to L2.
#pragma once

#include "attention/decode.cuh"

namespace moe {
namespace {

/// Weight of a part under a common maximum; 0 for an empty part.
__device__ __forceinline__ float partial_weight(float max, float top) {
  return max == -INFINITY ? 0.f : exp2f(max - top);
}

/// The parts of lanes 0 .. n - 1 together; the other lanes bring (-inf, 0).
struct Combined {
  float weight, top, sum;  // weight: of this lane's part
};

__device__ __forceinline__ Combined combine(float max, float sum) {
  Combined c;
  c.top = warp_max(max);
  c.weight = partial_weight(max, c.top);
  c.sum = warp_sum(c.weight * sum);
  return c;
}

/// The block's part: warps in order, then the new token (split 0). Values of this thread's head and dimensions.
template <int D>
struct BlockPartial {
  float top, sum;
  float value[ThreadSlice<D>::kPer];

  template <class Shared>
  __device__ BlockPartial(const Shared& s, bool own, const NewToken<D>& token) {
    const ThreadSlice<D> mine;
    const float score = own ? s.scores()[mine.head] : -INFINITY;
    top = score;
    float max[kWarps], sums[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      max[w] = s.stats(w)[2 * mine.head];
      sums[w] = s.stats(w)[2 * mine.head + 1];
      top = fmaxf(top, max[w]);
    }
    const float token_weight = partial_weight(score, top);
    sum = token_weight;
#pragma unroll
    for (int i = 0; i < ThreadSlice<D>::kPer; ++i) value[i] = token_weight * token.value[i];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = partial_weight(max[w], top);
      sum += weight * sums[w];
      const float* from = s.values(w) + mine.head * kValuePitch<D> + mine.d;
#pragma unroll
      for (int i = 0; i < ThreadSlice<D>::kPer; i += 4) {
        const float4 x = *reinterpret_cast<const float4*>(from + i);
        value[i] += weight * x.x, value[i + 1] += weight * x.y, value[i + 2] += weight * x.z,
            value[i + 3] += weight * x.w;
      }
    }
  }

  /// To the block of the cluster that merges this head.
  template <class Shared>
  __device__ __forceinline__ void send(const Shared& s) const {
    const ThreadSlice<D> mine;
    const int size = cluster_size(), share = kHeads / size, to = mine.head / share;
    const int at = cluster_rank() * share + mine.head % share;
#pragma unroll
    for (int i = 0; i < ThreadSlice<D>::kPer; i += 4)
      cluster_store4(s.inbox() + at * D + mine.d + i, to, {value[i], value[i + 1], value[i + 2], value[i + 3]});
    if (mine.d == 0) {
      cluster_store(s.inbox_stats() + 2 * at, to, top);
      cluster_store(s.inbox_stats() + 2 * at + 1, to, sum);
    }
  }
};

/// Stores 8 dimensions of one of the block's heads, of which 16 lanes have all, rounded and in FP8. By whole warps.
__device__ __forceinline__ void store_fp8(const DecodeArgs& a, const Place& p, int head, const float (&x)[8]) {
  const uint4 columns = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
  uint8_t* q = a.fp8.q + out_at<fp8::kGroup>(a, p, head);
  fp8::store_group(q, a.fp8.scale(p.row, p.head + head), columns, head < p.heads, a.fp8.quads);
}

/// `share` heads of 128 merged values from `first` on, in FP8.
__device__ __forceinline__ void store_merged(const DecodeArgs& a, const Place& p, const float* merged, int first,
                                             int share) {
  __syncthreads();
  const int warp_heads = 32 / fp8::kGroupLanes;
  if (static_cast<int>(threadIdx.x) / 32 * warp_heads >= share) return;
  const int local = threadIdx.x / fp8::kGroupLanes;
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    x[i] = merged[min(local, share - 1) * fp8::kGroup + threadIdx.x % fp8::kGroupLanes * 8 + i];
  store_fp8(a, p, local < share ? first + local : p.heads, x);
}

/// The last cluster of a sequence to arrive merges the partials of one head in the order of clusters.
template <int D, bool kFp8>
__device__ __forceinline__ void merge_clusters(const DecodeArgs& a, const Place& p, size_t group, int head,
                                               int active) {
  __shared__ bool last;
  __syncthreads();  // the release below is for all threads' writes
  if (threadIdx.x == 0) {
    uint32_t* arrived = a.arrived + group * kHeads + head;
    last = add_acq_rel(arrived, 1) == static_cast<uint32_t>(active - 1);
    if (last) *arrived = 0;  // ready for the next launch
  }
  __syncthreads();
  if (!last || threadIdx.x >= D || head >= p.heads) return;
  const int clusters = ceil_div(a.splits, kMaxCluster), lane = threadIdx.x % 32;
  const float* from = a.partials + (group * kHeads + head) * clusters * (D + 2);
  const bool brings = lane < active;
  const float max = brings ? __ldcg(from + lane * (D + 2) + D) : -INFINITY;
  const float sum = brings ? __ldcg(from + lane * (D + 2) + D + 1) : 0.f;
  float x[8];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = first + i < active ? __ldcg(from + (first + i) * (D + 2) + threadIdx.x) : 0.f;
  };
  load(0);
  const Combined c = combine(max, sum);
  float value = 0.f;
  for (int first = 0; first < active; first += 8) {
    if (first > 0) load(first);
#pragma unroll
    for (int i = 0; i < 8; ++i) value += __shfl_sync(0xffffffffu, c.weight, (first + i) % 32) * x[i];
  }
  if constexpr (kFp8) {
    __shared__ float merged[D];
    merged[threadIdx.x] = value / c.sum;
    return store_merged(a, p, merged, head, 1);
  }
  a.out[out_at<D>(a, p, head) + threadIdx.x] = __float2bfloat16_rn(value / c.sum);
}

/// Merges this block's share of the heads over the cluster; if the sequence has several clusters (of 8 blocks, so one
/// head per block), leaves the rest to the last of them.
template <int D, bool kFp8, class Shared>
__device__ __forceinline__ void merge_cluster(const DecodeArgs& a, const Place& p, const Range& range,
                                              const Shared& s) {
  const int size = cluster_size(), rank = cluster_rank(), share = kHeads / size, lane = threadIdx.x % 32;
  const int clusters = ceil_div(a.splits, kMaxCluster), active = ceil_div(range.active, kMaxCluster);
  const size_t group = static_cast<size_t>(p.row) * gridDim.y + p.group;
  for (int at = threadIdx.x; at < share * D; at += kThreads) {
    const int local = at / D, head = rank * share + local, d = at % D;
    const bool brings = lane < size;
    const float* stats = s.inbox_stats() + 2 * (lane * share + local);
    const Combined c = combine(brings ? stats[0] : -INFINITY, brings ? stats[1] : 0.f);
    float value = 0.f;
#pragma unroll
    for (int r = 0; r < kMaxCluster; ++r)
      value += __shfl_sync(0xffffffffu, c.weight, r) * (r < size ? s.inbox()[(r * share + local) * D + d] : 0.f);
    if (active == 1) {
      if (kFp8) s.values(0)[at] = value / c.sum;  // the block has read what was there
      else if (head < p.heads) a.out[out_at<D>(a, p, head) + d] = __float2bfloat16_rn(value / c.sum);
      continue;
    }
    float* to = a.partials + ((group * kHeads + head) * clusters + p.split / kMaxCluster) * (D + 2);
    to[d] = value;
    if (d == 0) to[D] = c.top, to[D + 1] = c.sum;
  }
  if (active > 1) merge_clusters<D, kFp8>(a, p, group, rank, active);
  if constexpr (kFp8) {
    if (active == 1) store_merged(a, p, s.values(0), rank * share, share);
  }
}

}  // namespace
}  // namespace moe
