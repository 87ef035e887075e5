// Per-head RMS norm of q and k, rotary embedding and KV cache write, of any dtype and even head size: a warp per head.
//
// Rows of one launch must name different slots (the CPU lets the later row win; a step never repeats one).
#include "any/any.cuh"

namespace moe {
namespace {

constexpr int kWarps = 8;
constexpr uint32_t kNoSlot = 0xffffffffu;

template <class T, class S, class Q>
struct RopeArgs {
  const S* qkv;                // [tokens, (heads + 2 kv_heads) head_dim]
  const T* q_norm;             // [head_dim] or null
  const T* k_norm;
  const float* cos;            // [angle_rows, head_dim / 2]
  const float* sin;
  const uint32_t* angle_index; // [tokens] row of cos and sin, or null: the token's own
  const uint32_t* slots;       // [tokens]
  Q* q_out;                    // [tokens, heads, head_dim]
  T* k_cache;                  // [.., kv_heads, block_size, head_dim]
  T* v_cache;
  float eps;
  int tokens, heads, kv_heads, head_dim, block_size;
  uint32_t num_slots;
};

/// to = rope(norm(x)) by one warp.
template <class T, class S, class Q, class O>
__device__ __forceinline__ void norm_rope(const RopeArgs<T, S, Q>& a, const S* x, const T* weight, size_t angles, O* to) {
  const int lane = threadIdx.x % 32, half = a.head_dim / 2;
  float scale = 1;
  if (weight != nullptr) {
    float squares = 0;
    for (int i = lane; i < a.head_dim; i += 32) squares += widen(x[i]) * widen(x[i]);
    scale = 1.f / sqrtf(warp_sum(squares) / a.head_dim + a.eps);
  }
  for (int i = lane; i < half; i += 32) {
    float low = widen(x[i]), high = widen(x[i + half]);
    if (weight != nullptr) low *= scale * widen(weight[i]), high *= scale * widen(weight[i + half]);
    const float cosine = a.cos[angles + i], sine = a.sin[angles + i];
    to[i] = narrow<O>(low * cosine - high * sine);
    to[i + half] = narrow<O>(high * cosine + low * sine);
  }
}

template <class T, class S, class Q>
__global__ void __launch_bounds__(kWarps * 32) qk_norm_rope(const RopeArgs<T, S, Q> a) {
  pdl_wait();
  const int all = a.heads + 2 * a.kv_heads, token = blockIdx.x;
  const int head = blockIdx.y * kWarps + threadIdx.x / 32;
  if (head >= all) return;
  const S* x = a.qkv + (static_cast<size_t>(token) * all + head) * a.head_dim;
  const size_t angles = static_cast<size_t>(a.angle_index ? a.angle_index[token] : token) * (a.head_dim / 2);
  if (head < a.heads) {
    norm_rope(a, x, a.q_norm, angles, a.q_out + (static_cast<size_t>(token) * a.heads + head) * a.head_dim);
    return;
  }
  const uint32_t slot = a.slots[token];
  if (slot == kNoSlot || slot >= a.num_slots) return;
  const int kv = (head - a.heads) % a.kv_heads;
  const size_t block = slot / a.block_size, offset = slot % a.block_size;
  const size_t at = ((block * a.kv_heads + kv) * a.block_size + offset) * a.head_dim;
  if (head < a.heads + a.kv_heads) {
    norm_rope(a, x, a.k_norm, angles, a.k_cache + at);
    return;
  }
  for (int i = threadIdx.x % 32; i < a.head_dim; i += 32) a.v_cache[at + i] = narrow<T>(widen(x[i]));
}

}  // namespace
}  // namespace moe

/// | argument | shape, dtype |
/// |---|---|
/// | `qkv` | [tokens, (heads + 2 kv_heads) head_dim] of `stream_dtype`: `dtype` or f32 |
/// | `q_norm`, `k_norm` | [head_dim] of `dtype`; null = no norm |
/// | `cos`, `sin` | [.., head_dim / 2] f32: row `angle_index[t]` (null: row t) holds token t's |
/// | `slots` | [tokens] u32, distinct; 0xffffffff, or one from num_slots on, writes nothing to the cache |
/// | `q_out` | [tokens, heads, head_dim] of `q_dtype`: `dtype` or f32 |
/// | `k_cache`, `v_cache` | [num_slots / block_size, kv_heads, block_size, head_dim] of `dtype` |
extern "C" int moe_any_qk_norm_rope_cache(const void* qkv, const void* q_norm, const void* k_norm, float eps,
                                          const void* cos, const void* sin, const void* angle_index, const void* slots,
                                          void* q_out, void* k_cache, void* v_cache, int dtype, int stream_dtype,
                                          int q_dtype, int tokens, int heads, int kv_heads, int head_dim, int block_size,
                                          int64_t num_slots, void* stream) {
  using namespace moe;
  if (tokens < 0 || heads < 0 || kv_heads < 0 || head_dim <= 0 || head_dim % 2 != 0 || block_size <= 0 ||
      num_slots < 0 || num_slots > kNoSlot)
    return cudaErrorInvalidValue;
  const int64_t all = heads + 2 * static_cast<int64_t>(kv_heads);
  if (all > 65535 * kWarps) return cudaErrorInvalidValue;
  if (tokens == 0 || all == 0) return cudaSuccess;
  if (q_dtype != dtype && q_dtype != 0) return cudaErrorInvalidValue;
  return with_stream(dtype, stream_dtype, [&](auto t, auto s) {
    using T = typename decltype(t)::type;
    using S = typename decltype(s)::type;
    const auto run = [&](auto q) {
      using Q = typename decltype(q)::type;
      const RopeArgs<T, S, Q> a = {static_cast<const S*>(qkv), static_cast<const T*>(q_norm),
                                   static_cast<const T*>(k_norm), static_cast<const float*>(cos),
                                   static_cast<const float*>(sin), static_cast<const uint32_t*>(angle_index),
                                   static_cast<const uint32_t*>(slots), static_cast<Q*>(q_out),
                                   static_cast<T*>(k_cache), static_cast<T*>(v_cache), eps, tokens, heads, kv_heads,
                                   head_dim, block_size, static_cast<uint32_t>(num_slots)};
      const dim3 grid(tokens, static_cast<unsigned>(ceil_div(all, kWarps)));
      return launch(qk_norm_rope<T, S, Q>, {grid, dim3(kWarps * 32), stream}, a);
    };
    return q_dtype == dtype ? run(t) : run(Type<float>{});
  });
}
