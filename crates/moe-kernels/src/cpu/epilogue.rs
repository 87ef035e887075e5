//! What becomes of the sums of a product: bias, activation, one rounding, and the place in out.

use super::activation::gated;
use super::shared::Shared;
use super::simd::{LANES, Lanes, Simd};
use super::tile::{CACHE_LINE, UNIT, UnitSums};
use super::units::Epilogue;
use super::{Kernel, dispatch};
use crate::exec::CpuIsa;
use crate::tags::Activation;

/// out\[row\] = sums + bias, rounded.
pub(crate) struct Store<'a, T, O> {
    pub isa: CpuIsa,
    /// Columns of out.
    pub n: usize,
    /// [groups, n].
    pub bias: Option<&'a [T]>,
    /// The row of out that row i writes, each once; `None`: row i.
    pub rows: Option<&'a [u32]>,
    pub out: Shared<'a, O>,
}

impl<T: Lanes, O: Lanes> Epilogue for Store<'_, T, O> {
    fn take(&self, group: usize, row: usize, unit: usize, sums: &[UnitSums]) {
        let column = unit * UNIT;
        let width = UNIT.min(self.n - column);
        let bias = self.bias.map(|bias| &bias[group * self.n + column..][..width]);
        dispatch(self.isa, StoreRows { to: self, row, column, width, bias, sums });
    }
}

/// Number of rows of out that are prefetched before they are written: they are far apart, and a product has evicted
/// them from the cache.
const AHEAD: usize = 8;

/// Stores the sums of consecutive rows with one unit: one call for all, since calls of a path's functions are not
/// inlined.
struct StoreRows<'a, T, O> {
    to: &'a Store<'a, T, O>,
    row: usize,
    column: usize,
    width: usize,
    bias: Option<&'a [T]>,
    sums: &'a [UnitSums],
}

impl<T: Lanes, O: Lanes> Kernel for StoreRows<'_, T, O> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // Nearly all units are whole. They have their own code, in which the width, and so the length of the loops, is
        // a constant.
        match self.width {
            UNIT => self.store::<S, true>(s),
            _ => self.store::<S, false>(s),
        }
    }
}

impl<T: Lanes, O: Lanes> StoreRows<'_, T, O> {
    #[inline(always)]
    fn store<S: Simd, const WHOLE: bool>(self, s: S) {
        let Self { to, row, column, width, bias, sums } = self;
        let width = if WHOLE { UNIT } else { width };
        let place = |i: usize| to.rows.map_or(row + i, |rows| rows[row + i] as usize) * to.n + column;
        for (i, sums) in sums.iter().enumerate() {
            if i + AHEAD < self.sums.len() {
                let ahead = to.out.address(place(i + AHEAD));
                for line in (0..width).step_by(CACHE_LINE / size_of::<O>()) {
                    s.prefetch(ahead.wrapping_add(line));
                }
            }
            // SAFETY: each row of out has one row of sums, and each of its units comes once.
            let out = unsafe { to.out.range(place(i), width) };
            StoreRow { sums, bias, out }.run(s);
        }
    }
}

/// The sums of one row of x with one unit, plus bias, rounded.
pub(crate) struct StoreRow<'a, T, O> {
    pub sums: &'a UnitSums,
    pub bias: Option<&'a [T]>,
    pub out: &'a mut [O],
}

impl<T: Lanes, O: Lanes> Kernel for StoreRow<'_, T, O> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let vectors = self.sums.as_chunks::<LANES>().0.iter().zip(self.out.chunks_mut(LANES));
        for (i, (sums, out)) in vectors.enumerate() {
            let mut sum = s.load(sums);
            if let Some(bias) = self.bias {
                sum = s.add(sum, T::load_some(s, &bias[i * LANES..]));
            }
            O::store_some(s, sum, out);
        }
    }
}

/// out\[row\] = act(gate sums + bias, up sums + bias), rounded.
pub(crate) struct GateUp<'a, T> {
    pub isa: CpuIsa,
    /// Columns of out: half the rows of w13.
    pub width: usize,
    /// [groups, 2 * width].
    pub bias: Option<&'a [T]>,
    pub activation: Activation,
    pub out: Shared<'a, T>,
}

impl<T: Lanes> Epilogue for GateUp<'_, T> {
    fn take(&self, group: usize, row: usize, unit: usize, sums: &[UnitSums]) {
        let column = unit * LANES;
        let width = LANES.min(self.width - column);
        let bias = self.bias.map(|bias| {
            let (gate, up) = bias[group * 2 * self.width..][..2 * self.width].split_at(self.width);
            [&gate[column..][..width], &up[column..][..width]]
        });
        dispatch(self.isa, GateUpRows { to: self, row, column, width, bias, sums });
    }
}

/// [`StoreRows`] of gate and up.
struct GateUpRows<'a, T> {
    to: &'a GateUp<'a, T>,
    row: usize,
    column: usize,
    width: usize,
    bias: Option<[&'a [T]; 2]>,
    sums: &'a [UnitSums],
}

impl<T: Lanes> Kernel for GateUpRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { to, row, column, width, bias, sums } = self;
        for (i, sums) in sums.iter().enumerate() {
            // SAFETY: each row of out has one row of sums, and each of its units comes once.
            let out = unsafe { to.out.range((row + i) * to.width + column, width) };
            GateUpRow { sums, bias, activation: to.activation, out }.run(s);
        }
    }
}

struct GateUpRow<'a, T> {
    sums: &'a UnitSums,
    bias: Option<[&'a [T]; 2]>,
    activation: Activation,
    out: &'a mut [T],
}

impl<T: Lanes> Kernel for GateUpRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let sums = self.sums.as_chunks().0;
        let mut gate = s.load(&sums[0]);
        let mut up = s.load(&sums[1]);
        if let Some([gate_bias, up_bias]) = self.bias {
            gate = s.add(gate, T::load_some(s, gate_bias));
            up = s.add(up, T::load_some(s, up_bias));
        }
        T::store_some(s, gated(s, self.activation, gate, up), self.out);
    }
}
