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

/// Combines the parts of lanes 0 .. n - 1; the other lanes pass (-inf, 0).
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

/// The block's part: warps in order, then the new token and the head's sink (in split 0). It holds the values of this
/// thread's head and dimensions.
template <int D>
struct BlockPartial {
  float top, sum;
  float value[ThreadSlice<D>::kPer];

  template <class Shared>
  __device__ BlockPartial(const DecodeArgs& a, const Place& p, const Shared& s, const NewToken<D>& token) {
    const ThreadSlice<D> mine;
    const bool own = p.split == 0;
    const float score = own ? s.scores()[mine.head] : -INFINITY;
    const bool sinks = own && a.sinks != nullptr && mine.head < p.heads;
    const float sink = sinks ? a.sinks[p.head + mine.head] * kLog2E : -INFINITY;
    top = fmaxf(score, sink);
    float max[kWarps], sums[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      max[w] = s.stats(w)[2 * mine.head];
      sums[w] = s.stats(w)[2 * mine.head + 1];
      top = fmaxf(top, max[w]);
    }
    const float token_weight = partial_weight(score, top);
    sum = token_weight + partial_weight(sink, top);
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

  /// Sends the part to the block of the cluster that merges this head.
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

/// Stores 8 dimensions of one of the block's heads in FP8, after rounding to bf16; 16 lanes have a whole head. All
/// lanes of a warp call it.
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

/// Stores a float as a word that is not zero, which tells the reader that it is there; 0 is stored as -0.
__device__ __forceinline__ void publish(uint32_t* to, float v) {
  const uint32_t word = __float_as_uint(v);
  store_relaxed(to, word == 0 ? 0x80000000u : word);
}

/// Waits until the words at `from` are there; a warp looks at all of its words together, because each look costs a
/// round trip to L2.
template <int kCount>
__device__ __forceinline__ void await_words(uint32_t (&word)[kCount], const uint32_t* const (&from)[kCount],
                                            const bool (&wanted)[kCount]) {
  bool there;
  do {
    there = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (wanted[i] && word[i] == 0) word[i] = load_relaxed(from[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) there = there && (!wanted[i] || word[i] != 0);
  } while (!__all_sync(0xffffffffu, there));
}

/// A thread's values of a head that the block merges, kThreads apart, and the maximum and sum of their part. Threads
/// from `kUsed` on have no value.
template <int D>
struct HeadPart {
  static constexpr int kUsed = D < kThreads ? D : kThreads, kCount = D / kUsed;
  float value[kCount], top, sum;
};

/// Merges the parts of one head of a sequence's clusters in their order: the parts that the others publish, and `own`
/// of the last cluster, which merges; its values become the results. The blocks of the other clusters come earlier in
/// the grid, so this block may wait for them. A word is not zero when it is there, so there is only a store and a load
/// between a cluster that publishes and this one. What was read is set to zero again. kUsed threads call it.
template <int D>
__device__ __forceinline__ void merge_clusters(uint32_t* parts, int others, HeadPart<D>& own) {
  constexpr int kCount = HeadPart<D>::kCount, kAtOnce = 3, kWords = kAtOnce * kCount, kPart = D + 2;
  const int lane = threadIdx.x % 32;
  const bool brings = lane < others;
  uint32_t x[kWords + 2] = {};
  const uint32_t* from[kWords + 2];
  bool wanted[kWords + 2];
  Combined c;
  float value[kCount] = {};
  for (int first = 0; first < others; first += kAtOnce) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int part = first + i / kCount;
      x[i] = 0, from[i] = parts + part * kPart + i % kCount * kThreads + threadIdx.x, wanted[i] = part < others;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      from[kWords + i] = parts + lane * kPart + D + i, wanted[kWords + i] = first == 0 && brings;
    await_words(x, from, wanted);
    if (first == 0) {
      const bool last = lane == others;
      c = combine(brings ? __uint_as_float(x[kWords])
                  : last ? own.top
                         : -INFINITY,
                  brings ? __uint_as_float(x[kWords + 1])
                  : last ? own.sum
                         : 0.f);
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int part = first + i / kCount;
      value[i % kCount] += __shfl_sync(0xffffffffu, c.weight, part % 32) * __uint_as_float(x[i]);
      if (wanted[i]) parts[part * kPart + i % kCount * kThreads + threadIdx.x] = 0;
    }
  }
  const float weight = __shfl_sync(0xffffffffu, c.weight, others);
  named_barrier(1, HeadPart<D>::kUsed);  // all have read maxima and sums
  if (threadIdx.x < 2 * others) parts[threadIdx.x / 2 * kPart + D + threadIdx.x % 2] = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) own.value[i] = (value[i] + weight * own.value[i]) / c.sum;
}

/// Merges this block's share of the heads over the cluster. If the sequence has several clusters (of 8 blocks, so one
/// head per block), the last of them does the rest.
template <int D, bool kFp8, class Shared>
__device__ __forceinline__ void merge_cluster(const DecodeArgs& a, const Place& p, const Range& range,
                                              const Shared& s) {
  const int size = cluster_size(), rank = cluster_rank(), share = kHeads / size, lane = threadIdx.x % 32;
  const int clusters = ceil_div(a.splits, kMaxCluster), active = ceil_div(range.active, kMaxCluster);
  const size_t group = static_cast<size_t>(p.row) * gridDim.y + p.group;
  constexpr int kCount = HeadPart<D>::kCount;
  HeadPart<D> own = {};  // of several clusters: a block has one head
  for (int at = threadIdx.x; at < share * D; at += kThreads) {
    const int local = at / D, head = rank * share + local, d = at % D;
    float gate[1] = {};
    if (active == 1) load_gates<D>(gate, a, p, head, d);
    const bool brings = lane < size;
    const float* stats = s.inbox_stats() + 2 * (lane * share + local);
    const Combined c = combine(brings ? stats[0] : -INFINITY, brings ? stats[1] : 0.f);
    float value = 0.f;
#pragma unroll
    for (int r = 0; r < kMaxCluster; ++r)
      value += __shfl_sync(0xffffffffu, c.weight, r) * (r < size ? s.inbox()[(r * share + local) * D + d] : 0.f);
    if (active == 1) {
      if (kFp8) s.values(0)[at] = value / c.sum;  // the block has read what was there
      else if (head < p.heads)
        a.out[out_at<D>(a, p, head) + d] = __float2bfloat16_rn(gated<D>(a, value / c.sum, gate[0]));
      continue;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) own.value[i] = kCount == 1 || d / kThreads == i ? value : own.value[i];
    own.top = c.top, own.sum = c.sum;
  }
  if (active == 1) {
    if constexpr (kFp8) store_merged(a, p, s.values(0), rank * share, share);
    return;
  }
  const bool merges = p.split / kMaxCluster == active - 1;
  uint32_t* parts = a.partials + (group * kHeads + rank) * clusters * (D + 2);
  if (threadIdx.x < HeadPart<D>::kUsed && !merges) {
    uint32_t* to = parts + p.split / kMaxCluster * (D + 2);
#pragma unroll
    for (int i = 0; i < kCount; ++i) publish(to + i * kThreads + threadIdx.x, own.value[i]);
    if (threadIdx.x == 0) publish(to + D, own.top), publish(to + D + 1, own.sum);
  }
  if (threadIdx.x >= HeadPart<D>::kUsed || !merges) return;
  float gate[kCount] = {};
  load_gates<D>(gate, a, p, rank, threadIdx.x, kThreads);
  merge_clusters<D>(parts, active - 1, own);
  if constexpr (kFp8) {
    s.values(0)[threadIdx.x] = own.value[0];
    store_merged(a, p, s.values(0), rank, 1);
  } else if (rank < p.heads) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      a.out[out_at<D>(a, p, rank) + i * kThreads + threadIdx.x] =
          __float2bfloat16_rn(gated<D>(a, own.value[i], gate[i]));
  }
}

}  // namespace
}  // namespace moe
