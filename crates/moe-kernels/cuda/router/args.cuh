// Arguments of the router, which are shared by every launch that routes.
#pragma once

#include <cuda_bf16.h>

#include "codes.cuh"

namespace moe {

/// What a launch that routes records of its choices for observers of the step, and which choices are forced on it. All
/// null: nothing. Rows of padding record nothing, and nothing is forced on them.
struct StepRoutingArgs {
  uint32_t* heat;          // [E] one is added for each choice, modulo 2^32
  uint32_t* routed;        // out: the choices of row t at [t * stride .. + K], without shared experts
  const uint32_t* forced;  // choices of row t in the same order, kNoExpert for none; a row without any chooses itself
  int stride;
  int keep_weights;  // forced experts get the weights of the row's own choices, else the weights of their own scores
};

/// How the experts that a row chose become the slots that compute it, if experts have copies or move. All null: ids are
/// not changed. Recorded choices and forced choices are experts, not slots.
struct CopiesArgs {
  const int32_t* log2phy;  // [E + S, width] the slots of each expert's copies, then -1
  int width;
  // The copy that computes a row: 1: by a hash of row and expert; 0: in turns.
  int hashed;
  uint32_t first_row;  // number of row 0
};

/// T tokens, E experts of all ranks, S = `shared` experts after them, K = top_k + S. With copies, topk_ids are slots.
struct GateRouteArgs {
  const __nv_bfloat16* x;          // [T, H]
  const __nv_bfloat16* gate;       // [E, H]
  const __nv_bfloat16* gate_bias;  // [E] part of the logits; null = none
  const float* correction_bias;    // [E] added only for the choice; null = none
  const uint32_t* valid;           // [1] rows from this one on are padding and get no expert; null = no padding
  float* logits;                   // out [T, E]
  uint32_t* topk_ids;              // out [T, K] by descending key, ties to the lower id; then E .. E + S - 1
  float* topk_weights;             // out [T, K]
  int tokens, hidden, experts, top_k;
  Scoring scoring;
  // Choose by logits, and compute scores of the chosen ones only.
  int raw_logits;
  int renormalize;    // divide the weights by their sum
  float scale;        // factor of the weights
  float softcap;      // logits become cap * tanh(x / cap); 0 = no cap
  uint32_t* counts;   // [local experts] is added to; or null
  uint32_t* buckets;  // with `counts`: out [local experts, T], the slots t K + k of each expert, in any order
  // For `buckets`, by id in topk_ids: local expert, -1 = elsewhere; null = all experts are local.
  const int32_t* expert_map;
  int invariant;        // whether a row's bits must not depend on T
  int shared;           // experts that every token gets in its last slots
  float shared_weight;  // their weight, neither renormalised nor scaled
  // Only experts of the best `kept_groups` of `groups` equal groups of consecutive experts may be chosen. With a
  // correction bias, groups are ranked by the sum of their two best keys, else by their best key. 0 groups = all may be
  // chosen.
  int groups, kept_groups;
  StepRoutingArgs routing;
  CopiesArgs copies;
};

/// Forces experts that are spread evenly: for every row and layer the start of a random permutation.
struct BalanceIdsArgs {
  const uint32_t* step;  // [1] number of the step
  uint32_t* ids;         // out [rows, layers, K]
  uint64_t seed;
  int rows, layers, top_k, experts;
  uint32_t first_row, first_layer;  // numbers of row 0 and layer 0
};

}  // namespace moe

extern "C" int moe_gate_route(const moe::GateRouteArgs* args, void* stream);
extern "C" int moe_balance_ids(const moe::BalanceIdsArgs* args, void* stream);
