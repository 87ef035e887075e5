// Row-wise kernels between the products: embedding lookup, RMS norm, residual addition + RMS norm.
//
// The residual stream is f32, as on the CPU: T x H x 4 bytes (8 KB per token of Qwen3-30B-A3B) that stay in L2.
//
// rms_norm: reads 4 H, writes 2 H bytes per row; add_rms_norm: reads 8 H, writes 6 H. At H = 2,048 and 256 rows
// that is 7 MB out of L2: under 2 us. One row per block, so that even one row is spread over 256 threads: the
// time of such a kernel at small T is latency (one L2 load, one block reduction, one store), not bytes. The row
// stays in shared memory between the two passes; the norm's weight is fetched before pdl_wait().
//
// The first kernel of a step, the embedding, does not overlap the kernel ahead of it. So whatever was written
// before a step (KV cache, block tables, positions) may be read by every kernel of the step before its pdl_wait.
#include "rows/norm.cuh"

namespace moe {
namespace {

/// out[t] = table[ids[t]], zeros where the id is no token (padding rows).
__global__ void __launch_bounds__(kThreads)
    embedding_kernel(const bf16* table, const uint32_t* ids, float* out, int hidden, uint32_t vocab) {
  pdl_launch_dependents();
  const uint32_t id = ids[blockIdx.x];
  const int at = (blockIdx.y * kThreads + threadIdx.x) * kVector;
  if (at >= hidden) return;
  float x[kVector] = {};
  if (id < vocab) widen(load_stream(table + static_cast<size_t>(id) * hidden + at), x);
  float4* to = reinterpret_cast<float4*>(out + static_cast<size_t>(blockIdx.x) * hidden + at);
  to[0] = {x[0], x[1], x[2], x[3]};
  to[1] = {x[4], x[5], x[6], x[7]};
}

/// residual += delta (if kAdd), out = norm(residual); one row per block.
template <bool kAdd>
__global__ void __launch_bounds__(kThreads)
    norm_kernel(const float* delta, float* residual, const bf16* weight, float eps, bf16* out, int hidden) {
  extern __shared__ __align__(16) uint8_t smem[];
  float* parts = reinterpret_cast<float*>(smem);
  float* row = parts + kThreads / 32;
  uint4* norm_weight = reinterpret_cast<uint4*>(row + hidden);
  // Each thread touches only what it wrote itself, so that no barrier is needed around the row.
  fetch_norm_weight(norm_weight, weight, hidden);
  pdl_launch_dependents();
  pdl_wait();
  const size_t base = static_cast<size_t>(blockIdx.x) * hidden;
  float squares = 0.f;
  for (int at = threadIdx.x * kVector; at < hidden; at += kThreads * kVector) {
#pragma unroll
    for (int half = 0; half < kVector; half += 4) {
      float4 x = __ldcg(reinterpret_cast<const float4*>(residual + base + at + half));
      if constexpr (kAdd) {
        const float4 d = __ldcg(reinterpret_cast<const float4*>(delta + base + at + half));
        x = {x.x + d.x, x.y + d.y, x.z + d.z, x.w + d.w};
        *reinterpret_cast<float4*>(residual + base + at + half) = x;
      }
      *reinterpret_cast<float4*>(row + at + half) = x;
      squares += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
    }
  }
  write_norm(row, norm_weight, squares, parts, eps, out + base, hidden);
}

template <bool kAdd>
int norm(const float* delta, float* residual, const bf16* weight, float eps, bf16* out, int rows, int hidden,
         void* stream) {
  if (rows < 0 || hidden <= 0 || hidden % kVector != 0) return cudaErrorInvalidValue;
  if (rows == 0) return cudaSuccess;
  const Launch l = {dim3(rows), dim3(kThreads), stream, norm_smem(hidden)};
  return launch(norm_kernel<kAdd>, l, delta, residual, weight, eps, out, hidden);
}

}  // namespace
}  // namespace moe

using moe::bf16;

/// out [tokens, hidden] f32 = rows of `table` [vocab, hidden]; zeros where an id is not below `vocab`.
extern "C" int moe_embedding(const bf16* table, const uint32_t* ids, float* out, int tokens, int hidden, int vocab,
                             void* stream) {
  if (tokens < 0 || hidden <= 0 || hidden % moe::kVector != 0) return cudaErrorInvalidValue;
  if (tokens == 0) return cudaSuccess;
  moe::Launch l = {dim3(tokens, moe::ceil_div(hidden, moe::kThreads * moe::kVector)), dim3(moe::kThreads), stream};
  l.overlap = false;
  return moe::launch(moe::embedding_kernel, l, table, ids, out, hidden, static_cast<uint32_t>(vocab));
}

/// out [rows, hidden] = x / rms(x) * weight, x f32, rounded once to bf16.
extern "C" int moe_rms_norm(const float* x, const bf16* weight, float eps, bf16* out, int rows, int hidden,
                            void* stream) {
  return moe::norm<false>(nullptr, const_cast<float*>(x), weight, eps, out, rows, hidden, stream);
}

/// residual += delta, then out = residual / rms(residual) * weight.
extern "C" int moe_add_rms_norm(const float* delta, float* residual, const bf16* weight, float eps, bf16* out, int rows,
                                int hidden, void* stream) {
  return moe::norm<true>(delta, residual, weight, eps, out, rows, hidden, stream);
}
