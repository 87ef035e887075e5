// Per-head RMS norm of q and k, rotary embedding and KV cache write, of any dtype and even head size: a warp per head.
//
// Rows of one launch must name different slots (on the CPU the later row wins; a step never repeats a slot).
#include "any/any.cuh"
#include "attention/args.cuh"

namespace moe {
namespace {

constexpr int kWarps = 8;
constexpr uint32_t kNoSlot = 0xffffffffu;

template <class T, class S, class Q, class W>
struct RopeArgs {
  const S* qkv;     // [tokens, qkv_row]
  const W* q_norm;  // [head_dim] or null
  const W* k_norm;
  const float* cos;  // [angle_rows, head_dim / 2]
  const float* sin;
  const uint32_t* angle_index;  // [tokens] row of cos and sin, or null: token i has row i
  const uint32_t* slots;        // [tokens]
  Q* q_out;                     // [tokens, heads, head_dim]
  T* k_cache;                   // [.., kv_heads, block_size, head_dim]
  T* v_cache;
  float eps;
  int tokens, heads, kv_heads, head_dim, block_size, qkv_row;
  uint32_t num_slots;
};

/// to = rope(norm(x)) by one warp.
template <class T, class S, class Q, class W, class O>
__device__ __forceinline__ void norm_rope(const RopeArgs<T, S, Q, W>& a, const S* x, const W* weight, size_t angles,
                                          O* to) {
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

template <class T, class S, class Q, class W>
__global__ void __launch_bounds__(kWarps * 32) qk_norm_rope(const RopeArgs<T, S, Q, W> a) {
  pdl_wait();
  const int all = a.heads + 2 * a.kv_heads, token = blockIdx.x;
  const int head = blockIdx.y * kWarps + threadIdx.x / 32;
  if (head >= all) return;
  const S* x = a.qkv + static_cast<size_t>(token) * a.qkv_row + static_cast<size_t>(head) * a.head_dim;
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

template <class T, class S, class Q, class W>
cudaError_t launch_rope(const QkNormRopeArgs& c, void* stream) {
  const RopeArgs<T, S, Q, W> a = {static_cast<const S*>(c.qkv),
                                  static_cast<const W*>(c.q_norm),
                                  static_cast<const W*>(c.k_norm),
                                  c.cos,
                                  c.sin,
                                  c.angle_index,
                                  c.slots,
                                  static_cast<Q*>(c.q_out),
                                  static_cast<T*>(c.k_cache),
                                  static_cast<T*>(c.v_cache),
                                  c.eps,
                                  c.tokens,
                                  c.heads,
                                  c.kv_heads,
                                  c.head_dim,
                                  c.block_size,
                                  c.qkv_row,
                                  static_cast<uint32_t>(c.num_slots)};
  const int64_t all = c.heads + 2 * static_cast<int64_t>(c.kv_heads);
  const dim3 grid(c.tokens, static_cast<unsigned>(ceil_div(all, kWarps)));
  return launch(qk_norm_rope<T, S, Q, W>, {grid, dim3(kWarps * 32), stream}, a);
}

}  // namespace
}  // namespace moe

/// Computes q_out and writes k and v to the cache's slots, from qkv. `stream_dtype`, `q_dtype` and `norm_dtype` are
/// `dtype` or f32.
extern "C" int moe_any_qk_norm_rope_cache(const moe::QkNormRopeArgs* args, void* stream) {
  using namespace moe;
  const QkNormRopeArgs& c = *args;
  if (c.tokens < 0 || c.heads < 0 || c.kv_heads < 0 || c.head_dim <= 0 || c.head_dim % 2 != 0 || c.block_size <= 0 ||
      c.num_slots < 0 || c.num_slots > kNoSlot)
    return cudaErrorInvalidValue;
  const int64_t all = c.heads + 2 * static_cast<int64_t>(c.kv_heads);
  if (all > 65535 * kWarps || all * c.head_dim > c.qkv_row) return cudaErrorInvalidValue;
  if (c.tokens == 0 || all == 0) return cudaSuccess;
  return with_stream(c.dtype, c.stream_dtype, [&](auto t, auto s) {
    using T = typename decltype(t)::type;
    using S = typename decltype(s)::type;
    return with_stream(c.dtype, c.q_dtype, [&](auto, auto q) {
      using Q = typename decltype(q)::type;
      return with_stream(c.dtype, c.norm_dtype, [&](auto, auto w) {
        using W = typename decltype(w)::type;
        return launch_rope<T, S, Q, W>(c, stream);
      });
    });
  });
}
