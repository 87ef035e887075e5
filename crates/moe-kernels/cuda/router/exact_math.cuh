// The router's elementary functions, with the bits of the CPU's (moe-router, `math.rs`, which derives them): IEEE
// additions, multiplications and divisions in the same order. Intrinsics with `_rn` are never fused.
#pragma once

#include <cstdint>

namespace moe::exact {

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float div(float a, float b) { return __fdiv_rn(a, b); }

/// 2^n for -126 <= n <= 127.
__device__ __forceinline__ float exp2i(int n) { return __int_as_float((n + 127) << 23); }

/// Horner's rule, highest power first.
template <int N>
__device__ __forceinline__ float polynomial(float x, const float (&c)[N]) {
  float p = c[0];
#pragma unroll
  for (int i = 1; i < N; ++i) p = add(mul(p, x), c[i]);
  return p;
}

/// e^x. NaN for NaN.
__device__ __forceinline__ float exp(float x) {
  constexpr float kRound = 12582912.f, kLog2e = 1.44269504088896340736f;
  constexpr float kLn2High = 355.f / 512.f, kLn2Low = -2.1219444e-4f;
  if (x != x) return x;
  x = fminf(fmaxf(x, -104.f), 89.f);
  const float shifted = add(mul(x, kLog2e), kRound);
  const float n = sub(shifted, kRound);
  const float r = sub(sub(x, mul(n, kLn2High)), mul(n, kLn2Low));
  const float q = polynomial(r, {1.f / 5040.f, 1.f / 720.f, 1.f / 120.f, 1.f / 24.f, 1.f / 6.f, 0.5f});
  const float e = add(1.f, add(r, mul(mul(r, r), q)));
  const int whole = __float_as_int(shifted) - __float_as_int(kRound);
  const int half = whole >> 1;
  return mul(mul(e, exp2i(half)), exp2i(whole - half));
}

__device__ __forceinline__ float sigmoid(float x) {
  const float e = exp(-fabsf(x));
  return div(x >= 0 ? 1.f : e, add(1.f, e));
}

/// ln(1 + t) for 0 <= t <= 1.
__device__ __forceinline__ float ln_1p(float t) {
  const float s = div(t, add(2.f, t));
  const float z = mul(s, s);
  const float p = polynomial(z, {1.f / 15.f, 1.f / 13.f, 1.f / 11.f, 1.f / 9.f, 1.f / 7.f, 1.f / 5.f, 1.f / 3.f});
  const float s2 = add(s, s);
  return add(s2, mul(s2, mul(z, p)));
}

__device__ __forceinline__ float sqrt_softplus(float x) {
  return __fsqrt_rn(add(fmaxf(x, 0.f), ln_1p(exp(-fabsf(x)))));
}

/// e^y - 1 for 0 <= y <= 1.
__device__ __forceinline__ float exp_m1(float y) {
  float p = 1.f;
#pragma unroll
  for (int n = 11; n >= 2; --n) p = add(1.f, mul(div(y, static_cast<float>(n)), p));
  return mul(y, p);
}

__device__ __forceinline__ float tanh(float x) {
  const float a = fabsf(x), y = add(a, a);
  float t;
  if (a < 0.5f) {
    const float e = exp_m1(y);
    t = div(e, add(e, 2.f));
  } else {
    t = sub(1.f, div(2.f, add(exp(y), 1.f)));
  }
  return copysignf(t, x);
}

}  // namespace moe::exact
