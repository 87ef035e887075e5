// Per-head RMS norm of q and k, rotary embedding and KV cache write, in one pass, for rows of any step.
//
// Bytes per token of Qwen3-30B-A3B: 20 KB of f32 qkv read (out of L2, where the product left them), 8 KB of q and
// 2 KB of k and v written. Bound by latency below some hundred tokens, by L2 above; arithmetic is nothing. One
// warp per head, so that the norm is a shuffle and a token's 40 heads spread over multiprocessors.
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
  const Head<D> gain = load_gain<D>(weight);
  pdl_wait();
  if (head >= all) return;
  if (head >= a.heads && slot == kNoSlot) return;
  Head<D> h[1] = {load_head<D>(a.qkv + (static_cast<size_t>(token) * all + head) * D)};
  const int kv = head - a.heads;
  if (kv >= a.cache.heads) {
    store_head<D>(h[0], a.cache.v + a.cache.slot_row(slot, kv - a.cache.heads) * D);
    return;
  }
  norm_heads<D, 1>(h, {gain}, {weight != nullptr}, a.eps);
  rotate_head<D>(h[0], angle);
  bf16* to = kv < 0 ? a.q_out + (static_cast<size_t>(token) * a.heads + head) * D
                    : a.cache.k + a.cache.slot_row(slot, kv) * D;
  store_head<D>(h[0], to);
}

}  // namespace
}  // namespace moe

using moe::bf16;

/// q_out [tokens, heads, head_dim] bf16 and the slots of k_cache, v_cache [.., kv_heads, block_size, head_dim] from
/// qkv [tokens, (heads + 2 kv_heads) head_dim] f32. Norm weights [head_dim] may be null; `angle_index` too; slot
/// u32::MAX writes nothing to the cache. head_dim is 64 or 128.
extern "C" int moe_qk_norm_rope_cache(const float* qkv, const bf16* q_norm, const bf16* k_norm, float eps,
                                      const float* cos, const float* sin, const uint32_t* angle_index,
                                      const uint32_t* slots, bf16* q_out, bf16* k_cache, bf16* v_cache, int tokens,
                                      int heads, int kv_heads, int head_dim, int block_size, void* stream) {
  using namespace moe;
  if (tokens < 0 || tokens > 65535 || heads <= 0 || kv_heads <= 0 || block_size <= 0) return cudaErrorInvalidValue;
  if (tokens == 0) return cudaSuccess;
  const Args a = {qkv, q_norm, k_norm, eps, {cos, sin, angle_index}, slots, q_out,
                  {k_cache, v_cache, kv_heads, block_size}, heads};
  const Launch l = {dim3(ceil_div(heads + 2 * kv_heads, kWarps), tokens), dim3(kWarps * 32), stream};
  if (head_dim == 128) return launch(qk_norm_rope_kernel<128>, l, a);
  if (head_dim == 64) return launch(qk_norm_rope_kernel<64>, l, a);
  return cudaErrorInvalidValue;
}
