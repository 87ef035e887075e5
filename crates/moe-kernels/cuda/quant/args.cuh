// A pack of quantised matrices in fragment order, and the arguments of the kernels that read one.
//
// The order is the order of the A operand of mma.sync m16n8k16, and of wgmma's m64 with A in registers. A tile is 16
// rows x KT columns in 512 bytes, where KT is 64 for weights of 4 bits and 32 for weights of 8 bits. Each lane has 16
// bytes of the tile: its fragments of the tile's k-steps of 16 columns, one after the other. Of a k-step, lane 4 g + c
// holds the weights w0 .. w7 = (g, 2c) (g, 2c+1) (g+8, 2c) (g+8, 2c+1) (g, 2c+8) (g, 2c+9) (g+8, 2c+8) (g+8, 2c+9),
// which are the registers a0 = (w0, w1) .. a3 = (w6, w7):
// - int4, one word: a_i at bits 4 i and 16 + 4 i, so that (v >> 4 i) & 0x000f000f is the pair;
// - FP4, one word: quant/fp4.cuh;
// - Q4_K, as int4;
// - 8 bits, two words: bytes w0 w2 w1 w3 and w4 w6 w5 w7, so that v & 0x00ff00ff and (v >> 8) & 0x00ff00ff are pairs.
#pragma once

#include <cuda_bf16.h>

#include "experts/args.cuh"
#include "router/args.cuh"

namespace moe {

struct QuantPack {
  const uint8_t* q;       // [experts, n_tiles, k_packed / KT] tiles of 512 bytes
  const void* scales;     // [experts, n_tiles, groups, scale_rows] of `scale_dtype`; FP4: [experts, n_tiles] of 16
                          // floats, the factors of the tile's rows, and bytes [groups, 16] (quant/fp4.cuh); Q4_K:
                          // units of 128 columns (quant/q4k.cuh)
  const uint8_t* zeros;   // [experts, n_tiles, groups, 16] zero points; null: 8 (int4), 128 (int8), none (floats)
  const uint32_t* perm;   // [experts, k_packed] column of x, u32::MAX = none; null: packed column i is column i of x
  int64_t experts, n, k;  // rows of a matrix (gate and up together) and columns of x
  int64_t n_tiles, k_packed;  // rows and columns that a matrix does not have are zero weights
  int64_t group, groups;      // packed column i belongs to group min(i / group, groups - 1)
  QuantFormat format;         // w = scale * (q - zero), scale * e4m3(q), scale * e2m1(q) or scale * q - minimum
  Dtype scale_dtype;
  int scale_rows;  // 16: a scale for each row of a tile; 2: for its rows 0 .. 7 and 8 .. 15
  int gate_up;     // not 0: tile t holds gate rows 8 t .. 8 t + 7 and, as rows 8 .. 15, these up rows
};

struct AnyQuantLinearArgs {
  const void* x;     // [rows, k] of `dtype`
  QuantPack w;       // one matrix
  const void* bias;  // [n] of `dtype`, or null
  void* out;         // [rows, n] of `out_dtype`: `dtype` or f32
  Dtype dtype, out_dtype;
  int rows;
};

/// The arguments are the same as in AnyGateUpArgs.
struct AnyQuantGateUpArgs {
  const void* x;
  const uint32_t* offsets;
  const uint32_t* in_rows;
  QuantPack w13;
  const void* bias;
  void* out;
  Dtype dtype;
  int activation;
  float alpha, limit;
  int x_rows, rows;
};

/// The arguments are the same as in AnyDownArgs.
struct AnyQuantDownArgs {
  const void* x;
  const uint32_t* offsets;
  const uint32_t* out_rows;
  QuantPack w2;
  const void* bias;
  float* out;
  Dtype dtype;
  int rows, num_out;
};

/// The arguments are the same as in ExpertsTensorArgs; E, H and I are the sizes of the packs.
struct QuantExpertsTensorArgs {
  const __nv_bfloat16* x;  // [T, H]
  QuantPack w13;           // gate_up
  QuantPack w2;
  const uint32_t* slots;
  const uint32_t* counts;
  int bucket;
  __nv_bfloat16* act;
  void* slot_rows;
  uint32_t* counters;
  int tokens, top_k;
  int num_ids;
  int invariant;  // not 0: a row's bits do not depend on the number of rows; 0 for experts_wide
  ExpertEpilogueArgs epilogue;
};

/// The arguments are the same as in LinearTensorArgs.
struct QuantLinearTensorArgs {
  const __nv_bfloat16* x;     // [m, k]
  QuantPack w;                // one matrix; of a gate and up pack the results are all gates, then all ups
  const __nv_bfloat16* bias;  // [n] or null
  void* out;                  // [m, n]
  Output output;
  int m;
  int splits;
};

/// The arguments are the same as in LinearStreamArgs.
struct QuantLinearStreamArgs {
  const void* x;
  const __nv_bfloat16* norm;
  float eps;
  QuantPack w;  // one matrix
  const __nv_bfloat16* bias;
  void* out;
  Output output;
  int m;
};

/// The arguments are the same as in LayerStreamArgs; w13 and w2 give the number and the sizes of this rank's experts.
struct QuantLayerStreamArgs {
  const void* x;
  const __nv_bfloat16* norm;
  float eps;
  const __nv_bfloat16* gate;
  const __nv_bfloat16* gate_bias;
  const float* correction_bias;
  const uint32_t* valid;
  uint32_t* topk_ids;
  float* topk_weights;
  QuantPack w13, w2;
  const int32_t* expert_map;
  void* out;
  Output output;
  void* state;  // may be the state of launches of moe_layer_stream
  int tokens, num_ids, top_k;
  Scoring scoring;
  int raw_logits, renormalize;
  float scale, softcap;
  int shared;
  float shared_weight;
  int groups, kept_groups;
  StepRoutingArgs routing;
  ExpertEpilogueArgs epilogue;
};

/// The arguments are the same as in ExpertsStreamArgs.
struct QuantExpertsStreamArgs {
  const __nv_bfloat16* x;
  QuantPack w13, w2;
  const uint32_t* topk_ids;
  const float* topk_weights;
  const int32_t* expert_map;
  __nv_bfloat16* act;
  float* slot_rows;
  void* out;
  uint32_t* flags;
  int flag_words, tokens, top_k, num_ids;
  Output output;
  ExpertEpilogueArgs epilogue;
};

/// Puts the columns of rows into the order of a pack's columns.
struct OrderRowsArgs {
  const __nv_bfloat16* x;  // [tokens, columns]
  const uint32_t* perm;    // [experts, columns] column of x
  const uint32_t* slots;   // null: all rows have the same order, and `experts` and `top_k` are 1
  const uint32_t* counts;  // null if `slots` is null
  int bucket;              // these three as in ExpertsTensorArgs
  __nv_bfloat16* out;      // [tokens top_k, columns]
  int tokens, top_k, columns, experts;
};

/// Quantises activations to FP8.
struct Fp8QuantiseArgs {
  const __nv_bfloat16* x;  // [rows, columns]
  uint8_t* q;              // out [rows, columns]
  float* scales;           // out [columns / 128, rows rounded up to 4]
  int rows, columns;
  // The order of the columns within each 128. 0: the order that fp8_product.cuh reads; else by quads, as moe_fp8_linear
  // reads them.
  int quads;
};

/// Copies rows in FP8 to the places of their slots, which are in order of experts.
struct Fp8PlacesArgs {
  const uint8_t* x;       // [tokens, columns]
  const float* x_scales;  // [columns / 128, tokens rounded up to 4]
  const uint32_t* slots;
  const uint32_t* counts;
  int bucket;     // these three as in ExpertsTensorArgs
  uint8_t* q;     // out [tokens top_k, columns]; places after the last slot with an expert here are not written
  float* scales;  // out [columns / 128, tokens top_k rounded up to 4]
  int tokens, top_k, columns, experts;
};

/// One of the experts' products with FP8 weights and activations.
struct Fp8ExpertsArgs {
  const uint8_t* q;     // [T K, H] or [T K, I], in order of experts
  const float* scales;  // [columns / 128, T K rounded up to 4]
  QuantPack w;          // w13 or w2
  const uint32_t* slots;
  const uint32_t* counts;
  int bucket;  // these three as in ExpertsTensorArgs
  void* out;  // E4M3 [T K, I] in order of experts, in the order of columns of fp8_product.cuh, or bf16 [T K, H] by slot
  float* out_scales;  // of out, [I / 128, T K rounded up to 4]; null for down
  int tokens, top_k;
};

/// A dense product of FP8 weights and activations.
struct Fp8LinearArgs {
  const uint8_t* q;           // [m, k], by quads
  const float* scales;        // [k / 128, m rounded up to 4]
  QuantPack w;                // one matrix without gate and up
  const __nv_bfloat16* bias;  // [n] or null
  void* out;                  // [m, n]
  Output output;
  int m;
  int splits;  // of k, 1 .. 8; 0: what was measured to be best
};

}  // namespace moe

extern "C" int moe_quant_experts_tensor(const moe::QuantExpertsTensorArgs* args, void* stream);
extern "C" int moe_quant_experts_wide(const moe::QuantExpertsTensorArgs* args, void* stream);
extern "C" int moe_quant_linear_tensor(const moe::QuantLinearTensorArgs* args, void* stream);
extern "C" int moe_quant_linear_stream(const moe::QuantLinearStreamArgs* args, void* stream);
extern "C" int moe_quant_layer_stream(const moe::QuantLayerStreamArgs* args, void* stream);
extern "C" int moe_quant_experts_stream(const moe::QuantExpertsStreamArgs* args, void* stream);
extern "C" int moe_any_quant_linear(const moe::AnyQuantLinearArgs* args, void* stream);
extern "C" int moe_any_quant_gate_up(const moe::AnyQuantGateUpArgs* args, void* stream);
extern "C" int moe_any_quant_down(const moe::AnyQuantDownArgs* args, void* stream);
extern "C" int moe_any_dequantise(const moe::QuantPack* w, void* out, moe::Dtype dtype, void* stream);
extern "C" int moe_quant_dequantise(const moe::QuantPack* w, __nv_bfloat16* out, void* stream);
extern "C" int moe_order_rows(const moe::OrderRowsArgs* args, void* stream);
extern "C" int moe_fp8_quantise(const moe::Fp8QuantiseArgs* args, void* stream);
extern "C" int moe_fp8_places(const moe::Fp8PlacesArgs* args, void* stream);
extern "C" int moe_fp8_experts_gate_up(const moe::Fp8ExpertsArgs* args, void* stream);
extern "C" int moe_fp8_linear(const moe::Fp8LinearArgs* args, void* stream);
extern "C" int moe_fp8_rows(const moe::QuantPack* w, uint8_t* rows, float* scales, void* stream);
extern "C" int moe_fp8_experts_down(const moe::Fp8ExpertsArgs* args, void* stream);
