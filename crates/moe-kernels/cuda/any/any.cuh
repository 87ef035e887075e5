// What the kernels for any dtype and any shape share (any/*.cu).
//
// They are the CUDA form of every op: f32, bf16 or f16, any sizes, element-aligned pointers, f32 arithmetic, one
// rounding, and the semantics that the Rust op documents. Where shapes allow, faster kernels replace them.
//
// Indices are device data, so a kernel cannot refuse them: an index out of range reads nothing and writes nothing (each
// launcher documents what its output is then). Every kernel begins with pdl_wait(), so a launch may overlap the end of
// the launch before it.
#pragma once

#include <cuda_fp16.h>

#include "any/args.cuh"
#include "ptx/common.cuh"
#include "ptx/ptx.cuh"

namespace moe {

// ---- dtypes

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }

/// Rounds to nearest, ties to even.
template <class T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 narrow<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}

template <class T>
struct Type {
  using type = T;
};

/// Calls f(Type<T>) for the type of a dtype.
template <class F>
cudaError_t with_dtype(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::kF32: return f(Type<float>{});
    case Dtype::kBf16: return f(Type<bf16>{});
    case Dtype::kF16: return f(Type<__half>{});
    default: return cudaErrorInvalidValue;
  }
}

/// Calls f(Type<T>, Type<S>) for a model dtype and a stream dtype, which is the same or f32.
template <class F>
cudaError_t with_stream(Dtype model, Dtype stream, F&& f) {
  return with_dtype(model, [&](auto t) -> cudaError_t {
    if (stream == model) return f(t, t);
    if (stream == Dtype::kF32) return f(t, Type<float>{});
    return cudaErrorInvalidValue;
  });
}

// ---- launches

constexpr int kAnyThreads = 256;

/// A launch with a block row per row, whose threads are distributed over the columns (`column_start`, `column_step`).
inline Launch over_rows(int rows, int columns, void* stream) {
  const int blocks = columns <= 0 ? 1 : ceil_div(columns, kAnyThreads);
  return {dim3(rows, blocks < 64 ? blocks : 64), dim3(kAnyThreads), stream};
}

__device__ __forceinline__ int column_start() { return blockIdx.y * kAnyThreads + threadIdx.x; }
__device__ __forceinline__ int column_step() { return gridDim.y * kAnyThreads; }

/// A launch whose threads are distributed over `count` elements (`element_start`, `element_step`).
inline Launch over_elements(int64_t count, void* stream) {
  const int64_t blocks = ceil_div(count, kAnyThreads);
  return {dim3(static_cast<unsigned>(blocks < 65536 ? blocks : 65536)), dim3(kAnyThreads), stream};
}

__device__ __forceinline__ int64_t element_start() {
  return static_cast<int64_t>(blockIdx.x) * kAnyThreads + threadIdx.x;
}
__device__ __forceinline__ int64_t element_step() { return static_cast<int64_t>(gridDim.x) * kAnyThreads; }

// ---- reductions over a block of kAnyThreads; every thread gets the result, in a fixed order

template <class Combine>
__device__ __forceinline__ float block_fold(float of_warp, Combine combine) {
  __shared__ float parts[kAnyThreads / 32];
  __syncthreads();  // the parts of an earlier call have been read
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = of_warp;
  __syncthreads();
  float result = parts[0];
#pragma unroll
  for (int i = 1; i < kAnyThreads / 32; ++i) result = combine(result, parts[i]);
  return result;
}

__device__ __forceinline__ float any_block_sum(float v) {
  return block_fold(warp_sum(v), [](float a, float b) { return a + b; });
}

__device__ __forceinline__ float any_block_max(float v) {
  return block_fold(warp_max(v), [](float a, float b) { return fmaxf(a, b); });
}

}  // namespace moe
