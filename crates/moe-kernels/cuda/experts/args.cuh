// Arguments of the experts with bf16 weights and of the ops before and after them. A slot is a (token, k) pair,
// numbered t K + k.
#pragma once

#include <cuda_bf16.h>

#include "codes.cuh"

namespace moe {

/// What is computed in addition to the products: biases, and g sigmoid(alpha g) (u + shift) of g = min(gate, limit) and
/// u = up within limit and -limit. alpha 1, limit infinity and shift 0 without biases are the plain SwiGLU.
struct ExpertEpilogueArgs {
  const __nv_bfloat16* w13_bias;  // [num_local, 2 I]: gate, then up; or null
  const __nv_bfloat16* w2_bias;   // [num_local, H] or null
  float alpha, limit, shift;
};

struct AlignTokensArgs {
  const uint32_t* topk_ids;   // [T K] physical ids; u32::MAX = no expert
  const int32_t* expert_map;  // [num_ids] physical id to local expert, -1 = elsewhere; null = identity
  int slots, num_ids, num_local;
  int tile_rows;      // largest number of slots of a tile
  uint32_t* offsets;  // out [num_local + 1]: expert e's slots are sorted[offsets[e] .. offsets[e + 1]]
  uint32_t* sorted;   // out [T K] slots, ascending within an expert; places after the last sorted slot are not written
  uint32_t* tiles;    // out [moe_max_tiles, 2]: expert, first place in `sorted`; a tile ends where its expert does
  uint32_t* num_tiles;  // out [1]
};

struct ExpertsStreamArgs {
  const __nv_bfloat16* x;     // [T, H]
  const __nv_bfloat16* w13;   // [E, 2 I, H]: gate rows, then up rows
  const __nv_bfloat16* w2;    // [E, H, I]
  const uint32_t* topk_ids;   // [T, K]; u32::MAX = no expert
  const float* topk_weights;  // [T, K]
  const int32_t* expert_map;  // [num_ids] the same as in AlignTokensArgs
  __nv_bfloat16* act;         // scratch [T K, I]
  float* slot_rows;           // scratch [T K, H]
  void* out;                  // [T, H]; null: slot_rows is the result, each slot's unweighted row
  uint32_t* flags;            // [flag_words] zero before the first launch; launches that share it must not overlap
  int flag_words;             // at least moe_experts_stream_flags
  int tokens, top_k, num_ids, num_local, hidden, inter;
  Output output;  // kF32 or kBf16
  ExpertEpilogueArgs epilogue;
};

/// Both products over listed slots; moe_experts_wide rounds slot rows to bf16.
struct ExpertsTensorArgs {
  const __nv_bfloat16* x;    // [T, H]
  const __nv_bfloat16* w13;  // [E, 2 I, H]: gate rows, then up rows
  const __nv_bfloat16* w2;   // [E, H, I]
  const uint32_t* slots;     // [E, bucket]: the slots of each expert
  const uint32_t* counts;    // [E] the number of slots of each expert
  int bucket;
  __nv_bfloat16* act;  // scratch [T K, I]
  void* slot_rows;     // out [T K, H]: f32; bf16 for moe_experts_wide
  // [moe_experts_tensor_counters] zero before the first launch. Launches that share it have the same num_local and do
  // not overlap.
  uint32_t* counters;
  int tokens, top_k;
  int num_ids;  // experts of all ranks, of which num_local are on this rank
  int num_local, hidden, inter;
  ExpertEpilogueArgs epilogue;
};

/// Both products on tensor cores before Hopper. moe_align_tokens wrote `offsets` to `num_tiles` with tile_rows = 128.
struct ExpertsGroupedArgs {
  const __nv_bfloat16* x;    // [T, H]
  const __nv_bfloat16* w13;  // [E, 2 I, H]: gate rows, then up rows
  const __nv_bfloat16* w2;   // [E, H, I]
  const uint32_t* offsets;
  const uint32_t* sorted;
  const uint32_t* tiles;
  const uint32_t* num_tiles;
  __nv_bfloat16* act;  // [T K, I] the first product writes it for the second
  float* slot_rows;    // out [T K, H]
  int slots, top_k, num_local, hidden, inter;
};

struct CombineArgs {
  const void* slot_rows;  // [T K, H] unweighted; rows of slots without a local expert may hold anything
  const uint32_t* topk_ids;
  const float* topk_weights;
  const int32_t* expert_map;  // these three are the same as in ExpertsStreamArgs
  void* out;                  // [T, H]
  int tokens, top_k, num_ids, num_local, hidden;
  Dtype rows;     // of slot_rows: kF32 or kBf16
  Output output;  // kF32 or kBf16
};

/// Experts on a device with fewer slots than experts. Each expert without a slot has a home in host memory. Arrays are
/// in device memory.
struct ExpertResidencyArgs {
  const uint32_t* topk_ids;  // [count]; ids of no expert are ignored
  int32_t* place;            // [E] an expert's slot, or -1 - home
  uint32_t* heat;            // [E] how often recent steps needed it
  int32_t* held;             // [S] the expert in each slot
  int32_t* pending;          // [E] whether the step still needs it: the first pass writes it for the next ones
  int32_t* map;              // out [E]: the slot of each expert that this pass computes, -1 = none
  int32_t* exchanges;        // out [1 + 2 S]: the number of experts that change places; slot and home of each
  uint64_t* counts;          // [2] is added to: experts that steps needed, experts that were fetched for them
  int count, num_experts, num_slots, first;  // first: whether this is the step's first pass
};

/// Exchanges the weights of slots and homes. A home holds both products of an expert, one after the other.
struct ExpertExchangeArgs {
  const int32_t* exchanges;     // written by moe_expert_residency
  void* w13;                    // [S] experts of w13_bytes
  void* w2;                     // [S] experts of w2_bytes
  void* homes;                  // device address of page-locked host memory: [homes], each with both products
  int64_t w13_bytes, w2_bytes;  // bytes of an expert, multiples of 16
};

}  // namespace moe

extern "C" int moe_expert_residency(const moe::ExpertResidencyArgs* args, void* stream);
extern "C" int moe_expert_exchange(const moe::ExpertExchangeArgs* args, void* stream);
extern "C" int moe_align_tokens(const moe::AlignTokensArgs* args, void* stream);
extern "C" int moe_experts_stream(const moe::ExpertsStreamArgs* args, void* stream);
extern "C" int moe_experts_stream_planned(const moe::ExpertsStreamArgs* args, int pass, int chunk, void* stream);
extern "C" int moe_experts_tensor(const moe::ExpertsTensorArgs* args, void* stream);
extern "C" int moe_experts_wide(const moe::ExpertsTensorArgs* args, void* stream);
extern "C" int moe_experts_grouped_gate_up(const moe::ExpertsGroupedArgs* args, void* stream);
extern "C" int moe_experts_grouped_down(const moe::ExpertsGroupedArgs* args, void* stream);
extern "C" int moe_combine(const moe::CombineArgs* args, void* stream);
extern "C" int moe_combine_add_rms_norm(const moe::CombineArgs* args, float* residual, const __nv_bfloat16* weight,
                                        float eps, void* stream);
extern "C" int moe_combine_add_rms_norm_fp8(const moe::CombineArgs* args, float* residual, const __nv_bfloat16* weight,
                                            float eps, float* scales, int lines, int quads, void* stream);
