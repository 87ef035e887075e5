// What the experts' kernels compute in addition to the products: the biases of both products, and the activation of
// gate and up.
//
// A kernel is compiled for each of these types, so that layers without biases do not pay for them. The loads of biases
// are issued before the products whose sums they are added to, wherever registers allow it, so nothing waits for them.
//
// Floor of a decode step of gpt-oss-20b in bf16 (24 layers, H and I 2,880, 4 of 32 experts) at 4.37 TB/s and a context
// of 256: an expert has 49.8 MB, the rest of a layer 53.3 MB, the vocabulary 1,158 MB; biases are 17 KB an expert. One
// sequence reads 7.2 GB, 1.65 ms, 606 tok/s. Eight sequences touch 21 experts of a layer: 27.6 GB, 6.3 ms, 1,270 tok/s.
// 64 touch all: 41.3 GB with keys and values, 9.4 ms, 6,780 tok/s. One sparse layer is 46, 239 and 364 us of that.
#pragma once

#include "experts/args.cuh"
#include "ptx/common.cuh"

namespace moe {

/// silu(gate) up, without biases.
struct PlainSwiglu {
  /// The biases of two weight rows.
  struct Biases {};

  __device__ __forceinline__ Biases gate_up(int, int, int) const { return {}; }
  __device__ __forceinline__ Biases down(int, int, int) const { return {}; }
  __device__ __forceinline__ void prefetch_gate_up(int, int, int) const {}
  static __device__ __forceinline__ float low(float sum, Biases) { return sum; }
  static __device__ __forceinline__ float high(float sum, Biases) { return sum; }

  /// The activation of a gate and an up value. kFast: with a division that is not rounded correctly.
  template <bool kFast = false>
  __device__ __forceinline__ float activate(float gate, float up, Biases) const {
    const float divisor = 1.0f + __expf(-gate);
    return (kFast ? __fdividef(gate, divisor) : gate / divisor) * up;
  }
};

/// Biases, and g sigmoid(alpha g) (u + shift) of clamped values: g = min(gate, limit), u = up within limit and -limit.
/// The SwiGLU of gpt-oss has the shift 1. With the shift 0 and alpha 1 it is the clamped SwiGLU, and without a limit
/// the plain one. A NaN stays NaN.
struct BiasedSwiglu : ExpertEpilogueArgs {
  struct Biases {
    float low, high;
  };

  static __device__ __forceinline__ float load(const bf16* of, size_t at) { return __bfloat162float(__ldg(of + at)); }

  /// The biases of the gate row and of the up row with this number.
  __device__ __forceinline__ Biases gate_up(int expert, int inter, int row) const {
    if (w13_bias == nullptr || row >= inter) return {0.0f, 0.0f};
    const size_t at = static_cast<size_t>(expert) * 2 * inter + row;
    return {load(w13_bias, at), load(w13_bias, at + inter)};
  }

  /// Requests the biases of the gate rows and of the up rows from this number on, up to 8 of each, into L2. One thread
  /// calls it.
  __device__ __forceinline__ void prefetch_gate_up(int expert, int inter, int row) const {
    if (w13_bias == nullptr) return;
    const bf16* from = w13_bias + static_cast<size_t>(expert) * 2 * inter + row;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + inter));
  }

  /// The biases of this row of w2 and of the row 8 further, if there are such rows.
  __device__ __forceinline__ Biases down(int expert, int hidden, int row) const {
    if (w2_bias == nullptr) return {0.0f, 0.0f};
    const size_t at = static_cast<size_t>(expert) * hidden + row;
    return {row < hidden ? load(w2_bias, at) : 0.0f, row + 8 < hidden ? load(w2_bias, at + 8) : 0.0f};
  }

  static __device__ __forceinline__ float low(float sum, const Biases& b) { return sum + b.low; }
  static __device__ __forceinline__ float high(float sum, const Biases& b) { return sum + b.high; }

  template <bool kFast = false>
  __device__ __forceinline__ float activate(float gate, float up, const Biases& b) const {
    gate += b.low, up += b.high;
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    const float divisor = 1.0f + __expf(-alpha * gate);
    return (kFast ? __fdividef(gate, divisor) : gate / divisor) * (up + shift);
  }
};

/// Calls f with the type that computes this.
template <class F>
auto with_epilogue(const ExpertEpilogueArgs& c, F f) {
  const bool plain =
      c.w13_bias == nullptr && c.w2_bias == nullptr && c.alpha == 1.0f && c.shift == 0.0f && !(c.limit < INFINITY);
  return plain ? f(PlainSwiglu{}) : f(BiasedSwiglu{c});
}

}  // namespace moe
