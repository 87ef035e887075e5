//! Elementary functions and the row sum, from IEEE additions, multiplications and divisions only.
//!
//! The platform's `expf` differs in the last bit between libraries and between machines with and
//! without FMA, and a last bit can flip a routing choice. These functions give the same bits on
//! every machine, and a GPU kernel that keeps the same order of operations gives them too. Each
//! is a textbook series whose truncation error is below the rounding error of f32; the tests hold
//! them to a few units in the last place.

/// Lanes of [`row_sum`]: one per thread of a GPU warp.
const LANES: usize = 32;

/// Upper part of ln 2 with 9 significant bits, so that its product with an exponent is exact.
const LN_2_HI: f32 = 355.0 / 512.0;
/// ln 2 less its upper part.
const LN_2_LO: f32 = -2.121_944_4e-4;

/// e^x. Overflows to infinity and underflows gradually to 0.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Outside of these bounds the result is 0 or infinity; clamping keeps `n` in range.
    let x = x.clamp(-104.0, 89.0);
    // x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN_2_HI) - n * LN_2_LO;
    // Taylor series up to r^7 / 7!: the next term is below 6e-9.
    let q = 1.0 / 5040.0;
    let q = q * r + 1.0 / 720.0;
    let q = q * r + 1.0 / 120.0;
    let q = q * r + 1.0 / 24.0;
    let q = q * r + 1.0 / 6.0;
    let q = q * r + 0.5;
    let e = 1.0 + (r + r * r * q);
    // 2^n in two factors, because n reaches beyond the exponents of normal numbers.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    (e * exp2i(half)) * exp2i(n - half)
}

/// 2^n for -126 <= n <= 127.
#[inline(always)]
fn exp2i(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}

/// 1 / (1 + e^-x), without overflow at either end.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    let e = exp(-x.abs());
    let numerator = if x >= 0.0 { 1.0 } else { e };
    numerator / (1.0 + e)
}

/// sqrt(ln(1 + e^x)).
#[inline(always)]
pub(crate) fn sqrt_softplus(x: f32) -> f32 {
    (x.max(0.0) + ln_1p(exp(-x.abs()))).sqrt()
}

/// ln(1 + t) for 0 <= t <= 1, as 2 atanh(t / (2 + t)).
#[inline(always)]
fn ln_1p(t: f32) -> f32 {
    let s = t / (2.0 + t);
    let z = s * s;
    // z <= 1/9: the first term left out, z^8 / 17, is below 2e-9.
    let p = 1.0 / 15.0;
    let p = p * z + 1.0 / 13.0;
    let p = p * z + 1.0 / 11.0;
    let p = p * z + 1.0 / 9.0;
    let p = p * z + 1.0 / 7.0;
    let p = p * z + 1.0 / 5.0;
    let p = p * z + 1.0 / 3.0;
    let s2 = s + s;
    s2 + s2 * (z * p)
}

/// Hyperbolic tangent.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let y = a + a;
    let t = if a < 0.5 {
        let e = exp_m1(y);
        e / (e + 2.0)
    } else {
        1.0 - 2.0 / (exp(y) + 1.0)
    };
    t.copysign(x)
}

/// e^y - 1 for 0 <= y <= 1: the Taylor series up to y^11 / 11!, nested.
#[inline(always)]
fn exp_m1(y: f32) -> f32 {
    let mut p = 1.0;
    for n in (2..=11u8).rev() {
        p = 1.0 + y / f32::from(n) * p;
    }
    y * p
}

/// Sum of a row in a fixed order that a warp can reproduce: element i goes to lane i mod 32,
/// ascending, and the lanes are folded in halves (16, 8, 4, 2, 1).
pub(crate) fn row_sum(row: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    for chunk in row.chunks(LANES) {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += x;
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance in units in the last place of the f32 nearest to `want`.
    fn ulps(got: f32, want: f64) -> f64 {
        let near = want as f32;
        let ulp = f64::from(f32::from_bits(near.abs().to_bits() + 1)) - f64::from(near.abs());
        (f64::from(got) - want).abs() / ulp
    }

    fn worst(f: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64, lo: f32, hi: f32) -> f64 {
        let n = 200_000;
        (0..=n)
            .map(|i| lo + (hi - lo) * (i as f32 / n as f32))
            .map(|x| ulps(f(x), exact(f64::from(x))))
            .fold(0.0, f64::max)
    }

    #[test]
    fn functions_stay_within_a_few_ulps() {
        let bounds = [
            ("exp", worst(exp, f64::exp, -103.0, 88.7), 1.5),
            ("sigmoid", worst(sigmoid, |x| 1.0 / (1.0 + (-x).exp()), -80.0, 80.0), 2.5),
            ("tanh", worst(tanh, f64::tanh, -10.0, 10.0), 3.0),
            ("sqrt_softplus", worst(sqrt_softplus, |x| x.exp().ln_1p().sqrt(), -80.0, 80.0), 2.0),
        ];
        for (name, worst, bound) in bounds {
            assert!(worst <= bound, "{name}: {worst} ulp, bound {bound}");
            assert!(worst > 0.3, "{name}: {worst} ulp is too good, the sweep is broken");
        }
    }

    #[test]
    fn the_ends_of_the_range_are_exact() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(-200.0), 0.0);
        assert!(exp(-100.0) > 0.0, "denormal results are kept");
        assert_eq!(sigmoid(0.0), 0.5);
        assert_eq!((sigmoid(-1000.0), sigmoid(1000.0)), (0.0, 1.0));
        assert_eq!((tanh(0.0), tanh(50.0), tanh(-50.0)), (0.0, 1.0, -1.0));
        assert_eq!((sqrt_softplus(-1000.0), sqrt_softplus(100.0)), (0.0, 10.0));
        assert_eq!(sqrt_softplus(f32::NEG_INFINITY), 0.0);
    }

    #[test]
    fn known_bits_do_not_move() {
        // Guards the promise that scores are the same bits on every machine and in every build.
        let bits = [exp(1.0), exp(-3.7), sigmoid(0.3), tanh(0.2), sqrt_softplus(-1.1)].map(f32::to_bits);
        assert_eq!(bits, KNOWN_BITS, "{bits:#x?}");
    }

    const KNOWN_BITS: [u32; 5] = [0x402d_f854, 0x3cca_88fe, 0x3f13_0eaa, 0x3e4a_1cc2, 0x3f09_39b3];

    #[test]
    fn the_row_sum_folds_lanes() {
        let row: Vec<f32> = (0..100).map(|i| i as f32).collect();
        assert_eq!(row_sum(&row), 4950.0);
        assert_eq!(row_sum(&[]), 0.0);
        // Lane order: 2^24 and 1 meet only after the ones of the same lane have been added.
        let mut row = vec![0f32; 96];
        (row[0], row[32], row[64]) = (1.0, 1.0, 16_777_216.0);
        assert_eq!(row_sum(&row), 16_777_218.0);
        (row[0], row[32], row[64]) = (16_777_216.0, 1.0, 1.0);
        assert_eq!(row_sum(&row), 16_777_216.0);
    }
}
