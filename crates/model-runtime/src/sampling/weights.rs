//! Token weights: an exponential that has the same bits on every machine, in fixed point.
//!
//! libm's differ in the last bit, and one bit can change a sampled token. Only IEEE additions,
//! multiplications and one division without fusing are used, which every CPU and GPU rounds
//! alike; and the weights are integers, whose sums do not depend on their order.

/// e^-30 is below half a unit: tokens this far below the likeliest have no weight.
pub(super) const FARTHEST: f32 = -30.0;
/// Weight of the likeliest token. With it, the sum over 2^24 tokens fits 63 bits.
pub(super) const UNIT: f64 = (1u64 << 38) as f64;
/// Adding 2^52 to an f64 below it rounds to the nearest integer and leaves it in the low bits.
const TO_INTEGER: f64 = (1u64 << 52) as f64;
const INTEGER_BITS: u64 = (1 << 52) - 1;

/// Weights of the tokens of one row after temperature and min-p.
pub(super) struct Weights {
    /// The largest logit of the row.
    pub max: f32,
    /// At least 0.01.
    pub temperature: f32,
    /// Tokens less likely than this, relative to the likeliest, have no weight.
    pub min_p: f32,
}

impl Weights {
    /// The distance of a logit from the largest one: from -30, or lower, to 0.
    #[inline(always)]
    pub fn distance(&self, logit: f32) -> f32 {
        let x = (logit - self.max) / self.temperature;
        if x > FARTHEST { x } else { FARTHEST }
    }

    /// The weight of a logit: 2^38 e^distance to the nearest integer, or 0 by min-p.
    #[inline(always)]
    pub fn of(&self, logit: f32) -> u64 {
        let e = exp(self.distance(logit));
        let integer = (e as f64 * UNIT + TO_INTEGER).to_bits() & INTEGER_BITS;
        if e < self.min_p { 0 } else { integer }
    }
}

/// Adding 1.5 * 2^23 to an f32 of moderate size rounds it to the nearest integer and leaves that
/// in the low bits.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has few bits, so that its product with an integer is exact.
const LN2_HI: f32 = 0.693_359_4;
const LN2_LO: f32 = -2.121_944_4e-4;

/// e^x for -30 <= x <= 0, with a relative error below 2e-7.
///
/// Range reduction and polynomial as in Cephes' `expf` (S. L. Moshier). Free of branches,
/// so that the compiler vectorises the loops around it.
#[inline(always)]
fn exp(x: f32) -> f32 {
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HI) - n * LN2_LO;
    let mut p = 1.987_569_1e-4;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1] {
        p = p * r + c;
    }
    let p = p * (r * r) + r + 1.0;
    // 2^n: n is in -44..=0, so the result is a normal number.
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127);
    p * f32::from_bits(exponent << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_to_the_exponential_and_monotone() {
        assert_eq!(exp(0.0), 1.0);
        let mut last = 0.0;
        for i in 0..=3_000_000 {
            let x = FARTHEST + i as f32 * 1e-5;
            let got = exp(x);
            let want = (x as f64).exp();
            assert!(((got as f64 - want) / want).abs() < 2e-7, "{x}: {got} {want}");
            assert!(got >= last * (1.0 - 2e-7), "{x}");
            last = got;
        }
    }

    #[test]
    fn weights_are_fixed_point_exponentials() {
        let weights = Weights { max: 2.0, temperature: 0.5, min_p: 0.0 };
        assert_eq!(weights.of(2.0), 1 << 38);
        for logit in [1.9f32, 1.0, 0.0, -3.0, -10.0] {
            let want = ((logit as f64 - 2.0) / 0.5).exp() * UNIT;
            assert!((weights.of(logit) as f64 - want).abs() <= want * 3e-7 + 0.5, "{logit}");
        }
        for logit in [-13.5, -1e30, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(weights.of(logit), 0, "{logit}");
        }
        let cut = Weights { min_p: 0.25, ..weights };
        assert!(cut.of(2.0 - 0.5 * 1.38) > 0);
        assert_eq!(cut.of(2.0 - 0.5 * 1.39), 0);
    }

    /// These bits must never change: they are part of the meaning of a seed.
    #[test]
    fn known_weights() {
        let weights = Weights { max: 0.0, temperature: 1.0, min_p: 0.0 };
        let got = [-0.1f32, -1.0, -2.5, -7.75, -20.0].map(|x| weights.of(x));
        assert_eq!(got, [248719818752, 101121933312, 22563352576, 118401608, 567]);
    }

    /// 2^38 e^x as CUDA computes it (`exp_scaled` of moe-kernels): fewer roundings, which must change no bit.
    fn exp_of_cuda(x: f32) -> f32 {
        let round = ROUND + 38.0;
        let shifted = x.mul_add(std::f32::consts::LOG2_E, round);
        let n = shifted - round;
        let r = (-n).mul_add(LN2_HI, x) - n * LN2_LO;
        let mut p = 1.987_569_1e-4f32.mul_add(r, 1.398_2e-3);
        for c in [8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1] {
            p = p * r + c;
        }
        let p = p * (r * r) + r + 1.0;
        f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23))
    }

    /// Every 37th f32 from -30 to 0.
    #[test]
    fn the_fused_form_of_cuda_has_the_same_bits() {
        for bits in ((-0.0f32).to_bits()..=FARTHEST.to_bits()).step_by(37) {
            let x = f32::from_bits(bits);
            assert_eq!(exp_of_cuda(x).to_bits(), (exp(x) * UNIT as f32).to_bits(), "{x:e}");
        }
    }
}
