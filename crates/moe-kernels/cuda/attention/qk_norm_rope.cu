// Per-head RMS norm of q and k, rotary embedding and KV cache write, in one pass, for rows of any step.
//
// Bytes per token of Qwen3-30B-A3B: 20 KB of f32 qkv read, 8 KB of q and 2 KB of k and v written: latency below some
// hundred tokens, memory above (8,192 tokens: 55 us at 4.59 TB/s, 63 measured); arithmetic is nothing. Half a warp per
// head, so that lanes move 16 bytes at a time and a token's 40 heads spread over SMs.
//
// q is rounded to bf16 here, because it is only used as a tensor-core operand; k and v are rounded as they are stored
// in the cache. Rows with one token need no launch of this kernel: attention_decode does the same work in its prologue.
//
// Rows of one launch must name different slots (on the CPU the later row wins; a step never repeats a slot).
#include "attention/head.cuh"

namespace moe {
namespace {

constexpr int kWarps = 4;
constexpr int kLanes = 16;        // lanes of a head
constexpr int kManyTokens = 512;  // from this number on, bytes count more than latency

struct Args {
  const float* qkv;
  const void* q_norm;  // null: no norm
  const void* k_norm;
  float eps;
  Angles angles;
  const uint32_t* slots;
  uint32_t num_slots;  // slots from this one on are not in the cache
  bf16* q_out;
  KvCache cache;
  int heads;
  int qkv_row;  // floats from one row of qkv to the next
};

/// What a lane holds of a head, of a norm's weight, or of cosines and sines: elements lane * kPer + i of the lower half
/// and of the upper half. These are the elements of two lanes of a `Head`.
template <int D>
struct Part {
  static constexpr int kPer = D / 2 / kLanes;
  float low[kPer], high[kPer];
};

/// kPer consecutive floats.
template <int kPer>
struct alignas(4 * kPer) Floats {
  float value[kPer];
};

/// This lane's floats of a half of a head in shared memory.
template <int kPer>
__device__ __forceinline__ Floats<kPer> load_shared(const float* half) {
  return reinterpret_cast<const Floats<kPer>*>(half)[threadIdx.x % kLanes];
}

/// This lane's floats of a half of a head in global memory. The load bypasses L1, which may hold older values.
template <int kPer>
__device__ __forceinline__ Floats<kPer> load_global(const float* half) {
  Floats<kPer> v;
  if constexpr (kPer == 8) {
    const float4* from = reinterpret_cast<const float4*>(half) + threadIdx.x % kLanes * 2;
    const float4 x = __ldcg(from), y = __ldcg(from + 1);
    v = {{x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w}};
  } else if constexpr (kPer == 4) {
    const float4 x = __ldcg(reinterpret_cast<const float4*>(half) + threadIdx.x % kLanes);
    v = {{x.x, x.y, x.z, x.w}};
  } else {
    const float2 x = __ldcg(reinterpret_cast<const float2*>(half) + threadIdx.x % kLanes);
    v = {{x.x, x.y}};
  }
  return v;
}

template <int D>
__device__ __forceinline__ Part<D> part_of(const Floats<Part<D>::kPer>& low, const Floats<Part<D>::kPer>& high) {
  Part<D> p;
#pragma unroll
  for (int i = 0; i < Part<D>::kPer; ++i) p.low[i] = low.value[i], p.high[i] = high.value[i];
  return p;
}

/// Two, four or eight bf16 as words.
template <int kPer>
struct alignas(2 * kPer) Words {
  uint32_t word[kPer / 2];
};

template <int D, bool kF32>
__device__ __forceinline__ Part<D> load_norm_part(const void* weight) {
  constexpr int kPer = Part<D>::kPer;
  Part<D> p;
#pragma unroll
  for (int i = 0; i < kPer; ++i) p.low[i] = p.high[i] = 1.f;
  if (weight == nullptr) return p;
  if constexpr (kF32) {
    const float* from = static_cast<const float*>(weight);
    return part_of<D>(load_global<kPer>(from), load_global<kPer>(from + D / 2));
  }
  const bf16* from = static_cast<const bf16*>(weight) + threadIdx.x % kLanes * kPer;
  const Words<kPer> low = *reinterpret_cast<const Words<kPer>*>(from);
  const Words<kPer> high = *reinterpret_cast<const Words<kPer>*>(from + D / 2);
#pragma unroll
  for (int i = 0; i < kPer; i += 2) {
    const float2 l = unpack_bf16(low.word[i / 2]), h = unpack_bf16(high.word[i / 2]);
    p.low[i] = l.x, p.low[i + 1] = l.y, p.high[i] = h.x, p.high[i + 1] = h.y;
  }
  return p;
}

template <int D>
__device__ __forceinline__ void store_part(const Part<D>& p, bf16* to) {
  constexpr int kPer = Part<D>::kPer;
  Words<kPer> low, high;
#pragma unroll
  for (int i = 0; i < kPer; i += 2) {
    low.word[i / 2] = pack_bf16(p.low[i], p.low[i + 1]);
    high.word[i / 2] = pack_bf16(p.high[i], p.high[i + 1]);
  }
  to += threadIdx.x % kLanes * kPer;
  *reinterpret_cast<Words<kPer>*>(to) = low;
  *reinterpret_cast<Words<kPer>*>(to + D / 2) = high;
}

/// 1 / rms(x), added in the same order as in norm_heads, which has 32 lanes: a lane here stands for two neighbours
/// there.
template <int D>
__device__ __forceinline__ float inverse_rms(const Part<D>& p, float eps) {
  constexpr int kPairs = Part<D>::kPer / 2;
  float squares[2] = {};
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = n * kPairs; i < (n + 1) * kPairs; ++i) squares[n] += pair_square(p.low[i], p.high[i]);
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
#pragma unroll
    for (float& x : squares) x += __shfl_xor_sync(0xffffffffu, x, step);
  }
  return 1.f / sqrtf((squares[0] + squares[1]) / D + eps);
}

/// Norm, rotation and stores of a head; whole warps.
template <int D>
__device__ __forceinline__ void finish_head(const Args& a, int token, int head, uint32_t slot, Part<D> p,
                                            const Part<D>& q_weight, const Part<D>& k_weight, const Part<D>& angle) {
  const int kv = head - a.heads;
  const bool is_q = kv < 0, is_k = !is_q && kv < a.cache.heads;
  const float inverse = inverse_rms<D>(p, a.eps);  // all lanes call it, because it shuffles
  const float scale = (is_q ? a.q_norm : a.k_norm) != nullptr ? inverse : 1.f;
  if (is_q || is_k) {
#pragma unroll
    for (int i = 0; i < Part<D>::kPer; ++i) {
      p.low[i] *= scale * (is_q ? q_weight.low[i] : k_weight.low[i]);
      p.high[i] *= scale * (is_q ? q_weight.high[i] : k_weight.high[i]);
      rotate_pair(p.low[i], p.high[i], angle.low[i], angle.high[i]);
    }
  }
  if (is_q) {
    store_part<D>(p, a.q_out + (static_cast<size_t>(token) * a.heads + head) * D);
  } else if (slot < a.num_slots && kv < 2 * a.cache.heads) {
    bf16* cache = is_k ? a.cache.k : a.cache.v;
    store_part<D>(p, cache + a.cache.slot_row(slot, is_k ? kv : kv - a.cache.heads) * D);
  }
}

/// A warp computes two heads. With kMany it computes four, which come through shared memory. More of them can then be
/// in flight than with L1, which is small if most of it is shared memory (8,192 tokens: 63 us instead of 72).
/// kF32: whether the norms' weights are f32; otherwise they are bf16.
template <int D, bool kMany, bool kF32>
__global__ void __launch_bounds__(kWarps * 32) qk_norm_rope_kernel(const __grid_constant__ Args a) {
  constexpr int kPer = Part<D>::kPer, kPairs = kMany ? 2 : 1;
  pdl_launch_dependents();
  const int all = a.heads + 2 * a.cache.heads, token = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int pair = 2 * (blockIdx.x * kWarps + warp), step = 2 * gridDim.x * kWarps, own = pair + lane / kLanes;
  const uint32_t slot = a.slots[token];
  const size_t row = static_cast<size_t>(a.angles.index ? a.angles.index[token] : token) * (D / 2);
  const Part<D> angle = part_of<D>(load_global<kPer>(a.angles.cos + row), load_global<kPer>(a.angles.sin + row));
  const Part<D> q_weight = load_norm_part<D, kF32>(kMany || own < a.heads ? a.q_norm : a.k_norm);
  const Part<D> k_weight = kMany ? load_norm_part<D, kF32>(a.k_norm) : q_weight;
  pdl_wait();
  const float* from = a.qkv + static_cast<size_t>(token) * a.qkv_row;
  if constexpr (kMany) {
    __shared__ __align__(16) float staged[kWarps][kPairs][2 * D];
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int first = pair + n * step;
#pragma unroll
      for (int at = 4 * lane; at < 2 * D; at += 4 * 32)
        if (first + at / D < all) cp_async16(staged[warp][n] + at, from + static_cast<size_t>(first) * D + at);
      cp_async_commit();
    }
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      if (n == 0) cp_async_wait<kPairs - 1>();
      else cp_async_wait<0>();
      __syncwarp();
      const float* head = staged[warp][n] + lane / kLanes * D;
      const Part<D> p = part_of<D>(load_shared<kPer>(head), load_shared<kPer>(head + D / 2));
      finish_head(a, token, own + n * step, slot, p, q_weight, k_weight, angle);
    }
  } else {
    const float* head = from + static_cast<size_t>(min(own, all - 1)) * D;
    const Part<D> p = part_of<D>(load_global<kPer>(head), load_global<kPer>(head + D / 2));
    finish_head(a, token, own, slot, p, q_weight, k_weight, angle);
  }
}

template <int D, bool kF32>
cudaError_t run(const Args& a, int tokens, void* stream) {
  const bool many = tokens >= kManyTokens;
  const int blocks = ceil_div(a.heads + 2 * a.cache.heads, kWarps * (many ? 4 : 2));
  const Launch l = {dim3(blocks, tokens), dim3(kWarps * 32), stream};
  return many ? launch(qk_norm_rope_kernel<D, true, kF32>, l, a) : launch(qk_norm_rope_kernel<D, false, kF32>, l, a);
}

template <bool kF32>
cudaError_t run(const Args& a, int head_dim, int tokens, void* stream) {
  switch (head_dim) {
    case 256: return run<256, kF32>(a, tokens, stream);
    case 128: return run<128, kF32>(a, tokens, stream);
    case 64: return run<64, kF32>(a, tokens, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace moe

/// Writes q_out and the cache's slots from qkv. head_dim is 64, 128 or 256.
extern "C" int moe_qk_norm_rope_cache(const moe::QkNormRopeArgs* args, void* stream) {
  using namespace moe;
  const QkNormRopeArgs& c = *args;
  if (c.tokens < 0 || c.tokens > 65535 || c.heads <= 0 || c.kv_heads <= 0 || c.block_size <= 0 ||
      c.dtype != Dtype::kBf16 || c.stream_dtype != Dtype::kF32 || c.q_dtype != Dtype::kBf16 || c.num_slots < 0 ||
      c.num_slots > kNoSlot || (c.norm_dtype != Dtype::kBf16 && c.norm_dtype != Dtype::kF32) || !holds_qkv(c))
    return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  const Args a = {static_cast<const float*>(c.qkv),
                  c.q_norm,
                  c.k_norm,
                  c.eps,
                  {c.cos, c.sin, c.angle_index},
                  c.slots,
                  static_cast<uint32_t>(c.num_slots),
                  static_cast<bf16*>(c.q_out),
                  cache_of(c.k_cache, c.v_cache, c.kv_heads, c.block_size),
                  c.heads,
                  c.qkv_row};
  return c.norm_dtype == Dtype::kF32 ? run<true>(a, c.head_dim, c.tokens, stream)
                                     : run<false>(a, c.head_dim, c.tokens, stream);
}
