//! The arithmetic of reductions: a fixed order, f32 accumulators, one rounding.
//!
//! Floats are widened to f32, combined in ascending order from rank 0 on, and rounded once. The order does not depend
//! on which rank computes or when. This makes a collective's result bit-identical on every rank.

use half::{bf16, f16};
use moe_kernels::{Element, Float};

use crate::collective::ReduceOp;

/// An element type that reductions combine, in an accumulator that may be wider.
pub(crate) trait Reduce: Element {
    type Acc: Copy;
    fn load(self) -> Self::Acc;
    fn store(acc: Self::Acc) -> Self;
    fn add(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn max(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn min(a: Self::Acc, b: Self::Acc) -> Self::Acc;
}

macro_rules! reduce_float {
    ($($ty:ty)*) => {$(
        impl Reduce for $ty {
            type Acc = f32;
            #[inline(always)]
            fn load(self) -> f32 { self.widen() }
            #[inline(always)]
            fn store(acc: f32) -> Self { <$ty>::narrow(acc) }
            #[inline(always)]
            fn add(a: f32, b: f32) -> f32 { a + b }
            // `f32::max` drops NaN and does not define the sign of zero. A broken rank must be visible, and the bits
            // must be fixed.
            #[inline(always)]
            fn max(a: f32, b: f32) -> f32 { if a.is_nan() || a >= b { a } else { b } }
            #[inline(always)]
            fn min(a: f32, b: f32) -> f32 { if a.is_nan() || a <= b { a } else { b } }
        }
    )*};
}

reduce_float! { f32 bf16 f16 }

macro_rules! reduce_integer {
    ($($ty:ty)*) => {$(
        impl Reduce for $ty {
            type Acc = $ty;
            #[inline(always)]
            fn load(self) -> $ty { self }
            #[inline(always)]
            fn store(acc: $ty) -> $ty { acc }
            #[inline(always)]
            fn add(a: $ty, b: $ty) -> $ty { a.wrapping_add(b) }
            #[inline(always)]
            fn max(a: $ty, b: $ty) -> $ty { Ord::max(a, b) }
            #[inline(always)]
            fn min(a: $ty, b: $ty) -> $ty { Ord::min(a, b) }
        }
    )*};
}

reduce_integer! { u8 u32 i32 i64 }

/// Elements per block: their accumulators stay in the first-level cache while the ranks' values are read.
const BLOCK: usize = 1024;

/// out[i] = parts[0][i] op parts[1][i] op ...; every part is as long as `out`.
pub(crate) fn reduce<T: Reduce>(op: ReduceOp, parts: &[&[T]], out: &mut [T]) {
    match op {
        ReduceOp::Sum => fold(T::add, parts, out),
        ReduceOp::Max => fold(T::max, parts, out),
        ReduceOp::Min => fold(T::min, parts, out),
    }
}

#[inline(always)]
fn fold<T: Reduce>(combine: impl Fn(T::Acc, T::Acc) -> T::Acc, parts: &[&[T]], out: &mut [T]) {
    let Some((first, others)) = parts.split_first() else { return };
    let mut acc = [T::default().load(); BLOCK];
    for (block, (out, first)) in out.chunks_mut(BLOCK).zip(first.chunks(BLOCK)).enumerate() {
        for (a, &x) in acc.iter_mut().zip(first) {
            *a = x.load();
        }
        for part in others {
            for (a, &x) in acc.iter_mut().zip(part.get(block * BLOCK..).unwrap_or(&[])).take(out.len()) {
                *a = combine(*a, x.load());
            }
        }
        for (o, &a) in out.iter_mut().zip(&acc) {
            *o = T::store(a);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced<T: Reduce>(op: ReduceOp, parts: &[&[T]]) -> Vec<T> {
        let mut out = vec![T::default(); parts[0].len()];
        reduce(op, parts, &mut out);
        out
    }

    #[test]
    fn floats_are_added_in_rank_order_and_rounded_once() {
        // In ascending order 1e8 absorbs the first 1, so only the last 1 remains.
        assert_eq!(reduced(ReduceOp::Sum, &[&[1f32], &[1e8], &[-1e8], &[1.]]), [1.]);
        // 1 + 2^-9 + 2^-9 is a bf16 number, but only unrounded partial sums reach it.
        let one = bf16::from_f32(1.);
        let tiny = bf16::from_f32(1. / 256.);
        assert_eq!(reduced(ReduceOp::Sum, &[&[one], &[tiny], &[tiny]])[0].to_f32(), 1. + 1. / 128.);
        assert_eq!(reduced(ReduceOp::Sum, &[&[-0f32]])[0].to_bits(), (-0f32).to_bits());
    }

    #[test]
    fn nan_and_zero_signs_are_defined() {
        for (op, parts) in [(ReduceOp::Max, [1., f32::NAN, 2.]), (ReduceOp::Min, [f32::NAN, 1., 2.])] {
            let parts = parts.map(|x| [x]);
            let parts: Vec<&[f32]> = parts.iter().map(|p| &p[..]).collect();
            assert!(reduced(op, &parts)[0].is_nan(), "{op}");
        }
        assert_eq!(reduced(ReduceOp::Max, &[&[-0f32], &[0.]])[0].to_bits(), (-0f32).to_bits());
        assert_eq!(reduced(ReduceOp::Min, &[&[0f32], &[-0.]])[0].to_bits(), 0);
        assert_eq!(reduced(ReduceOp::Max, &[&[f32::NEG_INFINITY], &[3.]]), [3.]);
    }

    #[test]
    fn integer_sums_wrap() {
        assert_eq!(reduced(ReduceOp::Sum, &[&[200u8], &[100]]), [44]);
        assert_eq!(reduced(ReduceOp::Sum, &[&[i32::MAX], &[1]]), [i32::MIN]);
        assert_eq!(reduced(ReduceOp::Sum, &[&[u32::MAX], &[2]]), [1]);
        assert_eq!(reduced(ReduceOp::Max, &[&[-5i64], &[-7]]), [-5]);
    }

    #[test]
    fn blocks_cover_every_length() {
        for len in [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7] {
            let a: Vec<i64> = (0..len as i64).collect();
            let b: Vec<i64> = a.iter().map(|x| 10 * x).collect();
            let sum: Vec<i64> = a.iter().map(|x| 11 * x).collect();
            assert_eq!(reduced(ReduceOp::Sum, &[&a, &b]), sum);
        }
    }
}
