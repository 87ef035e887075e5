// One attention head of one token in a warp: RMS norm and rotary embedding, in f32.
#pragma once

#include "attention/args.cuh"
#include "ptx/common.cuh"
#include "ptx/ptx.cuh"

namespace moe {

/// Scores are multiplied by this, so that a softmax takes powers of two.
constexpr float kLog2E = 1.44269504088896341f;

/// Slot of a padding row: nothing is written to the cache.
constexpr uint32_t kNoSlot = 0xffffffffu;

/// Elements of a head that a lane holds: `low[i]` is element lane * kPairs + i, `high[i]` the one D / 2 later, so
/// that the two elements that a rotation mixes are in one lane.
template <int D>
struct Head {
  static constexpr int kPairs = D / 64;
  float low[kPairs], high[kPairs];
};

/// Sums of several values over the warp, their shuffles interleaved.
template <int kCount>
__device__ __forceinline__ void warp_sums(float (&v)[kCount]) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
#pragma unroll
    for (float& x : v) x += __shfl_xor_sync(0xffffffffu, x, step);
  }
}

/// Loads pairs from two places of D / 2 floats.
template <int D>
__device__ __forceinline__ Head<D> load_pairs(const float* low, const float* high) {
  const int at = threadIdx.x % 32 * Head<D>::kPairs;
  Head<D> h;
  if constexpr (Head<D>::kPairs == 2) {
    const float2 l = __ldcg(reinterpret_cast<const float2*>(low + at));
    const float2 u = __ldcg(reinterpret_cast<const float2*>(high + at));
    h = {{l.x, l.y}, {u.x, u.y}};
  } else {
    h = {{__ldcg(low + at)}, {__ldcg(high + at)}};
  }
  return h;
}

template <int D>
__device__ __forceinline__ Head<D> load_head(const float* x) {
  return load_pairs<D>(x, x + D / 2);
}

/// The weight of a norm; 1 if there is no norm.
template <int D>
__device__ __forceinline__ Head<D> load_norm_weight(const bf16* weight) {
  const int lane = threadIdx.x % 32;
  Head<D> h;
#pragma unroll
  for (int i = 0; i < Head<D>::kPairs; ++i) {
    h.low[i] = weight ? __bfloat162float(weight[lane * Head<D>::kPairs + i]) : 1.f;
    h.high[i] = weight ? __bfloat162float(weight[D / 2 + lane * Head<D>::kPairs + i]) : 1.f;
  }
  return h;
}

/// low^2 + high^2 and a rotation of the two, with roundings that are the same in every kernel.
__device__ __forceinline__ float pair_square(float low, float high) {
  return __fmaf_rn(high, high, __fmul_rn(low, low));
}

__device__ __forceinline__ void rotate_pair(float& low, float& high, float cos, float sin) {
  const float l = low, h = high;
  low = __fmaf_rn(l, cos, -__fmul_rn(h, sin));
  high = __fmaf_rn(h, cos, __fmul_rn(l, sin));
}

/// x / rms(x) * norm_weight for some heads at once, so that their reductions overlap; unchanged if not `normed`.
template <int D, int kCount>
__device__ __forceinline__ void norm_heads(Head<D> (&h)[kCount], const Head<D> (&norm_weight)[kCount],
                                           const bool (&normed)[kCount], float eps) {
  float squares[kCount] = {};
#pragma unroll
  for (int n = 0; n < kCount; ++n)
#pragma unroll
    for (int i = 0; i < Head<D>::kPairs; ++i) squares[n] += pair_square(h[n].low[i], h[n].high[i]);
  warp_sums(squares);
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const float scale = normed[n] ? 1.f / sqrtf(squares[n] / D + eps) : 1.f;
#pragma unroll
    for (int i = 0; i < Head<D>::kPairs; ++i) {
      h[n].low[i] *= scale * norm_weight[n].low[i];
      h[n].high[i] *= scale * norm_weight[n].high[i];
    }
  }
}

/// Rotate-half RoPE; `angle` holds cosines (low) and sines (high).
template <int D>
__device__ __forceinline__ void rotate_head(Head<D>& h, const Head<D>& angle) {
#pragma unroll
  for (int i = 0; i < Head<D>::kPairs; ++i) rotate_pair(h.low[i], h.high[i], angle.low[i], angle.high[i]);
}

template <int D>
__device__ __forceinline__ void round_head(Head<D>& h) {
#pragma unroll
  for (int i = 0; i < Head<D>::kPairs; ++i) {
    h.low[i] = __bfloat162float(__float2bfloat16_rn(h.low[i]));
    h.high[i] = __bfloat162float(__float2bfloat16_rn(h.high[i]));
  }
}

template <int D>
__device__ __forceinline__ void store_head(const Head<D>& h, bf16* to) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < Head<D>::kPairs; ++i) {
    to[lane * Head<D>::kPairs + i] = __float2bfloat16_rn(h.low[i]);
    to[D / 2 + lane * Head<D>::kPairs + i] = __float2bfloat16_rn(h.high[i]);
  }
}

/// The offset of the 16-byte chunk `c` of row `r`: eight rows of one column are in different banks.
template <int D>
__device__ __forceinline__ uint32_t swizzle(uint32_t r, uint32_t c) {
  return r * D * 2 + ((c ^ (r & 7)) << 4);
}

/// A paged KV cache of one layer, [num_blocks, heads, block_size, D].
struct KvCache {
  bf16* k;
  bf16* v;
  int heads;
  int block_size;

  /// Row of `position` of a sequence, in rows of D elements.
  __device__ __forceinline__ size_t row(const uint32_t* block_table, uint32_t position, int head) const {
    const uint32_t block = block_table[position / block_size];
    return (static_cast<size_t>(block) * heads + head) * block_size + position % block_size;
  }

  /// Row of a slot (block * block_size + offset).
  __device__ __forceinline__ size_t slot_row(uint32_t slot, int head) const {
    return (static_cast<size_t>(slot / block_size) * heads + head) * block_size + slot % block_size;
  }
};

inline KvCache cache_of(const void* k, const void* v, int heads, int block_size) {
  return {static_cast<bf16*>(const_cast<void*>(k)), static_cast<bf16*>(const_cast<void*>(v)), heads, block_size};
}

/// Angles of the tokens: row `index[token]` (or `token`, without an index) of two tables [.., D / 2] f32.
struct Angles {
  const float* cos;
  const float* sin;
  const uint32_t* index;

  template <int D>
  __device__ __forceinline__ Head<D> load(int token) const {
    const size_t at = static_cast<size_t>(index ? index[token] : token) * (D / 2);
    return load_pairs<D>(cos + at, sin + at);
  }
};

}  // namespace moe
