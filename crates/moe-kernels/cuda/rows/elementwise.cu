// Row-wise kernels between the products: embedding lookup, RMS norm, residual addition + RMS norm.
//
// The residual stream is f32, as on the CPU: T x H x 4 bytes (8 KB per token of Qwen3-30B-A3B) that stay in L2.
//
// rms_norm: reads 4 H, writes 2 H bytes per row; add_rms_norm: reads 8 H, writes 6 H. At H = 2,048 and 256 rows
// that is 7 MB out of L2 (4.0 us measured), at 8,192 rows 235 MB, 51 us at 4.59 TB/s (66.4 measured).
//
// The embedding is the first kernel of a step. It lets the next kernel begin only when the kernels before the embedding
// have ended. So every kernel of the step may read data that was written before the step (KV cache, block tables,
// positions) before its pdl_wait.
#include "rows/norm.cuh"

namespace moe {
namespace {

/// out[t] = table[ids[t]]; zeros if the id is no token (padding rows).
__global__ void __launch_bounds__(kThreads)
    embedding_kernel(const bf16* table, const uint32_t* ids, float* out, int hidden, uint32_t vocab) {
  pdl_wait();
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

/// Rows of f32 to add.
struct Delta {
  const float* delta;
  int hidden;
  static constexpr uint32_t kBytes = kResidualBytes;

  __device__ __forceinline__ int parts() const { return 1; }
  __device__ __forceinline__ void fetch(uint8_t* to, const Unit& u, int left) const {
    copy_columns(to, delta + static_cast<size_t>(u.row) * hidden + u.column(), left);
  }
  __device__ __forceinline__ void add(const uint8_t* from, int, float (&sum)[kVector]) const {
    read_columns(from, sum);
  }
};

/// Adds nothing to the rows.
struct Nothing {
  static constexpr uint32_t kBytes = 0;

  __device__ __forceinline__ int parts() const { return 1; }
  __device__ __forceinline__ void fetch(uint8_t*, const Unit&, int) const {}
  __device__ __forceinline__ void add(const uint8_t*, int, float (&)[kVector]) const {}
};

template <int kBlocks, class Source>
int norm(const Source& source, const NormRows& a, void* stream) {
  if (a.rows < 0 || a.hidden <= 0 || a.hidden % kVector != 0) return cudaErrorInvalidValue;
  if (a.rows == 0) return cudaSuccess;
  return launch_norm<4, kBlocks>(source, a, stream);
}

}  // namespace
}  // namespace moe

using moe::bf16;

/// out [tokens, hidden] f32 = rows of `table` [vocab, hidden]; zeros if an id is not below `vocab`.
extern "C" int moe_embedding(const bf16* table, const uint32_t* ids, float* out, int tokens, int hidden, int vocab,
                             void* stream) {
  if (tokens < 0 || hidden <= 0 || hidden % moe::kVector != 0) return cudaErrorInvalidValue;
  if (tokens == 0) return cudaSuccess;
  const moe::Launch l = {dim3(tokens, moe::ceil_div(hidden, moe::kThreads * moe::kVector)), dim3(moe::kThreads),
                         stream};
  return moe::launch(moe::embedding_kernel, l, table, ids, out, hidden, static_cast<uint32_t>(vocab));
}

/// out [rows, hidden] = x / rms(x) * weight, x f32, rounded once to bf16.
extern "C" int moe_rms_norm(const float* x, const bf16* weight, float eps, bf16* out, int rows, int hidden,
                            void* stream) {
  return moe::norm<2>(moe::Nothing{}, {const_cast<float*>(x), weight, eps, out, rows, hidden, {}}, stream);
}

/// residual += delta, then out = residual / rms(residual) * weight.
extern "C" int moe_add_rms_norm(const float* delta, float* residual, const bf16* weight, float eps, bf16* out, int rows,
                                int hidden, void* stream) {
  return moe::norm<1>(moe::Delta{delta, hidden}, {residual, weight, eps, out, rows, hidden, {}}, stream);
}
