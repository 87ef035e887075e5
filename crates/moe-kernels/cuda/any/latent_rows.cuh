// Rows of latent attention: interleaved rotation, and a latent's norm and cache row.
//
// The rotation has the same bits as on the CPU: plain multiplications and additions.
#pragma once

#include "any/any.cuh"
#include "attention/args.cuh"
#include "router/exact_math.cuh"

namespace moe {

constexpr uint32_t kNoSlot = 0xffffffffu;

/// One of the values (x[2i], x[2i + 1]) rotated by the i-th angle: the interleaved (GPT-J) layout.
__device__ __forceinline__ float rotated(const float* x, const float* cos, const float* sin, int at) {
  const float a = x[at & ~1], b = x[at | 1], c = cos[at / 2], s = sin[at / 2];
  return at % 2 == 0 ? exact::sub(exact::mul(a, c), exact::mul(b, s)) : exact::add(exact::mul(a, s), exact::mul(b, c));
}

/// Computes a row's normed latent and its rotated part, with one block. `cos` and `sin` are the row's.
template <class T>
__device__ __forceinline__ void split_latent(const float* x, const T* weight, float eps, int latent, int rope,
                                             const float* cos, const float* sin, T* out, T* tail) {
  float squares = 0;
  for (int i = threadIdx.x; i < latent; i += kAnyThreads) squares += x[i] * x[i];
  const float scale = 1.f / sqrtf(any_block_sum(squares) / latent + eps);
  for (int i = threadIdx.x; i < latent; i += kAnyThreads) out[i] = narrow<T>(x[i] * scale * widen(weight[i]));
  for (int i = threadIdx.x; i < rope; i += kAnyThreads) tail[i] = narrow<T>(rotated(x + latent, cos, sin, i));
}

/// Stores a row's normed latent and rotated part in its slot of the cache, with one block; `x` is [latent + rope].
template <class T>
__device__ __forceinline__ void cache_row(const MlaRowsArgs& a, size_t row, const float* x) {
  const uint32_t slot = a.slots[row];
  if (slot == kNoSlot || slot >= a.num_slots) return;
  const size_t angles = row * (a.rope / 2);
  T* to = static_cast<T*>(a.k_cache) + static_cast<size_t>(slot) * (a.latent + a.rope);
  split_latent(x, static_cast<const T*>(a.norm), a.eps, a.latent, a.rope, a.cos + angles, a.sin + angles, to,
               to + a.latent);
}

}  // namespace moe
