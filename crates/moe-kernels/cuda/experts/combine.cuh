// The weighted sum of a token's expert rows, k ascending in f32 with at most one rounding, at the end. So the result
// does not depend on which block or kernel adds it.
#pragma once

#include "experts/align.cuh"

namespace moe {

/// The sum of slot rows that are f32 or, from moe_experts_wide, bf16.
template <class Row>
struct Combine {
  const Row* slot_rows;  // [T, K, H], unweighted
  const uint32_t* topk_ids;
  const float* topk_weights;  // [T, K]
  const int32_t* expert_map;
  bf16* out;  // [T, H], or null: out_f32 instead
  float* out_f32;
  int tokens, top_k, num_ids, num_local, hidden;

  static constexpr int kColumns = 16 / sizeof(Row);  // columns that a thread loads at once

  /// Loads `kColumns` columns of a slot from `column` on. It bypasses L1, because other blocks of the same launch may
  /// have written the row.
  __device__ __forceinline__ uint4 load(int slot, int column) const {
    return __ldcg(reinterpret_cast<const uint4*>(slot_rows + static_cast<size_t>(slot) * hidden + column));
  }
};

/// sum[at ..] += weight * row, for the columns that a thread loads at once: 4 of f32, 8 of bf16.
template <int kCount>
__device__ __forceinline__ void add_weighted(float weight, const uint4& row, float (&sum)[kCount], int at, float) {
  const uint32_t word[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[at + i] = fmaf(weight, __uint_as_float(word[i]), sum[at + i]);
}

template <int kCount>
__device__ __forceinline__ void add_weighted(float weight, const uint4& row, float (&sum)[kCount], int at, bf16) {
  const uint32_t word[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_bf16(word[i]);
    sum[at + 2 * i] = fmaf(weight, pair.x, sum[at + 2 * i]);
    sum[at + 2 * i + 1] = fmaf(weight, pair.y, sum[at + 2 * i + 1]);
  }
}

/// Adds the i-th kColumns columns of one token. Without kPresent, all rows are loaded at the same time as ids and
/// weights, and the rows of slots without a local expert are not used. With kPresent, these rows are not loaded. The
/// loads then wait for the ids, which is worth it where most slots belong to other ranks.
template <bool kPresent, class Row>
__device__ __forceinline__ void combine_columns(const Combine<Row>& a, int token, int i) {
  constexpr int kBatch = 8, kColumns = Combine<Row>::kColumns;  // independent loads in flight
  float sum[kColumns] = {};
  for (int first = 0; first < a.top_k; first += kBatch) {
    float weight[kBatch];
    uint4 row[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int k = first + b;
      const int slot = token * a.top_k + min(k, a.top_k - 1);
      const bool present = k < a.top_k && local_expert(a.topk_ids[slot], a.expert_map, a.num_ids, a.num_local) >= 0;
      weight[b] = present ? a.topk_weights[slot] : 0;
      row[b] = uint4{0, 0, 0, 0};
      if constexpr (kPresent) {
        if (present) row[b] = a.load(slot, i * kColumns);
      } else {
        const uint4 any = a.load(slot, i * kColumns);
        if (present) row[b] = any;
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) add_weighted(weight[b], row[b], sum, 0, Row());
  }
  const size_t at = static_cast<size_t>(token) * a.hidden + i * kColumns;
#pragma unroll
  for (int c = 0; c < kColumns; c += 4) {
    if (a.out == nullptr) {
      *reinterpret_cast<float4*>(a.out_f32 + at + c) = {sum[c], sum[c + 1], sum[c + 2], sum[c + 3]};
    } else {
      *reinterpret_cast<uint2*>(a.out + at + c) = {pack_bf16(sum[c], sum[c + 1]), pack_bf16(sum[c + 2], sum[c + 3])};
    }
  }
}

/// This block's share of all tokens and columns.
template <bool kPresent = false, class Row>
__device__ __forceinline__ void combine_share(const Combine<Row>& a) {
  const int columns = a.hidden / Combine<Row>::kColumns;
  const int64_t total = static_cast<int64_t>(a.tokens) * columns;
  // Neighbouring groups of 32 belong to different blocks, so that all blocks take part even with one token.
  const int64_t lane_group = static_cast<int64_t>(threadIdx.x / 32) * gridDim.x + blockIdx.x;
  const int64_t step = static_cast<int64_t>(blockDim.x) * gridDim.x;
  for (int64_t at = lane_group * 32 + threadIdx.x % 32; at < total; at += step)
    combine_columns<kPresent>(a, static_cast<int>(at / columns), static_cast<int>(at % columns));
}

}  // namespace moe
