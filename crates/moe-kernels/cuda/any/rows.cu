// Row-wise ops of any dtype and size: gather, copy, additions, scaling, weighted sum, and small fills.
//
// All are bound by bytes: each element is read and written once, neighbours by neighbouring threads.
#include "any/any.cuh"

namespace moe {
namespace {

/// out[r] = table[ids[r]]; zeros if the id is not below `table_rows`.
template <class T, class S>
__global__ void gather(const T* table, const uint32_t* ids, S* out, int width, uint32_t table_rows) {
  pdl_wait();
  const uint32_t id = ids[blockIdx.x];
  const T* from = table + static_cast<size_t>(id) * width;
  S* to = out + static_cast<size_t>(blockIdx.x) * width;
  for (int i = column_start(); i < width; i += column_step()) to[i] = narrow<S>(id < table_rows ? widen(from[i]) : 0.f);
}

template <class T, class S>
__global__ void convert(const T* x, S* out, int64_t count) {
  pdl_wait();
  for (int64_t i = element_start(); i < count; i += element_step()) out[i] = narrow<S>(widen(x[i]));
}

template <class T, class S>
__global__ void add(const T* x, S* acc, int64_t count) {
  pdl_wait();
  for (int64_t i = element_start(); i < count; i += element_step()) acc[i] = narrow<S>(widen(acc[i]) + widen(x[i]));
}

/// acc[r] = round(acc[r] + scales[r] * x[r]), the product rounded to f32 as on the CPU.
template <class T, class S>
__global__ void add_scaled(const T* x, const float* scales, S* acc, int width) {
  pdl_wait();
  const size_t base = static_cast<size_t>(blockIdx.x) * width;
  const float scale = scales[blockIdx.x];
  for (int i = column_start(); i < width; i += column_step())
    acc[base + i] = narrow<S>(__fadd_rn(widen(acc[base + i]), __fmul_rn(scale, widen(x[base + i]))));
}

template <class T>
__global__ void scale_rows(const T* x, const float* scales, T* out, int width) {
  pdl_wait();
  const size_t base = static_cast<size_t>(blockIdx.x) * width;
  const float scale = scales[blockIdx.x];
  for (int i = column_start(); i < width; i += column_step()) out[base + i] = narrow<T>(widen(x[base + i]) * scale);
}

/// out[t] = sum over k, ascending, of weights[t, k] * slots[t, k]; slots without an expert are not read.
template <class T>
__global__ void weighted_sum(const float* slots, const uint32_t* ids, const float* weights, T* out, int top_k,
                             int width) {
  pdl_wait();
  const size_t first = static_cast<size_t>(blockIdx.x) * top_k;
  T* to = out + static_cast<size_t>(blockIdx.x) * width;
  for (int i = column_start(); i < width; i += column_step()) {
    float sum = 0;
    for (int k = 0; k < top_k; ++k)
      if (ids[first + k] != kNoExpert) sum = fmaf(weights[first + k], slots[(first + k) * width + i], sum);
    to[i] = narrow<T>(sum);
  }
}

__global__ void fill(float* out, float value, int64_t count) {
  pdl_wait();
  for (int64_t i = element_start(); i < count; i += element_step()) out[i] = value;
}

__global__ void sequence(uint32_t* out, uint32_t step, int64_t count) {
  pdl_wait();
  for (int64_t i = element_start(); i < count; i += element_step()) out[i] = static_cast<uint32_t>(i) * step;
}

__global__ void sigmoid(float* x, int64_t count) {
  pdl_wait();
  for (int64_t i = element_start(); i < count; i += element_step()) x[i] = 1.f / (1.f + expf(-x[i]));
}

/// The gates are the last values of their rows.
template <class T>
__global__ void sigmoid_gate(const float* gates, T* x, int width, int gate_row) {
  pdl_wait();
  const float* gate = gates + static_cast<size_t>(blockIdx.x) * gate_row + (gate_row - width);
  T* to = x + static_cast<size_t>(blockIdx.x) * width;
  for (int i = column_start(); i < width; i += column_step())
    to[i] = narrow<T>(widen(to[i]) * (1.f / (1.f + expf(-gate[i]))));
}

}  // namespace
}  // namespace moe

using namespace moe;

/// out [rows, width] (`out_dtype`: the dtype of the table, or f32) = rows `ids` [rows] u32 of `table` [table_rows,
/// width]. It is the embedding, and gathers wanted rows. An id not below `table_rows` gives zeros.
extern "C" int moe_any_gather(const void* table, const void* ids, void* out, moe::Dtype dtype, moe::Dtype out_dtype,
                              int rows, int width, int table_rows, void* stream) {
  if (rows < 0 || width < 0 || table_rows < 0) return cudaErrorInvalidValue;
  if (rows == 0 || width == 0) return cudaSuccess;
  return with_stream(dtype, out_dtype, [&](auto t, auto s) {
    using T = typename decltype(t)::type;
    using S = typename decltype(s)::type;
    return launch(gather<T, S>, over_rows(rows, width, stream), static_cast<const T*>(table),
                  static_cast<const uint32_t*>(ids), static_cast<S*>(out), width, static_cast<uint32_t>(table_rows));
  });
}

/// out = x rounded to `out_dtype`; any pair of dtypes.
extern "C" int moe_any_copy(const void* x, void* out, moe::Dtype dtype, moe::Dtype out_dtype, int64_t count,
                            void* stream) {
  if (count < 0) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  return with_dtype(dtype, [&](auto t) {
    return with_dtype(out_dtype, [&](auto s) {
      using T = typename decltype(t)::type;
      using S = typename decltype(s)::type;
      return launch(convert<T, S>, over_elements(count, stream), static_cast<const T*>(x), static_cast<S*>(out), count);
    });
  });
}

/// acc = round(acc + x); any pair of dtypes.
extern "C" int moe_any_add(const void* x, void* acc, moe::Dtype dtype, moe::Dtype acc_dtype, int64_t count,
                           void* stream) {
  if (count < 0) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  return with_dtype(dtype, [&](auto t) {
    return with_dtype(acc_dtype, [&](auto s) {
      using T = typename decltype(t)::type;
      using S = typename decltype(s)::type;
      return launch(add<T, S>, over_elements(count, stream), static_cast<const T*>(x), static_cast<S*>(acc), count);
    });
  });
}

/// acc [rows, width] = round(acc + scales [rows] f32 * x [rows, width]); any pair of dtypes.
extern "C" int moe_any_add_scaled(const void* x, const void* scales, void* acc, moe::Dtype dtype, moe::Dtype acc_dtype,
                                  int rows, int width, void* stream) {
  if (rows < 0 || width < 0) return cudaErrorInvalidValue;
  if (rows == 0 || width == 0) return cudaSuccess;
  return with_dtype(dtype, [&](auto t) {
    return with_dtype(acc_dtype, [&](auto s) {
      using T = typename decltype(t)::type;
      using S = typename decltype(s)::type;
      return launch(add_scaled<T, S>, over_rows(rows, width, stream), static_cast<const T*>(x),
                    static_cast<const float*>(scales), static_cast<S*>(acc), width);
    });
  });
}

/// out [rows, width] = round(x * scales [rows] f32), of the dtype of x.
extern "C" int moe_any_scale_rows(const void* x, const void* scales, void* out, moe::Dtype dtype, int rows, int width,
                                  void* stream) {
  if (rows < 0 || width < 0) return cudaErrorInvalidValue;
  if (rows == 0 || width == 0) return cudaSuccess;
  return with_dtype(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    return launch(scale_rows<T>, over_rows(rows, width, stream), static_cast<const T*>(x),
                  static_cast<const float*>(scales), static_cast<T*>(out), width);
  });
}

/// out [tokens, width] = weighted sum of `slots` [tokens, top_k, width] f32 by `weights` [tokens, top_k] f32; slots
/// whose id is 0xffffffff are not read.
extern "C" int moe_any_weighted_sum(const void* slots, const void* ids, const void* weights, void* out,
                                    moe::Dtype out_dtype, int tokens, int top_k, int width, void* stream) {
  if (tokens < 0 || top_k < 0 || width < 0) return cudaErrorInvalidValue;
  if (tokens == 0 || width == 0) return cudaSuccess;
  return with_dtype(out_dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    return launch(weighted_sum<T>, over_rows(tokens, width, stream), static_cast<const float*>(slots),
                  static_cast<const uint32_t*>(ids), static_cast<const float*>(weights), static_cast<T*>(out), top_k,
                  width);
  });
}

/// out [count] f32 = value.
extern "C" int moe_any_fill(void* out, float value, int64_t count, void* stream) {
  if (count < 0) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  return launch(fill, over_elements(count, stream), static_cast<float*>(out), value, count);
}

/// out [count] u32 = 0, step, 2 step, ...: row numbers, or the offsets of one group.
extern "C" int moe_any_sequence(void* out, uint32_t step, int64_t count, void* stream) {
  if (count < 0) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  return launch(sequence, over_elements(count, stream), static_cast<uint32_t*>(out), step, count);
}

/// x [count] f32 = 1 / (1 + e^-x), in place: gates of shared experts.
extern "C" int moe_any_sigmoid(void* x, int64_t count, void* stream) {
  if (count < 0) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  return launch(sigmoid, over_elements(count, stream), static_cast<float*>(x), count);
}

/// x [rows, width] of `dtype` *= 1 / (1 + e^-gate), with the gates in the last columns of [rows, gate_row] f32: output
/// gates of attention.
extern "C" int moe_any_sigmoid_gate(const void* gates, void* x, moe::Dtype dtype, int rows, int width, int gate_row,
                                    void* stream) {
  if (rows < 0 || width < 0 || gate_row < width) return cudaErrorInvalidValue;
  if (rows == 0 || width == 0) return cudaSuccess;
  return with_dtype(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    return launch(sigmoid_gate<T>, over_rows(rows, width, stream), static_cast<const float*>(gates), static_cast<T*>(x),
                  width, gate_row);
  });
}
