// The arithmetic of sampling, equal to the CPU's bit for bit (model-runtime, `sampling`): order of tokens, fixed-point
// weights, Philox4x32-10. Intrinsics with `_rn` keep the compiler from fusing multiply and add.
#pragma once

#include <cstdint>

#include "sampling/philox.cuh"

namespace moe {

/// A token as an integer whose order is (logit, then lower id first); -0 and 0 are the same logit.
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

/// The last token that is kept, in the order of keys.
struct Edge {
  float logit;
  uint32_t id;

  __device__ __forceinline__ bool keeps(float x, uint32_t token) const {
    return x > logit || (x == logit && token <= id);
  }
};
constexpr Edge kKeepAll = {-__builtin_huge_valf(), ~0u};

/// 2^38 e^x for -30 <= x <= 0: Cephes' expf, equal to 2^38 times the CPU's result bit for bit, in fewer instructions.
/// Where the product is exact (n ln2_high), a fused operation rounds in the same way. Fusing the product with log2(e)
/// and the polynomial's first step changes the result for no f32 in the range (all 1.1e9 were compared); fusing any
/// further step changes some. The factor 2^38 enters with the rounding constant, so that its low bits are the exponent
/// to add.
__device__ __forceinline__ float exp_scaled(float x) {
  constexpr float kRound = 12582912.f + 38.f, kLn2High = 0.6933594f, kLn2Low = -2.1219444e-4f;
  constexpr float kLog2e = 1.44269504088896340736f;
  const float shifted = __fmaf_rn(x, kLog2e, kRound);
  const float n = __fsub_rn(shifted, kRound);
  const float r = __fsub_rn(__fmaf_rn(-n, kLn2High, x), __fmul_rn(n, kLn2Low));
  constexpr float kPoly[4] = {8.333452e-3f, 4.1665796e-2f, 1.6666665e-1f, 5e-1f};
  float p = __fmaf_rn(1.9875691e-4f, r, 1.3982e-3f);
#pragma unroll
  for (float c : kPoly) p = __fadd_rn(__fmul_rn(p, r), c);
  p = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r), 1.f);
  return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

/// Token weights of one row after temperature and min-p: 2^38 e^((logit - max) / temperature) rounded to the nearest
/// integer; 0 by min-p or far below the maximum.
class Weights {
 public:
  __device__ __forceinline__ Weights(float max, float temperature, float min_p)
      : max_(max),
        temperature_(temperature),
        inverse_(1.f / temperature),
        least_(min_p * kUnit),
        farthest_(-kFarthest * temperature),
        plain(temperature == 1.f && min_p == 0.f) {}

  /// Whether this logit, and every lower one, has weight 0: 2^38 e^-28 rounds to 0.
  __device__ __forceinline__ bool none(float logit) const { return __fsub_rn(logit, max_) < farthest_; }

  /// The weight at temperature 1 without min-p.
  __device__ __forceinline__ uint64_t of_plain(float logit) const {
    return __float2ull_rn(exp_scaled(fmaxf(__fsub_rn(logit, max_), -30.f)));
  }

  __device__ __forceinline__ uint64_t of(float logit) const {
    if (plain) return of_plain(logit);
    const float e = exp_scaled(fmaxf(divide(__fsub_rn(logit, max_)), -30.f));
    return e < least_ ? 0 : __float2ull_rn(e);
  }

 private:
  static constexpr float kUnit = 274877906944.f, kFarthest = 28.f, kFast = 1e4f;
  float max_, temperature_, inverse_, least_, farthest_;

  /// d / temperature, rounded once: two corrections of the product with the rounded inverse, as in the compiler's own
  /// division if no exponent is extreme. If the exponent of d is extreme, the result is NaN or far below -30 (`of`
  /// makes both of them -30), or so small that its exponential is 1.
  __device__ __forceinline__ float divide(float d) const {
    if (temperature_ > kFast) return __fdiv_rn(d, temperature_);
    float q = __fmul_rn(d, inverse_);
#pragma unroll
    for (int i = 0; i < 2; ++i) q = __fmaf_rn(__fmaf_rn(-q, temperature_, d), inverse_, q);
    return q;
  }

 public:
  bool plain;
};

/// 64 random bits of an output position: the seed as key, (position, 0) as counter.
__device__ __forceinline__ uint64_t random_bits(uint64_t seed, uint64_t position) {
  const Philox p = philox(seed, static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0);
  return static_cast<uint64_t>(p.word[1]) << 32 | p.word[0];
}

}  // namespace moe
