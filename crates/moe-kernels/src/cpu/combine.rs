//! The weighted sum of one token's expert rows.

use super::Kernel;
use super::simd::{LANES, Lanes, Simd};
use crate::routed::NO_EXPERT;

/// out = sum over k of weights\[k\] * slots\[k\], k ascending, one chain per output from 0; slots
/// whose id is NO_EXPERT are never read.
pub(crate) struct WeightedSum<'a, T> {
    /// [K, H].
    pub slots: &'a [f32],
    pub ids: &'a [u32],
    pub weights: &'a [f32],
    /// \[H\].
    pub out: &'a mut [T],
}

impl<T: Lanes> Kernel for WeightedSum<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let h = self.out.len();
        for (i, out) in self.out.chunks_mut(LANES).enumerate() {
            let at = i * LANES..i * LANES + out.len();
            let mut sum = s.splat(0.0);
            for ((slot, id), weight) in self.slots.chunks_exact(h).zip(self.ids).zip(self.weights) {
                if *id != NO_EXPERT {
                    sum = s.fma(s.splat(*weight), f32::load_some(s, &slot[at.clone()]), sum);
                }
            }
            T::store_some(s, sum, out);
        }
    }
}
