// Arguments of the kernels for any dtype and shape. The arguments of attention are in attention/args.cuh.
#pragma once

#include "router/args.cuh"

namespace moe {

struct AnyLinearArgs {
  const void* x;     // [rows, k] of `dtype`
  const void* w;     // [n, k] of `dtype`
  const void* bias;  // [n] of `dtype`, or null
  void* out;         // [rows, n] of `out_dtype`: `dtype` or f32
  Dtype dtype, out_dtype;
  int rows, n, k;
  int invariant;  // whether a row's bits must not depend on `rows`
};

/// For every grouped row i of local expert e: out[i] = act(x[in_rows[i]] * w13[e]^T + bias[e]).
struct AnyGateUpArgs {
  const void* x;            // [x_rows, hidden]; a row number from x_rows on reads as zeros
  const uint32_t* offsets;  // [experts + 1] ascending: rows offsets[e] .. offsets[e + 1] belong to expert e
  const uint32_t* in_rows;  // [rows], or null: row i reads row i of x
  const void* w13;          // [experts, 2 width, hidden]: gate rows, then up rows
  const void* bias;         // [experts, 2 width] or null
  void* out;                // [rows, width]; rows from offsets[experts] on are not written
  Dtype dtype;              // dtype of all these arrays
  int activation;           // 0 SwiGLU, 1 gpt-oss's with alpha and limit, 2 GELU by erf, 3 GELU by tanh
  float alpha, limit;
  int x_rows, rows, experts, width, hidden;
  int invariant;  // whether a row's bits must not depend on `rows`
};

/// out = act(gate, up), from products that were computed before.
struct AnyGatedArgs {
  const float* gate;  // [rows] of `width` values, `stride` apart
  const float* up;    // the same
  void* out;          // [rows, width] of `dtype`
  Dtype dtype;
  int rows, width, stride;
  int activation;  // the same as in AnyGateUpArgs
  float alpha, limit;
};

/// For every grouped row i of local expert e: out[out_rows[i]] = x[i] * w2[e]^T + bias[e].
struct AnyDownArgs {
  const void* x;             // [rows, width] of `dtype`
  const uint32_t* offsets;   // the same as in AnyGateUpArgs
  const uint32_t* out_rows;  // [rows] distinct, or null: row i writes row i; a number from num_out on writes nothing
  const void* w2;            // [experts, hidden, width] of `dtype`
  const void* bias;          // [experts, hidden] of `dtype`, or null
  float* out;                // [num_out, hidden]; rows that no grouped row names are not written
  Dtype dtype;
  int rows, num_out, experts, hidden, width;
  int invariant;
};

struct AnyGroupSlotsArgs {
  // [count] (T K slots) physical ids. u32::MAX and ids without an expert = no expert.
  const uint32_t* topk_ids;
  const int32_t* expert_map;  // [num_ids] physical id to local expert, -1 = elsewhere; null = identity
  int count, top_k, num_ids, num_local;
  uint32_t* offsets;    // out [num_local + 1]: expert e's slots are slots[offsets[e] .. offsets[e + 1]]
  uint32_t* slots;      // out [count] ascending within an expert; places after the last slot are not written
  uint32_t* in_rows;    // out [count]: the token, slot / top_k, of each slot; null = not needed
  uint32_t* workspace;  // moe_any_group_slots_workspace(num_local) words
};

/// Copies rows of tokens or slots to blocks of rows per expert (BatchedExperts), or back.
struct AnyBatchRowsArgs {
  const void* rows;         // what is copied, of `dtype`
  const uint32_t* offsets;  // [experts + 1] written by moe_any_group_slots
  const uint32_t* slots;    // [num_slots] the same
  void* out;                // where it is copied to
  uint32_t* counts;         // [experts] out of moe_any_batch_rows; not used on the way back
  Dtype dtype;
  int num_slots, top_k, experts, max_tokens, width;
};

/// T rows, L = experts + zero experts, K = top_k, S = K + shared slots.
struct AnyRouteArgs {
  const float* logits;         // [T, L]; not read if ids are given
  const float* bias;           // [L] correction bias, or null
  const uint32_t* table;       // [vocab, K] ids by token id, for hash routing
  const uint32_t* token_ids;   // [T] for hash routing
  const uint32_t* given_ids;   // [T, K] if ids are given
  const float* given_weights;  // [T, K] if ids are given; null = zeros
  const uint32_t* valid;       // [1] rows from this one on are padding; null = none
  uint32_t* topk_ids;          // out [T, S]
  float* topk_weights;         // out [T, S]
  float* zero_weights;         // out [T] or null
  int tokens, experts, zero_experts, top_k, shared_slots, vocab, groups, topk_group;
  int selection;  // `Selection` of any/route.cuh
  Scoring scoring;
  int renormalize;
  float softcap;  // 0 = none
  float scale, shared_weight;
  StepRoutingArgs routing;  // zero experts (ids from `experts` on) count as choices, too
};

}  // namespace moe

extern "C" int moe_any_linear(const moe::AnyLinearArgs* args, void* stream);
extern "C" int moe_any_gate_up(const moe::AnyGateUpArgs* args, void* stream);
extern "C" int moe_any_gated(const moe::AnyGatedArgs* args, void* stream);
extern "C" int moe_any_down(const moe::AnyDownArgs* args, void* stream);
extern "C" int moe_any_group_slots(const moe::AnyGroupSlotsArgs* args, void* stream);
extern "C" int moe_any_batch_rows(const moe::AnyBatchRowsArgs* args, void* stream);
extern "C" int moe_any_unbatch_rows(const moe::AnyBatchRowsArgs* args, void* stream);
extern "C" int moe_any_route(const moe::AnyRouteArgs* args, void* stream);
