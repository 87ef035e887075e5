// The edge of top-k and of top-p without sorting: the first token, from the likeliest down, at which a running count or
// a running weight reaches its share. Sums are sums of integers, so the edge is exactly the CPU's.
//
// Histograms narrow the tokens down. The first two passes use the distance from the largest logit, because the leading
// bits of logits hardly differ: 256 classes, then 256 within one of them. Usually few tokens remain then; they are
// gathered, and each is compared with all others. If many equal logits remain, further passes use digits of the key.
#pragma once

#include "sampling/row.cuh"

namespace moe {

/// The tokens that remain after the passes so far.
struct Narrowed {
  Edge keep;  // only these count at all
  float top, per_unit;
  int passes;
  uint32_t coarse_bin, fine_bin;  // of the passes by distance
  uint64_t prefix;                // of the keys, after those

  /// 255 for the likeliest tokens, 0 for all tokens far below. Neither function rises as x falls.
  __device__ __forceinline__ uint32_t coarse(float x) const {
    return kBins - 1 - min(kBins - 1u, __float2uint_rz(distance(x)));
  }
  __device__ __forceinline__ uint32_t fine(float x) const {
    const float within = __fmul_rn(__fsub_rn(distance(x), static_cast<float>(kBins - 1 - coarse_bin)), kBins);
    return kBins - 1 - min(kBins - 1u, __float2uint_rz(within));
  }

  __device__ __forceinline__ bool has(float x, uint32_t id) const {
    if (!keep.keeps(x, id)) return false;
    if (passes > 0 && coarse(x) != coarse_bin) return false;
    if (passes > 1 && fine(x) != fine_bin) return false;
    return passes <= 2 || token_key(x, id) >> (64 - 8 * (passes - 2)) == prefix;
  }

  /// The bin of a remaining token in the next pass.
  __device__ __forceinline__ uint32_t next(float x, uint32_t id) const {
    if (passes == 0) return coarse(x);
    if (passes == 1) return fine(x);
    return token_key(x, id) >> (56 - 8 * (passes - 2)) & (kBins - 1);
  }

  __device__ __forceinline__ void narrow(uint32_t chosen) {
    if (passes == 0) coarse_bin = chosen;
    else if (passes == 1) fine_bin = chosen;
    else prefix = prefix << 8 | chosen;
    ++passes;
  }

 private:
  __device__ __forceinline__ float distance(float x) const { return __fmul_rn(__fsub_rn(top, x), per_unit); }
};

/// Counts or weighs tokens by bin, and adds up the blocks' bins; all blocks call it. Shared memory adds 32-bit words in
/// hardware but not 64-bit words, so a weight is added in three parts that cannot overflow. The lowest bin of the first
/// pass is left out: a search that reaches it knows that by elimination.
template <bool kWeighted>
__device__ __forceinline__ void fill_bins(Row& row, const Narrowed& left, const Weights& weights) {
  RowShared& s = row.s;
  constexpr int kParts = kWeighted ? 3 : 1;
  for (int i = threadIdx.x; i < kParts * kBins; i += kRowThreads) s.bins[i] = 0;
  __syncthreads();
#pragma unroll 2
  for (int i = threadIdx.x; i < row.count; i += kRowThreads) {
    const float x = row.logits[i];
    const uint32_t id = row.first + i;
    if (!left.has(x, id)) continue;
    const uint32_t bin = left.next(x, id);
    if (left.passes == 0 && bin == 0) continue;
    if (kWeighted) {
      const uint64_t w = weights.of(x);
      if (w == 0) continue;
      atomicAdd(s.bins + bin, static_cast<uint32_t>(w & 0xffff));
      atomicAdd(s.bins + kBins + bin, static_cast<uint32_t>(w >> 16 & 0xffff));
      atomicAdd(s.bins + 2 * kBins + bin, static_cast<uint32_t>(w >> 32));
    } else {
      atomicAdd(s.bins + bin, 1u);
    }
  }
  cluster_sync();
  for (int i = threadIdx.x; i < kBins; i += kRowThreads) {
    uint64_t total = 0;
#pragma unroll
    for (int r = 0; r < kRowCluster; ++r) {
#pragma unroll
      for (int p = 0; p < kParts; ++p)
        total += static_cast<uint64_t>(cluster_load(s.bins + p * kBins + i, r)) << 16 * p;
    }
    s.totals[i] = total;
  }
  cluster_sync();
}

/// The first bin, from the top bin down, for which `reached(before + its total)` is true. Writes its number and the sum
/// before it to `s.found`. If there is none, it is the lowest bin. One warp calls it.
template <class Reached>
__device__ __forceinline__ void find_bin(RowShared& s, uint64_t before, Reached reached) {
  constexpr int kPerLane = kBins / 32;
  const int lane = threadIdx.x % 32, top = kBins - 1 - lane * kPerLane;
  uint64_t own = 0;
  for (int i = 0; i < kPerLane; ++i) own += s.totals[top - i];
  const uint64_t sum = warp_inclusive_sum(own);
  const uint32_t hit = __ballot_sync(0xffffffffu, reached(before + sum));
  if (lane != (hit == 0 ? 31 : __ffs(hit) - 1)) return;
  before += sum - own;
  int bin = top;
  for (; bin > top - kPerLane + 1 && !reached(before + s.totals[bin]); --bin) before += s.totals[bin];
  s.found[0] = bin;
  s.found[1] = before;
}

/// Gathers the remaining tokens and finds the edge among them; all blocks call it. Returns false if there are too many.
/// `s.found[0]` is the edge's key, or 0 if the sum does not reach its share.
template <bool kWeighted, class Reached>
__device__ __forceinline__ bool gather_edge(Row& row, const Narrowed& left, const Weights& weights, uint64_t before,
                                            Reached reached) {
  RowShared& s = row.s;
  __syncthreads();
  if (threadIdx.x == 0) s.gathered = 0, s.found[0] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < row.count; i += kRowThreads) {
    const float x = row.logits[i];
    const uint32_t id = row.first + i;
    if (!left.has(x, id)) continue;
    const uint32_t at = atomicAdd(&s.gathered, 1u);
    if (at < kGather) s.own[at] = token_key(x, id);
  }
  __syncthreads();
  uint64_t all[2][kRowCluster], total = 0;
  row.exchange(s.gathered, 0, all);
#pragma unroll
  for (int r = 0; r < kRowCluster; ++r) total += all[0][r];
  if (total > kGather) return false;
  uint32_t offset = 0;
#pragma unroll
  for (int r = 0; r < kRowCluster; ++r) {
    const uint32_t n = static_cast<uint32_t>(all[0][r]);
    if (threadIdx.x < n) s.all[offset + threadIdx.x] = cluster_load(s.own + threadIdx.x, r);
    offset += n;
  }
  __syncthreads();
  const bool has = threadIdx.x < total;
  const uint64_t key = has ? s.all[threadIdx.x] : 0, mass = !has ? 0 : kWeighted ? weights.of(key_logit(key)) : 1;
  if (has) s.mass[threadIdx.x] = mass;
  __syncthreads();
  for (uint32_t i = 0; has && i < total; ++i) before += s.all[i] > key ? s.mass[i] : 0;
  if (has && !reached(before) && reached(before + mass)) s.found[0] = key;
  __syncthreads();
  return true;
}

/// The last kept token among the tokens that `keep` keeps, if the share is a running count of `wanted` tokens; all
/// blocks call it.
template <bool kWeighted>
__device__ __forceinline__ Edge search_edge(Row& row, Edge keep, float top, float per_unit, const Weights& weights,
                                            float top_p, uint64_t top_k) {
  RowShared& s = row.s;
  Narrowed left = {keep, top, per_unit, 0, 0, 0, 0};
  double share = 0;
  uint64_t before = 0;
  const auto reached = [&](uint64_t sum) { return kWeighted ? __ull2double_rn(sum) >= share : sum >= top_k; };
  // The last pass determines a whole key, so gathering succeeds at the latest then.
  for (;;) {
    fill_bins<kWeighted>(row, left, weights);
    if (kWeighted && left.passes == 0) {
      const uint64_t all = row.block_sum(threadIdx.x < kBins ? s.totals[threadIdx.x] : 0);
      share = __dmul_rn(static_cast<double>(top_p), __ull2double_rn(all));
    }
    __syncthreads();
    if (threadIdx.x < 32) find_bin(s, before, reached);
    __syncthreads();
    const uint32_t bin = static_cast<uint32_t>(s.found[0]);
    before = s.found[1];
    const bool few = left.passes > 0 || (!kWeighted && bin > 0 && s.totals[bin] <= kGather);
    left.narrow(bin);
    if (few && gather_edge<kWeighted>(row, left, weights, before, reached)) break;
  }
  const uint64_t key = s.found[0];
  return key == 0 ? keep : Edge{key_logit(key), key_token(key)};
}

/// The last of the top `top_k` tokens; all blocks call it.
__device__ __forceinline__ Edge top_k_edge(Row& row, float top, uint64_t top_k, const Weights& weights) {
  constexpr float kPerUnit = 16.f;  // the likeliest tokens are within 16 of the first
  return search_edge<false>(row, kKeepAll, top, kPerUnit, weights, 0.f, top_k);
}

/// The last kept token, among the tokens that `keep` keeps, if the share is `top_p` of their total weight; all blocks
/// call it.
__device__ __forceinline__ Edge top_p_edge(Row& row, Edge keep, float top, float temperature, const Weights& weights,
                                           float top_p) {
  return search_edge<true>(row, keep, top, kBins / (30.f * temperature), weights, top_p, 0);
}

}  // namespace moe
