//! Rows of multi-head latent attention: interleaved rotary embedding, cache writes, and products
//! with one matrix per head.

use candle_core::{DType, Result};

use super::dispatch;
use super::epilogue::StoreRow;
use super::gemm::{Products, products};
use super::shared::Shared;
use super::simd::Lanes;
use super::tile::{UNIT, UnitSums};
use super::units::{Epilogue, Units};
use crate::element::Float;
use crate::exec::{CpuIsa, Exec};
use crate::weight::WeightOrder;

/// Rotates the pairs (x\[2i\], x[2i + 1]) by angle i: RoPE in the interleaved (GPT-J) layout. Plain
/// multiplications and additions, so every instruction set gives the same bits.
pub(crate) fn rotate_pairs<X: Float, O: Float>(x: &[X], cos: &[f32], sin: &[f32], out: &mut [O]) {
    let pairs = x.as_chunks::<2>().0.iter().zip(out.as_chunks_mut::<2>().0);
    for ((x, out), (cos, sin)) in pairs.zip(cos.iter().zip(sin)) {
        let [a, b] = x.map(Float::widen);
        *out = [O::narrow(a * cos - b * sin), O::narrow(a * sin + b * cos)];
    }
}

/// Rounds values one by one.
pub(crate) fn round_row<X: Float, O: Float>(x: &[X], out: &mut [O]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = O::narrow(x.widen());
    }
}

/// Products of heads with a matrix each: row (t, h) of x times matrix h.
pub(crate) struct PerHead<'a, T, O> {
    /// [T, heads, k].
    pub x: &'a [T],
    /// [heads, n, k].
    pub w: &'a [T],
    pub heads: usize,
    pub n: usize,
    pub k: usize,
    /// [T, heads, stride]: the first n of each row are written.
    pub out: &'a mut [O],
    pub stride: usize,
}

impl<T: Lanes, O: Lanes> PerHead<'_, T, O> {
    pub(crate) fn run(self, ex: &Exec) -> Result<()> {
        let rows = self.out.len().checked_div(self.stride).unwrap_or(0);
        let tokens = rows.checked_div(self.heads).unwrap_or(0);
        // Rows in the order of groups: all tokens of head 0, then of head 1.
        let mut index = ex.scratch(DType::U32, &[rows])?;
        let mut index = index.view_mut();
        let index = index.cpu_mut::<u32>()?;
        for (i, row) in index.iter_mut().enumerate() {
            *row = (i % tokens * self.heads + i / tokens) as u32;
        }
        let offsets: Vec<u32> = (0..=self.heads).map(|head| (head * tokens) as u32).collect();
        let p = Products {
            x: self.x,
            index: Some(index),
            w: self.w,
            order: WeightOrder::Rows,
            matrix_rows: self.n,
            k: self.k,
            stride: self.k,
            start: 0,
            segments: 1,
            offsets: &offsets,
            units: Units::Rows(self.n),
        };
        let out = Shared::new(self.out);
        products(&p, ex, &StoreStrided { isa: ex.isa(), n: self.n, stride: self.stride, rows: index, out })
    }
}

/// out\[rows\[i\]\] = sums, rounded, where rows of out are further apart than they are long.
struct StoreStrided<'a, O> {
    isa: CpuIsa,
    n: usize,
    stride: usize,
    rows: &'a [u32],
    out: Shared<'a, O>,
}

impl<O: Lanes> Epilogue for StoreStrided<'_, O> {
    fn take(&self, _group: usize, row: usize, unit: usize, sums: &[UnitSums]) {
        let column = unit * UNIT;
        let width = UNIT.min(self.n - column);
        for (i, sums) in sums.iter().enumerate() {
            let at = self.rows[row + i] as usize * self.stride + column;
            // SAFETY: each row of out has one row of sums, and each of its units comes once.
            let out = unsafe { self.out.range(at, width) };
            dispatch(self.isa, StoreRow::<f32, O> { sums, bias: None, out });
        }
    }
}
