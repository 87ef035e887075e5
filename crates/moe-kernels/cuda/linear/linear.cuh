// Code that the two dense products share: how results are written.
#pragma once

#include "linear/args.cuh"
#include "ptx/common.cuh"
#include "ptx/policy.cuh"
#include "ptx/ptx.cuh"

namespace moe {

/// The value to which the result is added. It is loaded before the product, so that its latency is hidden.
template <Output kOutput>
__device__ __forceinline__ float before(const void* out, size_t at) {
  return kOutput == Output::kAddF32 ? __ldcg(static_cast<const float*>(out) + at) : 0.f;
}

template <Output kOutput>
__device__ __forceinline__ void store(void* out, size_t at, float value) {
  if constexpr (kOutput == Output::kBf16) {
    static_cast<bf16*>(out)[at] = __float2bfloat16_rn(value);
  } else {
    static_cast<float*>(out)[at] = value;
  }
}

/// `before` and `store` for an output that is only known at run time, or by a constant argument.
__device__ __forceinline__ float before(Output output, const void* out, size_t at) {
  return output == Output::kAddF32 ? __ldcg(static_cast<const float*>(out) + at) : 0.f;
}

__device__ __forceinline__ void store(Output output, void* out, size_t at, float value) {
  if (output == Output::kBf16) {
    static_cast<bf16*>(out)[at] = __float2bfloat16_rn(value);
  } else {
    static_cast<float*>(out)[at] = value;
  }
}

/// Four consecutive results, aligned to their size.
template <Output kOutput>
__device__ __forceinline__ void store4(void* out, size_t at, const float (&v)[4]) {
  if constexpr (kOutput == Output::kBf16) {
    *reinterpret_cast<uint2*>(static_cast<bf16*>(out) + at) = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])};
  } else {
    *reinterpret_cast<float4*>(static_cast<float*>(out) + at) = {v[0], v[1], v[2], v[3]};
  }
}

}  // namespace moe
