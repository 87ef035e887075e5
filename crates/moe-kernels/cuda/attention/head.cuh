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
  if constexpr (Head<D>::kPairs == 4) {
    const float4 l = __ldcg(reinterpret_cast<const float4*>(low + at));
    const float4 u = __ldcg(reinterpret_cast<const float4*>(high + at));
    h = {{l.x, l.y, l.z, l.w}, {u.x, u.y, u.z, u.w}};
  } else if constexpr (Head<D>::kPairs == 2) {
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

/// The weights [head_dim] of a norm: bf16, or f32 in a model that adds 1 to what its checkpoint stores.
struct NormWeight {
  const void* data;  // null: there is no norm
  bool in_f32;

  __device__ __forceinline__ float at(int i) const {
    return in_f32 ? static_cast<const float*>(data)[i] : __bfloat162float(static_cast<const bf16*>(data)[i]);
  }
};

/// The weight of a norm; 1 if there is no norm.
template <int D>
__device__ __forceinline__ Head<D> load_norm_weight(const NormWeight& weight) {
  const int first = threadIdx.x % 32 * Head<D>::kPairs;
  const bool normed = weight.data != nullptr;
  Head<D> h;
#pragma unroll
  for (int i = 0; i < Head<D>::kPairs; ++i) {
    h.low[i] = normed ? weight.at(first + i) : 1.f;
    h.high[i] = normed ? weight.at(D / 2 + first + i) : 1.f;
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

/// Gates of the values that heads attend to: a value of a row is rounded, scaled by the sigmoid of its gate, and
/// rounded again, as by moe_any_sigmoid_gate.
struct Gates {
  const float* first;  // of the first row's first value; null: there are none
  int row;             // floats from one row to the next

  __device__ __forceinline__ bool any() const { return first != nullptr; }
  /// Where the gate of a row's value is.
  __device__ __forceinline__ const float* at(int token, int column) const {
    return first + static_cast<size_t>(token) * row + column;
  }
  static __device__ __forceinline__ float scaled(float x, float gate) {
    return __bfloat162float(__float2bfloat16_rn(x)) * (1.f / (1.f + expf(-gate)));
  }
};

/// The gates of `width` values a row, which are the last ones of rows of `row` floats.
inline Gates gates_of(const float* rows, int row, int width) {
  return {rows == nullptr ? nullptr : rows + (row - width), row};
}

/// The heads whose kernels have gates.
constexpr int kGatedHead = 256;

/// Whether gates fit the kernels: only kernels of some heads have them.
inline bool fits_gates(const float* rows, int row, int heads, int head_dim) {
  return rows == nullptr || (head_dim == kGatedHead && heads * static_cast<int64_t>(head_dim) <= row && row % 4 == 0);
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

/// Whether rows of qkv hold q, k and v, and begin at multiples of 16 bytes.
template <class Args>
bool holds_qkv(const Args& c) {
  return (c.heads + 2 * static_cast<int64_t>(c.kv_heads)) * c.head_dim <= c.qkv_row && c.qkv_row % 4 == 0;
}

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
