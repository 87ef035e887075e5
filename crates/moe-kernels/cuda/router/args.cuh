// Arguments of the router.
#pragma once

#include <cuda_bf16.h>

#include "codes.cuh"

namespace moe {

/// T tokens, E experts of all ranks, S = shared behind them, K = top_k + S.
struct GateRouteArgs {
  const __nv_bfloat16* x;          // [T, H]
  const __nv_bfloat16* gate;       // [E, H]
  const __nv_bfloat16* gate_bias;  // [E] part of the logits; null = none
  const float* correction_bias;    // [E] only part of the choice; null = none
  const uint32_t* valid;           // [1] rows from there on are padding and get no expert; null = none are
  float* logits;                   // out [T, E]
  uint32_t* topk_ids;              // out [T, K] by descending key, ties to the lower id; then E .. E + S - 1
  float* topk_weights;             // out [T, K]
  int tokens, hidden, experts, top_k;
  Scoring scoring;
  int raw_logits;             // choose by logits and score the chosen only
  int renormalize;            // divide the weights by their sum
  float scale;                // factor of the weights
  float softcap;              // logits become cap * tanh(x / cap); 0 = they stay
  uint32_t* counts;           // [local experts] added to; or null
  uint32_t* buckets;          // out [local experts, T] with `counts`: the slots t K + k of each expert, in any order
  const int32_t* expert_map;  // [E + S] of `buckets`: expert to local expert, -1 = elsewhere; null = all are here
  int invariant;              // whether a row's bits must not depend on T
  int shared;                 // experts that every token gets in its last slots
  float shared_weight;        // their weight, neither renormalised nor scaled
};

}  // namespace moe

extern "C" int moe_gate_route(const moe::GateRouteArgs* args, void* stream);
