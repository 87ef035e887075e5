// Per-head RMS norm of q and k, rotary embedding and KV cache write, in one pass, for rows of any step.
//
// Bytes per token of Qwen3-30B-A3B: 20 KB of f32 qkv read (out of L2, where the product left them), 8 KB of q and
// 2 KB of k and v written. Bound by latency below some hundred tokens, by L2 above; arithmetic is nothing. One
// warp per head, so that the norm is a shuffle and a token's 40 heads spread over SMs.
//
// q is rounded to bf16 here, its only use being a tensor-core operand; k and v are rounded as they enter the
// cache. One-token rows need no launch of this kernel: attention_decode does the same work in its prologue.
//
// Rows of one launch must name different slots (the CPU lets the later row win; a step never repeats one).
#include "attention/head.cuh"

namespace moe {
namespace {

constexpr int kWarps = 4;

struct Args {
  const float* qkv;
  const bf16* q_norm;
  const bf16* k_norm;
  float eps;
  Angles angles;
  const uint32_t* slots;
  bf16* q_out;
  KvCache cache;
  int heads;
};

template <int D>
__global__ void __launch_bounds__(kWarps * 32) qk_norm_rope_kernel(Args a) {
  pdl_launch_dependents();
  const int all = a.heads + 2 * a.cache.heads, token = blockIdx.y;
  const int head = blockIdx.x * kWarps + threadIdx.x / 32;
  const uint32_t slot = a.slots[token];
  const Head<D> angle = a.angles.load<D>(token);
  const bf16* weight = head < a.heads ? a.q_norm : a.k_norm;
  const Head<D> norm_weight = load_norm_weight<D>(weight);
  pdl_wait();
  if (head >= all) return;
  if (head >= a.heads && slot == kNoSlot) return;
  Head<D> h[1] = {load_head<D>(a.qkv + (static_cast<size_t>(token) * all + head) * D)};
  const int kv = head - a.heads;
  if (kv >= a.cache.heads) {
    store_head<D>(h[0], a.cache.v + a.cache.slot_row(slot, kv - a.cache.heads) * D);
    return;
  }
  norm_heads<D, 1>(h, {norm_weight}, {weight != nullptr}, a.eps);
  rotate_head<D>(h[0], angle);
  bf16* to =
      kv < 0 ? a.q_out + (static_cast<size_t>(token) * a.heads + head) * D : a.cache.k + a.cache.slot_row(slot, kv) * D;
  store_head<D>(h[0], to);
}

}  // namespace
}  // namespace moe

/// q_out and the cache's slots from qkv. head_dim is 64 or 128.
extern "C" int moe_qk_norm_rope_cache(const moe::QkNormRopeArgs* args, void* stream) {
  using namespace moe;
  const QkNormRopeArgs& c = *args;
  if (c.tokens < 0 || c.tokens > 65535 || c.heads <= 0 || c.kv_heads <= 0 || c.block_size <= 0 ||
      c.dtype != Dtype::kBf16 || c.stream_dtype != Dtype::kF32 || c.q_dtype != Dtype::kBf16)
    return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  const Args a = {static_cast<const float*>(c.qkv),
                  static_cast<const bf16*>(c.q_norm),
                  static_cast<const bf16*>(c.k_norm),
                  c.eps,
                  {c.cos, c.sin, c.angle_index},
                  c.slots,
                  static_cast<bf16*>(c.q_out),
                  cache_of(c.k_cache, c.v_cache, c.kv_heads, c.block_size),
                  c.heads};
  const Launch l = {dim3(ceil_div(c.heads + 2 * c.kv_heads, kWarps), c.tokens), dim3(kWarps * 32), stream};
  if (c.head_dim == 128) return launch(qk_norm_rope_kernel<128>, l, a);
  if (c.head_dim == 64) return launch(qk_norm_rope_kernel<64>, l, a);
  return cudaErrorInvalidValue;
}
