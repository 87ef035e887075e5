// Arguments of attention and of what precedes it; `any/` takes the same.
#pragma once

#include "codes.cuh"

namespace moe {

/// Head norm, rotary embedding and cache write. The kernels of `attention/` take q_out and the caches in bf16 and qkv
/// in f32; the kernel of `any/` takes every dtype.
struct QkNormRopeArgs {
  const void* qkv;              // [tokens, (heads + 2 kv_heads) head_dim] of `stream_dtype`
  const void* q_norm;           // [head_dim] of `dtype`, or null: no norm
  const void* k_norm;           // as q_norm
  float eps;                    // of the norms
  const float* cos;             // [.., head_dim / 2]
  const float* sin;             // [.., head_dim / 2]
  const uint32_t* angle_index;  // [tokens] each token's row of cos and sin; null: its own number
  const uint32_t* slots;        // [tokens] distinct; u32::MAX writes nothing to the cache
  void* q_out;                  // [tokens, heads, head_dim] of `q_dtype`
  void* k_cache;                // [num_slots / block_size, kv_heads, block_size, head_dim] of `dtype`
  void* v_cache;                // as k_cache
  Dtype dtype, stream_dtype, q_dtype;
  int tokens, heads, kv_heads, head_dim, block_size;
  int64_t num_slots;  // a slot from there on writes nothing to the cache
};

/// Causal attention of any rows over the paged KV cache, which holds their own keys and values already.
struct PagedAttentionArgs {
  const void* q;                    // [tokens, heads, head_dim] of `q_dtype`
  const void* k_cache;              // [num_blocks, kv_heads, block_size, head_dim] of `dtype`
  const void* v_cache;              // as k_cache
  const uint32_t* query_start_loc;  // [sequences + 1] ascending; rows before the first are left alone, rows behind the
                                    // last become zeros
  const uint32_t* positions;        // [tokens] ascending within a sequence
  const uint32_t* block_tables;     // [sequences, max_blocks]
  void* out;                        // [tokens, heads * head_dim] of `dtype`
  Dtype dtype, q_dtype;
  int tokens, sequences, max_blocks, heads, kv_heads, head_dim, num_blocks, block_size;
  float scale;         // of the scores
  int window;          // positions that a row sees, itself included; 0 = all
  int invariant;       // whether a row's bits must not depend on `tokens` and `sequences`
  uint32_t* counters;  // [2] zero before the first use, of moe_attention_prefill_wgmma; launches that share it must not
                       // overlap
};

/// One new token per sequence, from qkv to attention. A row with slot u32::MAX is padding: zeros out, nothing written.
struct AttentionDecodeArgs {
  const float* qkv;  // [rows, (heads + 2 kv_heads) head_dim]
  const void* q_norm;
  const void* k_norm;
  float eps;
  const float* cos;
  const float* sin;
  const uint32_t* angle_index;
  const uint32_t* slots;         // [rows]; these seven as in QkNormRopeArgs, bf16
  const uint32_t* positions;     // [rows] of the new tokens
  const uint32_t* block_tables;  // [rows, max_blocks]
  int max_blocks;
  void* k_cache;    // [.., kv_heads, block_size, head_dim] bf16
  void* v_cache;    // as k_cache
  void* out;        // [rows, heads * head_dim] bf16
  void* workspace;  // moe_attention_decode_workspace bytes, zero before the first use
  int rows, heads, kv_heads, head_dim, block_size;
  float scale;
  int window;
  int splits;  // as moe_attention_decode_splits gives them
};

}  // namespace moe

extern "C" int moe_qk_norm_rope_cache(const moe::QkNormRopeArgs* args, void* stream);
extern "C" int moe_any_qk_norm_rope_cache(const moe::QkNormRopeArgs* args, void* stream);
extern "C" int moe_attention_prefill(const moe::PagedAttentionArgs* args, void* stream);
extern "C" int moe_attention_prefill_wgmma(const moe::PagedAttentionArgs* args, void* stream);
extern "C" int moe_any_attention(const moe::PagedAttentionArgs* args, void* stream);
extern "C" int moe_attention_decode(const moe::AttentionDecodeArgs* args, void* stream);
