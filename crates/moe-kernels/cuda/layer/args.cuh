// Arguments of a sparse layer in one launch.
#pragma once

#include <cuda_bf16.h>

#include "experts/args.cuh"
#include "router/args.cuh"

namespace moe {

struct LayerStreamArgs {
  const void* x;                   // [T, H] bf16; f32 where `norm` is given
  const __nv_bfloat16* norm;       // [H] weight of the RMS norm of x, or null: no norm
  float eps;                       // of the norm
  const __nv_bfloat16* gate;       // [E - shared, H]; null: topk_ids and topk_weights are inputs
  const __nv_bfloat16* gate_bias;  // this and the next two are the same as in GateRouteArgs
  const float* correction_bias;
  const uint32_t* valid;
  uint32_t* topk_ids;         // [T, K] out with `gate`, else in
  float* topk_weights;        // [T, K] the same
  const __nv_bfloat16* w13;   // [num_local, 2 I, H]: gate rows, then up rows
  const __nv_bfloat16* w2;    // [num_local, H, I]
  const int32_t* expert_map;  // [num_ids] expert to local expert, -1 = elsewhere; null = identity
  void* out;                  // [T, H]; may be x
  Output output;
  // moe_layer_stream_state bytes, zero before the first launch. Launches that share it must not overlap; their sizes
  // may differ.
  void* state;
  int tokens, hidden, inter, num_ids, num_local, top_k;
  Scoring scoring;  // these and the next ones are the same as in GateRouteArgs
  int raw_logits, renormalize;
  float scale, softcap;
  // With `gate`: the number of shared experts. They are the last of the E = num_ids experts, and every token has them
  // in the last of its K = top_k slots.
  int shared;
  float shared_weight;      // weight of these shared experts
  int groups, kept_groups;  // the same as in GateRouteArgs
  StepRoutingArgs routing;  // with `gate`
  ExpertEpilogueArgs epilogue;
};

}  // namespace moe

extern "C" int moe_layer_stream(const moe::LayerStreamArgs* args, void* stream);
