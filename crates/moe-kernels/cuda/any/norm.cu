// RMS norm, residual addition + RMS norm, and softmax of any dtype and width: a block per row, which it reads twice
// (the second time from L1 or L2).
#include "any/any.cuh"

namespace moe {
namespace {

/// residual = round(residual + delta) if kAdd; out = residual / rms(residual) * weight.
template <bool kAdd, class T, class S, class W>
__global__ void __launch_bounds__(kAnyThreads)
    norm(const S* delta, S* residual, const W* weight, float eps, T* out, int width) {
  pdl_wait();
  const size_t base = static_cast<size_t>(blockIdx.x) * width;
  float squares = 0;
  for (int i = threadIdx.x; i < width; i += kAnyThreads) {
    if constexpr (kAdd) residual[base + i] = narrow<S>(widen(residual[base + i]) + widen(delta[base + i]));
    const float x = widen(residual[base + i]);
    squares += x * x;
  }
  const float scale = 1.f / sqrtf(any_block_sum(squares) / width + eps);
  for (int i = threadIdx.x; i < width; i += kAnyThreads)
    out[base + i] = narrow<T>(widen(residual[base + i]) * scale * widen(weight[i]));
}

__global__ void __launch_bounds__(kAnyThreads) softmax(const float* x, float* out, int width) {
  pdl_wait();
  const size_t base = static_cast<size_t>(blockIdx.x) * width;
  float top = -INFINITY, sum = 0;
  for (int i = threadIdx.x; i < width; i += kAnyThreads) top = fmaxf(top, x[base + i]);
  top = any_block_max(top);
  for (int i = threadIdx.x; i < width; i += kAnyThreads) {
    const float e = expf(x[base + i] - top);
    out[base + i] = e;
    sum += e;
  }
  sum = any_block_sum(sum);
  for (int i = threadIdx.x; i < width; i += kAnyThreads) out[base + i] /= sum;
}

template <bool kAdd>
int any_norm(const void* delta, void* residual, const void* weight, float eps, void* out, Dtype dtype,
             Dtype stream_dtype, Dtype weight_dtype, int rows, int width, void* stream) {
  if (rows < 0 || width < 0) return cudaErrorInvalidValue;
  if (rows == 0 || width == 0) return cudaSuccess;
  return with_stream(dtype, stream_dtype, [&](auto t, auto s) {
    using T = typename decltype(t)::type;
    using S = typename decltype(s)::type;
    return with_stream(dtype, weight_dtype, [&](auto, auto w) {
      using W = typename decltype(w)::type;
      return launch(norm<kAdd, T, S, W>, {dim3(rows), dim3(kAnyThreads), stream}, static_cast<const S*>(delta),
                    static_cast<S*>(residual), static_cast<const W*>(weight), eps, static_cast<T*>(out), width);
    });
  });
}

}  // namespace
}  // namespace moe

/// out [rows, width] = x / rms(x) * weight. `out` is of `dtype`; x of `stream_dtype` and `weight` [width] of
/// `weight_dtype`, each the same or f32.
extern "C" int moe_any_rms_norm(const void* x, const void* weight, float eps, void* out, moe::Dtype dtype,
                                moe::Dtype stream_dtype, moe::Dtype weight_dtype, int rows, int width, void* stream) {
  return moe::any_norm<false>(nullptr, const_cast<void*>(x), weight, eps, out, dtype, stream_dtype, weight_dtype, rows,
                              width, stream);
}

/// residual = round(residual + delta), then out = residual / rms(residual) * weight. `delta` and `residual` are of
/// `stream_dtype`; the other dtypes are the same as for moe_any_rms_norm.
extern "C" int moe_any_add_rms_norm(const void* delta, void* residual, const void* weight, float eps, void* out,
                                    moe::Dtype dtype, moe::Dtype stream_dtype, moe::Dtype weight_dtype, int rows,
                                    int width, void* stream) {
  return moe::any_norm<true>(delta, residual, weight, eps, out, dtype, stream_dtype, weight_dtype, rows, width, stream);
}

/// out [rows, width] = softmax of the rows of x, f32.
extern "C" int moe_any_softmax(const void* x, void* out, int rows, int width, void* stream) {
  using namespace moe;
  if (rows < 0 || width < 0) return cudaErrorInvalidValue;
  if (rows == 0 || width == 0) return cudaSuccess;
  return launch(softmax, {dim3(rows), dim3(kAnyThreads), stream}, static_cast<const float*>(x),
                static_cast<float*>(out), width);
}
