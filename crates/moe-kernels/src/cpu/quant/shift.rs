//! Products of two scales without a multiplication.
//!
//! The scale of a block of x is a power of two, so a product with a scale of weights only adds to that scale's
//! exponent: an addition of integers, which every port of a processor does. Multiplications have two ports, which
//! products of integers need. The bits are the product's as long as no exponent leaves the range of normal numbers.

use std::ops::Range;

use crate::cpu::Kernel;
use crate::cpu::simd::Simd;

/// Bits of 1.0: a biased exponent of 127.
const ONE: u32 = 127 << 23;

/// Bits of the powers of two, 2^-63 to 2^113, that are scales of x in range. NaN is above.
const OF_X: Range<u32> = 64 << 23..(240 << 23) + 1;

/// Bits of the scales of weights in range, from 2^-63 and below 2^15, without sign.
const OF_WEIGHTS: Range<u32> = 64 << 23..142 << 23;

// Products are normal numbers.
const _: () = assert!(OF_X.start + OF_WEIGHTS.start - ONE >= 1 << 23);
const _: () = assert!((OF_X.end - 1) + (OF_WEIGHTS.end - 1) - ONE < 255 << 23);

/// Whether a scale of x, as bits, is in range.
#[inline(always)]
pub(super) fn is_in_range(scale: u32) -> bool {
    OF_X.contains(&scale)
}

/// Whether scales of weights, as bits, are in range.
pub(super) struct AreInRange<'a>(pub &'a [u32]);

impl Kernel for AreInRange<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, _s: S) -> bool {
        // One maximum, so that the loop is one of vectors.
        let above = |scale: &u32| (scale & 0x7fff_ffff).wrapping_sub(OF_WEIGHTS.start);
        self.0.iter().map(above).fold(0, u32::max) < OF_WEIGHTS.end - OF_WEIGHTS.start
    }
}

/// How a scale of weights is multiplied with one of x.
pub(super) trait ScaleProduct {
    /// Scales of weights, made ready for [`times`](Self::times).
    fn ready<S: Simd>(s: S, weights: S::Raw) -> S::Raw;
    /// Products of scales of weights, made ready, with a scale of x, as bits.
    fn times<S: Simd>(s: S, weights: S::Raw, x: u32) -> S::V;
}

/// By additions to exponents, of scales in range.
pub(super) struct Shifted;

impl ScaleProduct for Shifted {
    #[inline(always)]
    fn ready<S: Simd>(s: S, weights: S::Raw) -> S::Raw {
        s.add_words(weights, s.splat_word(ONE.wrapping_neg()))
    }
    #[inline(always)]
    fn times<S: Simd>(s: S, weights: S::Raw, x: u32) -> S::V {
        s.as_f32(s.add_words(weights, s.splat_word(x)))
    }
}

/// By multiplications.
pub(super) struct Multiplied;

impl ScaleProduct for Multiplied {
    #[inline(always)]
    fn ready<S: Simd>(_s: S, weights: S::Raw) -> S::Raw {
        weights
    }
    #[inline(always)]
    fn times<S: Simd>(s: S, weights: S::Raw, x: u32) -> S::V {
        s.mul(s.splat(f32::from_bits(x)), s.as_f32(weights))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::dispatch;
    use crate::cpu::simd::LANES;
    use crate::exec::CpuIsa;

    struct Products<'a>(&'a [u32; LANES], u32);

    impl Kernel for Products<'_> {
        type Output = [[f32; LANES]; 2];

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> [[f32; LANES]; 2] {
            let w = s.load_words(self.0);
            let mut out = [[0.0; LANES]; 2];
            s.store(Shifted::times(s, Shifted::ready(s, w), self.1), &mut out[0]);
            s.store(Multiplied::times(s, Multiplied::ready(s, w), self.1), &mut out[1]);
            out
        }
    }

    /// Both have the same bits up to the ends of the range, and what lies beyond is not in it.
    #[test]
    fn sums_of_exponents_are_products() {
        let ends = [f32::from_bits(OF_WEIGHTS.start), f32::from_bits(OF_WEIGHTS.end - 1)];
        let few = [1.0, 0.1, 65504.0 / 2.0, 5.960_464_5e-8, 1.5];
        let all: Vec<u32> = ends.iter().chain(&few).flat_map(|w| [w.to_bits(), (-w).to_bits()]).collect();
        let weights: [u32; LANES] = std::array::from_fn(|i| all[i % all.len()]);
        for isa in CpuIsa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            assert!(dispatch(isa, AreInRange(&weights)));
            for scale in [0.0, f32::from_bits(63 << 23), 32768.0, f32::INFINITY, f32::NAN, -f32::NAN] {
                let mut scales = weights;
                scales[LANES / 2] = scale.to_bits();
                assert!(!dispatch(isa, AreInRange(&scales)), "{isa:?} {scale}");
            }
            for exponent in [64, 65, 113, 127, 200, 239, 240] {
                assert!(is_in_range(exponent << 23));
                let [shifted, multiplied] = dispatch(isa, Products(&weights, exponent << 23));
                assert_eq!(shifted.map(f32::to_bits), multiplied.map(f32::to_bits), "{isa:?} {exponent}");
            }
        }
        assert!(![f32::NAN.to_bits(), 63 << 23, 241 << 23, 0].into_iter().any(is_in_range));
    }
}
