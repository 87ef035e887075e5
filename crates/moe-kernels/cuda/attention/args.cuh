// Arguments of attention and of the ops before it; the kernels of `any/` take the same arguments.
#pragma once

#include "codes.cuh"

namespace moe {

/// Head norm, rotary embedding and cache write. The kernels of `attention/` take q_out and the caches in bf16, qkv in
/// f32, and norms in either; the kernel of `any/` takes every dtype.
struct QkNormRopeArgs {
  const void* qkv;              // [tokens, qkv_row] of `stream_dtype`: q, k and v come first in their rows
  const void* q_norm;           // [head_dim] of `norm_dtype`, or null: no norm
  const void* k_norm;           // the same as q_norm
  float eps;                    // of the norms
  const float* cos;             // [.., head_dim / 2]
  const float* sin;             // [.., head_dim / 2]
  const uint32_t* angle_index;  // [tokens] each token's row of cos and sin; null: its own number
  const uint32_t* slots;        // [tokens] distinct; u32::MAX writes nothing to the cache
  void* q_out;                  // [tokens, heads, head_dim] of `q_dtype`
  void* k_cache;                // [num_slots / block_size, kv_heads, block_size, head_dim] of `dtype`
  void* v_cache;                // the same as k_cache
  Dtype dtype, stream_dtype, q_dtype, norm_dtype;
  int tokens, heads, kv_heads, head_dim, block_size;
  int qkv_row;        // at least (heads + 2 kv_heads) head_dim
  int64_t num_slots;  // slots from this one on write nothing to the cache
};

/// Causal attention of any rows over the paged KV cache, which holds their own keys and values already.
struct PagedAttentionArgs {
  const void* q;        // [tokens, heads, head_dim] of `q_dtype`
  const void* k_cache;  // [num_blocks, kv_heads, block_size, head_dim] of `dtype`
  const void* v_cache;  // [num_blocks, kv_heads, block_size, value_row] of `dtype`: values first in their rows
  // [sequences + 1] ascending. Rows before the first are not written; rows after the last become zeros.
  const uint32_t* query_start_loc;
  const uint32_t* positions;     // [tokens] ascending within a sequence
  const uint32_t* block_tables;  // [sequences, max_blocks]
  void* out;                     // [tokens, heads * value_dim] of `dtype`
  Dtype dtype, q_dtype;
  int tokens, sequences, max_blocks, heads, kv_heads, head_dim, value_dim, value_row, num_blocks, block_size;
  float scale;    // of the scores
  int window;     // positions that a row sees, including its own; 0 = all
  int invariant;  // whether a row's bits must not depend on `tokens` and `sequences`
  // [2] zero before the first use, of moe_attention_prefill_wgmma and moe_attention_latent. Launches that share it must
  // not overlap.
  uint32_t* counters;
  // Scratch of moe_attention_latent with several splits, and of moe_attention_latent_decode: [tokens * heads, splits,
  // value_dim] values, then [tokens * heads, splits, 2] maxima and sums.
  float* partials;
  // Parts of the positions, from moe_attention_latent_splits and moe_attention_latent_decode_splits; 1 in other calls.
  int splits;
  // [heads] a logit of each head that has no value, or null. Used by moe_attention_prefill* and `any/`.
  const float* sinks;
  // [tokens, gate_row]: the sigmoids of the last heads * value_dim values of a row scale its results, after they were
  // rounded; or null. Used by moe_attention_prefill*, with heads of 256.
  const float* gates;
  int gate_row;
};

/// One new token per sequence, from qkv to attention. A row whose slot is u32::MAX, or a slot that the cache does not
/// have, is padding: its output is zeros and nothing is written to the cache.
struct AttentionDecodeArgs {
  const float* qkv;  // [rows, qkv_row]
  const void* q_norm;
  const void* k_norm;
  float eps;
  const float* cos;
  const float* sin;
  const uint32_t* angle_index;
  const uint32_t* slots;         // [rows]; these seven are the same as in QkNormRopeArgs
  const uint32_t* positions;     // [rows] of the new tokens
  const uint32_t* block_tables;  // [rows, max_blocks]
  int max_blocks;
  void* k_cache;    // [.., kv_heads, block_size, head_dim] bf16
  void* v_cache;    // the same as k_cache
  void* out;        // [rows, heads * head_dim] bf16
  void* workspace;  // moe_attention_decode_workspace bytes, zero before the first use
  int rows, heads, kv_heads, head_dim, block_size;
  float scale;
  int window;
  int splits;          // from moe_attention_decode_splits
  int64_t num_slots;   // of the cache
  Dtype norm_dtype;    // of q_norm and k_norm: bf16 or f32
  int qkv_row;         // at least (heads + 2 kv_heads) head_dim
  const float* sinks;  // [heads] a logit of each head that takes part in the softmax and has no value; null: none
  const float* gates;  // [rows, gate_row], with heads of 256: the same as in PagedAttentionArgs; or null
  int gate_row;
};

/// The rows of latent attention after the down-projection: the latent is normed, and the other part is rotated.
struct MlaLatentArgs {
  const float* compressed;  // [rows, latent + rope]
  const void* norm;         // [latent] of `dtype`
  float eps;
  const float* cos;  // [rows, rope / 2]
  const float* sin;
  void* latent_out;   // [rows, latent] of `dtype`
  void* rotated_out;  // [rows, rope] of `dtype`
  Dtype dtype;
  int rows, latent, rope;
};

/// Stores keys, and values that have a cache of their own, in the rows' slots.
struct MlaCacheArgs {
  const void* kv;         // [rows, heads, key - rope + value] of `kv_dtype`
  const void* rotated;    // [rows, rope] of `dtype`
  const uint32_t* slots;  // [rows] distinct; u32::MAX and slots beyond the cache write nothing
  void* k_cache;          // [num_slots / block_size, heads, block_size, key] of `dtype`
  void* v_cache;          // [num_slots / block_size, heads, block_size, value] of `dtype`, or null: value is 0
  Dtype dtype, kv_dtype;
  int rows, heads, key, rope, value, block_size;
  int64_t num_slots;
};

/// Queries: their last values are rotated and stored at the end of `out`, the others in `plain` or at the beginning of
/// `out`.
struct MlaQueryArgs {
  const float* q;    // [rows, heads, plain_dim + rope]
  const float* cos;  // [rows, rope / 2]
  const float* sin;
  void* plain;  // [rows, heads, plain_dim] of `dtype`, or null
  void* out;    // [rows, heads, width] of `out_dtype`
  Dtype dtype, out_dtype;
  int rows, heads, plain_dim, rope, width;
};

/// The products of queries and of latents, from one matrix that projects both or from two. Queries are handled as in
/// MlaQueryArgs. The latents are normed and stored in cache rows with their rotated parts.
struct MlaRowsArgs {
  const float* queries;  // [rows, heads (plain_dim + rope)]; one row is `query_row` values after the other
  const float* latents;  // [rows, latent + rope]; one row is `latent_row` values after the other
  const void* norm;      // [latent] of `dtype`
  float eps;
  const float* cos;  // [rows, rope / 2]
  const float* sin;
  const uint32_t* slots;  // [rows] distinct; u32::MAX and slots beyond the cache write nothing
  void* plain;            // [rows, heads, plain_dim] of `dtype`, or null
  void* out;              // [rows, heads, width] of `out_dtype`
  void* k_cache;          // [num_slots, latent + rope] of `dtype`
  Dtype dtype, out_dtype;
  int rows, heads, plain_dim, rope, width, latent, query_row, latent_row;
  int64_t num_slots;
};

/// Copies the latent rows of the positions that some sequences see out of the cache, one sequence after the other.
/// bf16: 512 and 64 columns.
struct MlaExpandArgs {
  const void* cache;                // [num_blocks, 1, block_size, 576]
  const uint32_t* query_start_loc;  // [sequences + 1]
  const uint32_t* positions;        // [tokens] ascending within a sequence
  const uint32_t* block_tables;     // [sequences, max_blocks]
  void* latents;                    // out [all, 512]
  void* keys;                       // out [heads, all, 192]: the last 64 columns
  uint32_t* bases;                  // out [sequences]: the row of each sequence's first position
  int sequences, max_blocks, block_size, heads;
  int all;  // the positions of all sequences together
};

/// out[r, h] = w[h] x[r, h].
struct PerHeadArgs {
  const void* x;  // [rows, heads, k] of `dtype`
  const void* w;  // [heads, n, k] of `dtype`
  void* out;      // [rows, heads, stride] of `out_dtype`; the first n of each stride are written
  Dtype dtype, out_dtype;
  int rows, heads, n, k, stride;
  int invariant;  // whether a row's bits must not depend on `rows`
};

}  // namespace moe

extern "C" int moe_qk_norm_rope_cache(const moe::QkNormRopeArgs* args, void* stream);
extern "C" int moe_any_qk_norm_rope_cache(const moe::QkNormRopeArgs* args, void* stream);
extern "C" int moe_attention_prefill(const moe::PagedAttentionArgs* args, void* stream);
extern "C" int moe_attention_prefill_wgmma(const moe::PagedAttentionArgs* args, void* stream);
extern "C" int moe_attention_prefill_wgmma_on_blocks(const moe::PagedAttentionArgs* args, int blocks, void* stream);
extern "C" int moe_attention_prefill_wgmma_fp8(const moe::PagedAttentionArgs* args, int blocks, float* scales,
                                               int lines, int quads, void* stream);
extern "C" int moe_any_attention(const moe::PagedAttentionArgs* args, void* stream);
extern "C" int moe_attention_latent(const moe::PagedAttentionArgs* args, void* stream);
extern "C" int moe_attention_latent_values(const moe::PagedAttentionArgs* args, const void* w_uv, void* values,
                                           void* stream);
extern "C" int moe_attention_latent_decode(const moe::PagedAttentionArgs* args, const void* w_uv, void* values,
                                           void* stream);
extern "C" int moe_attention_latent_query(const moe::MlaRowsArgs* args, const void* w_uk, void* stream);
extern "C" int moe_mla_expand(const moe::MlaExpandArgs* args, void* stream);
extern "C" int moe_attention_expanded(const moe::PagedAttentionArgs* args, const uint32_t* bases, int all,
                                      void* stream);
extern "C" int moe_any_mla_latent(const moe::MlaLatentArgs* args, void* stream);
extern "C" int moe_any_mla_cache(const moe::MlaCacheArgs* args, void* stream);
extern "C" int moe_any_mla_query(const moe::MlaQueryArgs* args, void* stream);
extern "C" int moe_any_mla_rows(const moe::MlaRowsArgs* args, void* stream);
extern "C" int moe_any_per_head(const moe::PerHeadArgs* args, void* stream);
extern "C" int moe_attention_decode(const moe::AttentionDecodeArgs* args, void* stream);
extern "C" int moe_attention_decode_overlapped(const moe::AttentionDecodeArgs* args, int overlapped, void* stream);
extern "C" int moe_attention_decode_fp8(const moe::AttentionDecodeArgs* args, int overlapped, float* scales, int lines,
                                        int quads, void* stream);
