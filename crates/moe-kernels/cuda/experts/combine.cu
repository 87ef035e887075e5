// The end of a sparse layer: the weighted sum of each token's expert rows, alone or with the addition to the residual
// stream and the next layer's RMS norm.
//
// Floor: 4 T K H bytes of f32 rows out of L2 (Qwen3-30B-A3B, T = 64: 4 MB, under 1 us; 256: 17 MB, 3.5 us), half of it
// for bf16 rows, which come from memory (T = 8,192: 268 MB, 58 us at 4.59 TB/s). At small T the time is latency: so the
// fused form reads ids, weights, rows and residual at once, and takes the place of two launches.
#include "experts/combine.cuh"
#include "rows/norm.cuh"

namespace moe {
namespace {

template <class Row>
__global__ __launch_bounds__(256) void combine(const __grid_constant__ Combine<Row> a) {
  pdl_launch_dependents();
  pdl_wait();
  combine_share(a);
}

/// Adds the weighted sum of a token's rows, columns `at` .. `at` + 7, to `x`. Rows of absent slots are read, at once
/// with ids and weights, and not used.
template <class Row>
__device__ __forceinline__ void add_rows(const Combine<Row>& a, int at, float (&x)[kVector]) {
  constexpr int kBatch = 8, kColumns = Combine<Row>::kColumns, kParts = kVector / kColumns;  // slots in flight
  float sum[kParts][kColumns] = {};
  for (int first = 0; first < a.top_k; first += kBatch) {
    float weight[kBatch];
    bool present[kBatch];
    uint4 row[kBatch][kParts];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int slot = blockIdx.x * a.top_k + min(first + b, a.top_k - 1);
#pragma unroll
      for (int i = 0; i < kParts; ++i) row[b][i] = a.load(slot, at + i * kColumns);
      weight[b] = a.topk_weights[slot];
      present[b] = first + b < a.top_k && local_expert(a.topk_ids[slot], a.expert_map, a.num_ids, a.num_local) >= 0;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (!present[b]) continue;
#pragma unroll
      for (int i = 0; i < kParts; ++i) add_weighted(weight[b], row[b][i], sum[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] += sum[i / kColumns][i % kColumns];
}

/// One token per block.
template <class Row>
__global__ __launch_bounds__(kThreads) void combine_add_norm(const __grid_constant__ Combine<Row> a, float* residual,
                                                             const bf16* weight, float eps, bf16* out) {
  extern __shared__ __align__(16) uint8_t smem[];
  float* parts = reinterpret_cast<float*>(smem);
  float* row = parts + kThreads / 32;
  uint4* norm_weight = reinterpret_cast<uint4*>(row + a.hidden);
  fetch_norm_weight(norm_weight, weight, a.hidden);
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
  write_norm(row, norm_weight, squares, parts, eps, out + base, a.hidden);
}

bool valid(const CombineArgs& c) {
  return c.tokens >= 0 && c.top_k > 0 && c.num_ids > 0 && c.num_local > 0 && c.hidden > 0 &&
         is_code(c.rows, Dtype::kBf16);
}

/// What the kernels read; `out` and `out_f32` say where the sum goes.
template <class Row>
Combine<Row> combine_of(const CombineArgs& c, bf16* out, float* out_f32) {
  return {static_cast<const Row*>(c.slot_rows),
          c.topk_ids,
          c.topk_weights,
          c.expert_map,
          out,
          out_f32,
          c.tokens,
          c.top_k,
          c.num_ids,
          c.num_local,
          c.hidden};
}

template <class Row>
cudaError_t run(const CombineArgs& c, void* stream) {
  const Combine<Row> a = c.output == Output::kF32 ? combine_of<Row>(c, nullptr, static_cast<float*>(c.out))
                                                  : combine_of<Row>(c, static_cast<bf16*>(c.out), nullptr);
  const int64_t blocks = ceil_div(static_cast<int64_t>(c.tokens) * (c.hidden / Combine<Row>::kColumns), 256);
  return launch(combine<Row>, {dim3(static_cast<unsigned>(blocks)), dim3(256), stream}, a);
}

template <class Row>
cudaError_t run_add_norm(const CombineArgs& c, float* residual, const bf16* weight, float eps, void* stream) {
  return launch(combine_add_norm<Row>, {dim3(c.tokens), dim3(kThreads), stream, norm_smem(c.hidden)},
                combine_of<Row>(c, nullptr, nullptr), residual, weight, eps, static_cast<bf16*>(c.out));
}

}  // namespace
}  // namespace moe

/// out[t] = sum over k of topk_weights[t, k] slot_rows[t, k], k ascending in f32; H a multiple of 4, of 8 for bf16
/// rows.
extern "C" int moe_combine(const moe::CombineArgs* args, void* stream) {
  using namespace moe;
  const CombineArgs& c = *args;
  if (!valid(c) || c.hidden % (c.rows == Dtype::kF32 ? 4 : 8) != 0 || !is_code(c.output, Output::kBf16))
    return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  return c.rows == Dtype::kF32 ? run<float>(c, stream) : run<bf16>(c, stream);
}

/// residual [T, H] f32 += what moe_combine computes, then out = residual / rms(residual) * weight [H], bit for bit as
/// moe_combine and moe_add_rms_norm one after the other; `output` is kBf16, H a multiple of 8.
extern "C" int moe_combine_add_rms_norm(const moe::CombineArgs* args, float* residual, const __nv_bfloat16* weight,
                                        float eps, void* stream) {
  using namespace moe;
  const CombineArgs& c = *args;
  if (!valid(c) || c.hidden % kVector != 0 || c.output != Output::kBf16) return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  return c.rows == Dtype::kF32 ? run_add_norm<float>(c, residual, weight, eps, stream)
                               : run_add_norm<bf16>(c, residual, weight, eps, stream);
}
