// The weighted sum of a token's expert rows, k ascending in f32 with one rounding at the end, if any, so that
// the result does not depend on which block or kernel adds it.
#pragma once

#include "experts/align.cuh"

namespace moe {

struct Combine {
  const float* slot_rows;  // [T, K, H], unweighted
  const uint32_t* topk_ids;
  const float* topk_weights;  // [T, K]
  const int32_t* expert_map;
  bf16* out;  // [T, H], or null: out_f32 instead
  float* out_f32;
  int tokens, top_k, num_ids, num_local, hidden;
};

/// Columns 4 i .. 4 i + 3 of one token. Rows of slots without a local expert are read, at once
/// with ids and weights, and not used. Bypasses L1:
/// other blocks of the same launch may have written the rows.
__device__ __forceinline__ void combine_columns(const Combine& a, int token, int i) {
  constexpr int kBatch = 8;  // independent loads in flight
  float4 sum = {0, 0, 0, 0};
  for (int first = 0; first < a.top_k; first += kBatch) {
    float weight[kBatch];
    float4 row[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int k = first + b;
      const int slot = token * a.top_k + min(k, a.top_k - 1);
      const bool present = k < a.top_k && local_expert(a.topk_ids[slot], a.expert_map, a.num_ids, a.num_local) >= 0;
      weight[b] = present ? a.topk_weights[slot] : 0;
      const float4* at = reinterpret_cast<const float4*>(a.slot_rows + static_cast<size_t>(slot) * a.hidden);
      row[b] = __ldcg(at + i);
      if (!present) row[b] = float4{0, 0, 0, 0};
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      sum.x = fmaf(weight[b], row[b].x, sum.x);
      sum.y = fmaf(weight[b], row[b].y, sum.y);
      sum.z = fmaf(weight[b], row[b].z, sum.z);
      sum.w = fmaf(weight[b], row[b].w, sum.w);
    }
  }
  const size_t at = static_cast<size_t>(token) * a.hidden;
  if (a.out == nullptr) {
    reinterpret_cast<float4*>(a.out_f32 + at)[i] = sum;
  } else {
    reinterpret_cast<uint2*>(a.out + at)[i] = {pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w)};
  }
}

/// This block's share of all tokens and columns.
__device__ __forceinline__ void combine_share(const Combine& a) {
  const int columns = a.hidden / 4;
  const int64_t total = static_cast<int64_t>(a.tokens) * columns;
  // Neighbouring groups of 32 go to different blocks: with one token all blocks still take part.
  const int64_t lane_group = static_cast<int64_t>(threadIdx.x / 32) * gridDim.x + blockIdx.x;
  const int64_t step = static_cast<int64_t>(blockDim.x) * gridDim.x;
  for (int64_t at = lane_group * 32 + threadIdx.x % 32; at < total; at += step)
    combine_columns(a, static_cast<int>(at / columns), static_cast<int>(at % columns));
}

}  // namespace moe
