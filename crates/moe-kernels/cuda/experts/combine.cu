// The end of a sparse layer: the weighted sum of each token's expert rows, alone or with the addition to the residual
// stream and the next layer's RMS norm.
//
// Floor: 4 T K H bytes of rows out of L2 (Qwen3-30B-A3B, T = 64: 4 MB, under 1 us; 256: 17 MB, 3.5 us). At small T the time is
// latency: so the fused form reads ids, weights, rows and residual at once, and takes the place of two launches.
#include "experts/combine.cuh"
#include "rows/norm.cuh"

namespace moe {
namespace {

__global__ __launch_bounds__(256) void combine(const __grid_constant__ CombineArgs a) {
  pdl_launch_dependents();
  pdl_wait();
  combine_share(a);
}

/// Adds the weighted sum of a token's rows, columns `at` .. `at` + 7, to `x`. Rows of absent slots are read, at once with
/// ids and weights, and not used.
__device__ __forceinline__ void add_rows(const CombineArgs& a, int at, float (&x)[kVector]) {
  constexpr int kBatch = 8;  // slots in flight
  float sum[kVector] = {};
  for (int first = 0; first < a.top_k; first += kBatch) {
    float weight[kBatch];
    bool present[kBatch];
    float4 row[kBatch][2];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int slot = blockIdx.x * a.top_k + min(first + b, a.top_k - 1);
      const float4* from = reinterpret_cast<const float4*>(a.slot_rows + static_cast<size_t>(slot) * a.hidden + at);
      row[b][0] = __ldcg(from), row[b][1] = __ldcg(from + 1);
      weight[b] = a.topk_weights[slot];
      present[b] = first + b < a.top_k && local_expert(a.topk_ids[slot], a.expert_map, a.num_ids, a.num_local) >= 0;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (!present[b]) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum[4 * i] = fmaf(weight[b], row[b][i].x, sum[4 * i]);
        sum[4 * i + 1] = fmaf(weight[b], row[b][i].y, sum[4 * i + 1]);
        sum[4 * i + 2] = fmaf(weight[b], row[b][i].z, sum[4 * i + 2]);
        sum[4 * i + 3] = fmaf(weight[b], row[b][i].w, sum[4 * i + 3]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] += sum[i];
}

/// One token per block.
__global__ __launch_bounds__(kThreads) void combine_add_norm(const __grid_constant__ CombineArgs a, float* residual,
                                                             const bf16* weight, float eps, bf16* out) {
  extern __shared__ __align__(16) uint8_t smem[];
  float* parts = reinterpret_cast<float*>(smem);
  float* row = parts + kThreads / 32;
  uint4* gain = reinterpret_cast<uint4*>(row + a.hidden);
  fetch_gain(gain, weight, a.hidden);
  pdl_launch_dependents();
  pdl_wait();
  const size_t base = static_cast<size_t>(blockIdx.x) * a.hidden;
  float squares = 0.f;
  for (int at = threadIdx.x * kVector; at < a.hidden; at += kThreads * kVector) {
    float4* stream = reinterpret_cast<float4*>(residual + base + at);
    const float4 low = __ldcg(stream), high = __ldcg(stream + 1);
    float x[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    add_rows(a, at, x);
    stream[0] = {x[0], x[1], x[2], x[3]};
    stream[1] = {x[4], x[5], x[6], x[7]};
#pragma unroll
    for (int half = 0; half < kVector; half += 4)
      squares += x[half] * x[half] + x[half + 1] * x[half + 1] + x[half + 2] * x[half + 2] + x[half + 3] * x[half + 3];
#pragma unroll
    for (int i = 0; i < kVector; ++i) row[at + i] = x[i];
  }
  write_norm(row, gain, squares, parts, eps, out + base, a.hidden);
}

bool valid(int tokens, int top_k, int num_ids, int num_local, int hidden) {
  return tokens >= 0 && top_k > 0 && num_ids > 0 && num_local > 0 && hidden > 0;
}

}  // namespace
}  // namespace moe

/// out[t] = sum over k of topk_weights[t, k] slot_rows[t, k], k ascending in f32; out [T, H], bf16
/// (`output` 0) or f32 (1). Rows of slots without a local expert are not used, whatever they hold.
extern "C" int moe_combine(const void* slot_rows, const void* topk_ids, const void* topk_weights,
                           const void* expert_map, void* out, int tokens, int top_k, int num_ids, int num_local,
                           int hidden, int output, void* stream) {
  using namespace moe;
  if (!valid(tokens, top_k, num_ids, num_local, hidden) || hidden % 4 != 0 || output < 0 || output > 1)
    return cudaErrorInvalidValue;
  if (tokens == 0) return cudaSuccess;
  const CombineArgs args = {static_cast<const float*>(slot_rows), static_cast<const uint32_t*>(topk_ids),
                            static_cast<const float*>(topk_weights), static_cast<const int32_t*>(expert_map),
                            output == 1 ? nullptr : static_cast<bf16*>(out),
                            output == 1 ? static_cast<float*>(out) : nullptr, tokens, top_k, num_ids, num_local, hidden};
  const int64_t blocks = ceil_div(static_cast<int64_t>(tokens) * (hidden / 4), 256);
  return launch(combine, {dim3(static_cast<unsigned>(blocks)), dim3(256), stream}, args);
}

/// residual += what moe_combine computes, then out = residual / rms(residual) * weight, bit for bit as moe_combine and
/// moe_add_rms_norm one after the other. residual [T, H] f32, weight [H] and out [T, H] bf16; H a multiple of 8.
extern "C" int moe_combine_add_rms_norm(const void* slot_rows, const void* topk_ids, const void* topk_weights,
                                        const void* expert_map, void* residual, const void* weight, float eps, void* out,
                                        int tokens, int top_k, int num_ids, int num_local, int hidden, void* stream) {
  using namespace moe;
  if (!valid(tokens, top_k, num_ids, num_local, hidden) || hidden % kVector != 0) return cudaErrorInvalidValue;
  if (tokens == 0) return cudaSuccess;
  const CombineArgs args = {static_cast<const float*>(slot_rows), static_cast<const uint32_t*>(topk_ids),
                            static_cast<const float*>(topk_weights), static_cast<const int32_t*>(expert_map), nullptr,
                            nullptr, tokens, top_k, num_ids, num_local, hidden};
  return launch(combine_add_norm, {dim3(tokens), dim3(kThreads), stream, norm_smem(hidden)}, args,
                static_cast<float*>(residual), static_cast<const bf16*>(weight), eps, static_cast<bf16*>(out));
}
