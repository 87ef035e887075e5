// RMS norm of each value head, times its weight and the SiLU of its gate: a warp per row and head. Floor: 8 bytes read
// and an element written per column.
#include "any/any.cuh"
#include "delta/args.cuh"
#include "delta/vectors.cuh"

namespace moe {
namespace {

constexpr int kWarps = kAnyThreads / 32;

template <class T>
__global__ void __launch_bounds__(kAnyThreads) gated_norm(const GatedNormArgs a) {
  pdl_launch_dependents();
  pdl_wait();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (at >= static_cast<int64_t>(a.rows) * a.heads) return;
  const int lane = threadIdx.x % 32;
  const float* x = a.x + at * a.dim;
  const float* z = a.z + at / a.heads * a.stride + at % a.heads * a.dim;
  T* out = static_cast<T*>(a.out) + at * a.dim;
  float squares = 0;
  for (int i = lane; i < a.dim; i += 32) squares = fmaf(x[i], x[i], squares);
  const float scale = 1.f / sqrtf(warp_sum(squares) / static_cast<float>(a.dim) + a.eps);
  for (int i = lane; i < a.dim; i += 32) out[i] = narrow<T>(silu(z[i]) * (x[i] * scale * a.weight[i]));
}

}  // namespace
}  // namespace moe

extern "C" int moe_gated_rms_norm(const moe::GatedNormArgs* args, void* stream) {
  using namespace moe;
  const GatedNormArgs& a = *args;
  if (a.rows < 0 || a.heads < 0 || a.dim < 0 || a.stride < 0) return cudaErrorInvalidValue;
  if (a.rows == 0 || a.heads == 0 || a.dim == 0) return cudaSuccess;
  const int64_t blocks = ceil_div(static_cast<int64_t>(a.rows) * a.heads, kWarps);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return with_dtype(a.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    return launch(gated_norm<T>, {dim3(static_cast<unsigned>(blocks)), dim3(kAnyThreads), stream}, a);
  });
}
