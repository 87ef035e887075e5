// The arithmetic of sampling, bit for bit that of the CPU (model-runtime, `sampling`): order of tokens, fixed-point
// weights, Philox4x32-10. Intrinsics with `_rn` keep the compiler from fusing multiply and add.
#pragma once

#include <cstdint>

#include "philox.cuh"

namespace moe {

/// A token as an integer that orders as (logit, lower id first); -0 and 0 are the same logit.
__device__ __forceinline__ uint64_t token_key(float logit, uint32_t id) {
  const uint32_t bits = __float_as_uint(__fadd_rn(logit, 0.f));
  const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~id);
}

__device__ __forceinline__ uint32_t key_token(uint64_t key) { return ~static_cast<uint32_t>(key); }

/// The logit of a key.
__device__ __forceinline__ float key_logit(uint64_t key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
}

/// e^x for -30 <= x <= 0: Cephes' expf without fusing.
__device__ __forceinline__ float exp_exact(float x) {
  constexpr float kRound = 12582912.f, kLn2High = 0.6933594f, kLn2Low = -2.1219444e-4f;
  constexpr float kLog2e = 1.44269504088896340736f;
  const float shifted = __fadd_rn(__fmul_rn(x, kLog2e), kRound);
  const float n = __fsub_rn(shifted, kRound);
  const float r = __fsub_rn(__fsub_rn(x, __fmul_rn(n, kLn2High)), __fmul_rn(n, kLn2Low));
  constexpr float kPoly[5] = {1.3982e-3f, 8.333452e-3f, 4.1665796e-2f, 1.6666665e-1f, 5e-1f};
  float p = 1.9875691e-4f;
#pragma unroll
  for (float c : kPoly) p = __fadd_rn(__fmul_rn(p, r), c);
  p = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r), 1.f);
  const uint32_t exponent = __float_as_uint(shifted) - __float_as_uint(kRound) + 127u;
  return __fmul_rn(p, __uint_as_float(exponent << 23));
}

/// Token weights of one row after temperature and min-p.
struct Weights {
  float max, temperature, min_p;

  /// 2^38 e^((logit - max) / temperature) to the nearest integer; 0 by min-p or 30 behind the maximum. The product
  /// with 2^38 is exact in f32, so one rounding conversion gives the bits that the CPU gets through f64; dividing by
  /// 1 changes nothing and is skipped.
  __device__ __forceinline__ uint64_t of(float logit) const {
    constexpr float kUnit = 274877906944.f;
    float x = __fsub_rn(logit, max);
    if (temperature != 1.f) x = __fdiv_rn(x, temperature);
    const float e = exp_exact(x > -30.f ? x : -30.f);
    return e < min_p ? 0 : __float2ull_rn(__fmul_rn(e, kUnit));
  }
};

/// 64 random bits of an output position: the seed as key, (position, 0) as counter.
__device__ __forceinline__ uint64_t random_bits(uint64_t seed, uint64_t position) {
  const Philox p = philox(seed, static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0);
  return static_cast<uint64_t>(p.word[1]) << 32 | p.word[0];
}

}  // namespace moe
