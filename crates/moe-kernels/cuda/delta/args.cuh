// Arguments of the kernels of linear attention by the gated delta rule. All arrays but the norm's output are f32 or u32
// and aligned to their elements.
#pragma once

#include <cstdint>

#include "codes.cuh"

namespace moe {

/// A causal convolution with SiLU over the rows of each sequence.
///
/// Sequence s has the rows from query_start_loc[s] to query_start_loc[s + 1]. A sequence whose state does not exist
/// reads and writes no state; its first width - 1 rows are then zeros.
struct CausalConvArgs {
  const float* projected;           // [tokens, stride], of which the first `channels` columns are read
  const float* weight;              // [width, channels]
  const uint32_t* query_start_loc;  // [sequences + 1] ascending from 0; rows after the last become zeros
  const uint32_t* positions;        // [tokens]; a sequence whose first row is at 0 begins with an empty state
  const uint32_t* numbers;          // [sequences] each sequence's state, distinct among those that have rows
  float* states;                    // [num_states, width - 1, channels]
  float* out;                       // [tokens, channels]
  int tokens, sequences, num_states, stride, channels;
  int width;  // 1 to 8
};

/// The gated delta rule over the rows of each sequence. Sequences are the same as in CausalConvArgs; the rows of one
/// whose state does not exist become zeros.
///
/// moe_gated_delta computes all rows one after the other. moe_gated_delta_chunks does so with sequences of fewer than
/// 64 rows and computes the others in chunks of 64 rows, some chunks at a time. Only it reads `workspace` and `chunks`.
struct GatedDeltaArgs {
  const float* mixed;      // [tokens, channels]: q, k of all key heads, v of all value heads
  const float* projected;  // [tokens, channels + value_heads value_dim + 2 value_heads]: b and a are the last columns
  const float* a_log;      // [value_heads]
  const float* dt_bias;    // [value_heads]
  const uint32_t* query_start_loc;
  const uint32_t* positions;
  const uint32_t* numbers;
  float* states;  // [num_states, value_heads, key_dim, value_dim]
  float* out;     // [tokens, value_heads value_dim]
  int tokens, sequences, num_states, key_heads, value_heads, key_dim, value_dim;
  uint8_t* workspace;  // [chunks, 49,152 key_heads + 20,992 value_heads], 16-byte aligned
  int chunks;          // chunks that the workspace has room for, at least 1
};

/// out = x / sqrt(mean(x^2) + eps) * weight * SiLU(z), for each row and head.
struct GatedNormArgs {
  const float* x;       // [rows, heads, dim]
  const float* z;       // [rows, heads, dim], rows `stride` elements apart
  const float* weight;  // [dim]
  void* out;            // [rows, heads, dim] of `dtype`
  Dtype dtype;
  int rows, heads, dim, stride;
  float eps;
};

}  // namespace moe

extern "C" int moe_causal_conv(const moe::CausalConvArgs* args, void* stream);
extern "C" int moe_gated_delta(const moe::GatedDeltaArgs* args, void* stream);
extern "C" int moe_gated_delta_chunks(const moe::GatedDeltaArgs* args, void* stream);
extern "C" int moe_gated_rms_norm(const moe::GatedNormArgs* args, void* stream);
