//! The exponential on vectors, and what is made of it.
//!
//! One routine serves every lane of every path, so that a value's bits do not depend on where in
//! a row it stands.

use super::simd::Simd;

/// Below this, exp is 0: the result would be subnormal.
const EXP_MIN: f32 = -87.336_54;
/// Above this, exp returns the largest power of two times its mantissa, a little above 1.7e38.
const EXP_MAX: f32 = 88.02;

/// e^x with a relative error of at most 2 ulp for x in -87.3..=88; 0 below, e^88.02 above; NaN
/// for NaN.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite, 1980, ln 2 in two parts); e^r by the
/// degree-7 Taylor polynomial, whose remainder is below 4e-9; then the exponent is set to n.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // 1.5 * 2^23: adding it rounds to an integer and leaves that integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const TAYLOR: [f32; 8] = [1. / 5040., 1. / 720., 1. / 120., 1. / 24., 1. / 6., 1. / 2., 1., 1.];
    let clamped = s.max(s.splat(EXP_MIN), s.min(s.splat(EXP_MAX), x));
    let biased = s.add(s.mul(clamped, s.splat(std::f32::consts::LOG2_E)), s.splat(ROUND));
    let n = s.sub(biased, s.splat(ROUND));
    let r = s.fma(n, s.splat(-LN2_HIGH), clamped);
    let r = s.fma(n, s.splat(-LN2_LOW), r);
    let mut p = s.splat(TAYLOR[0]);
    for c in &TAYLOR[1..] {
        p = s.fma(p, r, s.splat(*c));
    }
    s.zero_below(s.mul(p, s.exp2_biased(biased)), x, EXP_MIN)
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

/// tanh x = 2 sigmoid(2x) - 1, with an absolute error below 2e-7.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let y = sigmoid(s, s.add(x, x));
    s.sub(s.add(y, y), s.splat(1.0))
}
