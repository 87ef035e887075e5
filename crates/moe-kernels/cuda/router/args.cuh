// Arguments of the router, and what every launch that routes shares with it.
#pragma once

#include <cuda_bf16.h>

#include "codes.cuh"

namespace moe {

/// What a launch that routes leaves of its choices for who watches the step, and what it is told to choose. All null:
/// nothing. Rows that are padding leave nothing and are told nothing.
struct StepRoutingArgs {
  uint32_t* heat;          // [E] one is added for each choice, wrapping around
  uint32_t* routed;        // out: the choices of row t at [t * stride .. + K], without shared experts
  const uint32_t* forced;  // choices of row t likewise, kNoExpert for none; a row of none chooses by itself
  int stride;
  int keep_weights;  // forced experts get the weights of the row's own choices, else the weights of their scores
};

/// What turns the experts that a row chose into the slots that compute it, where experts have copies or move. All null:
/// ids stay. What is left of choices for who watches, and what is forced, are experts.
struct CopiesArgs {
  const int32_t* log2phy;  // [E + S, width] the slots of each expert's copies, then -1
  int width;
  int hashed;          // the copy of a row: by a hash of row and expert, else in turns
  uint32_t first_row;  // number of row 0
};

/// T tokens, E experts of all ranks, S = shared behind them, K = top_k + S. With copies topk_ids are slots.
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
  const int32_t* expert_map;  // of `buckets`, by id in topk_ids: local expert, -1 = elsewhere; null = all are here
  int invariant;              // whether a row's bits must not depend on T
  int shared;                 // experts that every token gets in its last slots
  float shared_weight;        // their weight, neither renormalised nor scaled
  StepRoutingArgs routing;
  CopiesArgs copies;
};

/// Forced experts that are spread evenly: for every row and layer the start of a random permutation.
struct BalanceIdsArgs {
  const uint32_t* step;  // [1] number of the step
  uint32_t* ids;         // out [rows, layers, K]
  uint64_t seed;
  int rows, layers, top_k, experts;
  uint32_t first_row, first_layer;  // places of row 0 and layer 0
};

}  // namespace moe

extern "C" int moe_gate_route(const moe::GateRouteArgs* args, void* stream);
extern "C" int moe_balance_ids(const moe::BalanceIdsArgs* args, void* stream);
