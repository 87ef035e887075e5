//! Rows in FP8 on a device, which products multiply with FP8 weights.

use candle_core::{DType, Result};

use super::args::{Fp8LinearArgs, Fp8PlacesArgs, Fp8QuantiseArgs, In, Out, Output};
use super::blas_lt::{self, Fp8Operand};
use super::quant::DevicePack;
use super::{CudaExec, aligned, ffi, small};
use crate::exec::Exec;
use crate::fp8::{FP8_GROUP, Fp8Order};
use crate::plan::BLAS_FP8_ROWS;
use crate::rows_view::{Fp8Rows, RowsViewMut};
use crate::view::{View, ViewMut};

/// Number of scales of a pack's rows that are read at a time.
const SCALE_PIECE: usize = 4;

/// Where a launch leaves rows in FP8: the arguments that all of them take.
pub(super) struct Fp8Place {
    pub q: *mut u8,
    pub scales: *mut f32,
    pub lines: i32,
    pub quads: i32,
}

impl Fp8Rows {
    /// Where a launch writes them.
    pub(super) fn place(&mut self, op: &str, cuda: &CudaExec) -> Result<Fp8Place> {
        Ok(Fp8Place {
            q: cuda.write(op, "rows in FP8", &mut self.q.view_mut())?,
            scales: cuda.write(op, "scales", &mut self.scales.view_mut())?,
            lines: small(op, self.lines())?,
            quads: i32::from(self.order == Fp8Order::Quads),
        })
    }

    /// Where bytes and scales are read.
    pub(super) fn at(&self, op: &str, cuda: &CudaExec) -> Result<[In; 2]> {
        Ok([cuda.read(op, "rows in FP8", self.q.view())?, cuda.read(op, "scales", self.scales.view())?])
    }
}

/// Rows that a launch leaves in bf16 or in FP8.
impl RowsViewMut<'_> {
    /// K.
    pub(super) fn columns(&self) -> usize {
        match self {
            Self::Floats(rows) => rows.dims()[1],
            Self::Fp8(rows) => rows.dims()[1],
        }
    }

    /// Whether they begin at a multiple of 16 bytes, as scratch does.
    pub(super) fn is_aligned(&self) -> bool {
        match self {
            Self::Floats(rows) => aligned(&[rows.as_view()]),
            Self::Fp8(_) => true,
        }
    }

    /// The place for a launch that writes only the first `rows` rows.
    pub(super) fn first(&mut self, rows: usize) -> Result<RowsViewMut<'_>> {
        Ok(match self {
            Self::Floats(out) => RowsViewMut::Floats(out.reborrow().narrow(0, rows)?),
            Self::Fp8(out) => RowsViewMut::Fp8(out),
        })
    }

    /// Where they are written, and the rest of the place if that is FP8.
    pub(super) fn place(&mut self, op: &str, cuda: &CudaExec) -> Result<(Out, Option<Fp8Place>)> {
        match self {
            Self::Floats(out) => Ok((cuda.write(op, "out", out)?, None)),
            Self::Fp8(out) => {
                let place = out.place(op, cuda)?;
                Ok((place.q.cast(), Some(place)))
            }
        }
    }
}

/// out = `x` [T, K] bf16, quantised.
pub(crate) fn quantise_rows_into(x: View, out: &mut Fp8Rows, ex: &Exec) -> Result<()> {
    let op = "quantise_rows";
    super::expect_aligned(op, &[x])?;
    quantise(op, ex.cuda(op)?.read(op, "x", x)?, out, ex)
}

/// `x` [rows, columns] bf16, 16-byte aligned, quantised; columns are a multiple of 128.
pub(super) fn quantised(
    op: &str,
    x: In,
    [rows, columns]: [usize; 2],
    order: Fp8Order,
    ex: &Exec,
) -> Result<Fp8Rows> {
    let mut out = Fp8Rows::unspecified([rows, columns], order, ex)?;
    quantise(op, x, &mut out, ex)?;
    Ok(out)
}

/// [`quantised`] into existing rows.
pub(super) fn quantise(op: &str, x: In, out: &mut Fp8Rows, ex: &Exec) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let [rows, columns] = out.dims();
    let Fp8Place { q, scales, quads, .. } = out.place(op, cuda)?;
    let args = Fp8QuantiseArgs {
        x,
        q: q.cast(),
        scales: scales.cast(),
        rows: small(op, rows)?,
        columns: small(op, columns)?,
        quads,
    };
    // SAFETY: the rows have the sizes that the launcher writes, and the form has checked its conditions.
    cuda.check("fp8_quantise", unsafe { ffi::moe_fp8_quantise(&args, cuda.raw()?) })
}

/// A row for each slot, in order of experts: the slots of expert 0, then of expert 1, .. `slots` is [experts, bucket],
/// with `counts` \[experts\] of each expert in use; a row has `top_k` slots in all.
pub(super) fn to_slots(
    op: &str,
    rows: &Fp8Rows,
    (slots, counts): (In, In),
    (bucket, experts, top_k): (usize, usize, usize),
    ex: &Exec,
) -> Result<Fp8Rows> {
    let cuda = ex.cuda(op)?;
    let [tokens, columns] = rows.dims();
    let mut out = Fp8Rows::unspecified([tokens * top_k, columns], rows.order, ex)?;
    let [x, x_scales] = rows.at(op, cuda)?;
    let to = out.place(op, cuda)?;
    let args = Fp8PlacesArgs {
        x,
        x_scales,
        slots,
        counts,
        bucket: small(op, bucket)?,
        q: to.q.cast(),
        scales: to.scales.cast(),
        tokens: small(op, tokens)?,
        top_k: small(op, top_k)?,
        columns: small(op, columns)?,
        experts: small(op, experts)?,
    };
    // SAFETY: routing has listed the slots, each below `tokens * top_k` and in one list; `out` has a row for each.
    cuda.check("fp8_places", unsafe { ffi::moe_fp8_places(&args, cuda.raw()?) })?;
    Ok(out)
}

/// out = rows · wᵀ + bias, stored or added; the form has checked the conditions.
pub(super) fn linear(
    op: &str,
    rows: &Fp8Rows,
    (w, bias): (&DevicePack, Option<View>),
    (mut out, output): (ViewMut, Output),
    ex: &Exec,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let [q, scales] = rows.at(op, cuda)?;
    let [m, _] = rows.dims();
    let args = Fp8LinearArgs {
        q,
        scales,
        w: w.args(op, cuda)?,
        bias: cuda.read_or_null(op, "bias", bias)?,
        output,
        out: cuda.write(op, "out", &mut out)?,
        m: small(op, m)?,
        splits: 0,
    };
    // SAFETY: the op has checked dims and dtypes, and the form the launcher's conditions; rows were quantised by a
    // launch before.
    cuda.check("fp8_linear", unsafe { ffi::moe_fp8_linear(&args, cuda.raw()?) })
}

/// [`linear`] without bias by cuBLASLt, for which the pack is written out as rows; for a multiple of [`BLAS_FP8_ROWS`]
/// rows.
pub(super) fn linear_by_rows(
    op: &str,
    rows: &Fp8Rows,
    w: &DevicePack,
    (out, output): (ViewMut, Output),
    ex: &Exec,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let [_, n, k] = w.dims();
    let mut q = ex.scratch(DType::U8, &[n, k])?;
    let lines = (k / FP8_GROUP).next_multiple_of(SCALE_PIECE);
    let mut scales = ex.scratch(DType::F32, &[n / blas_lt::FP8_BLOCK, lines])?;
    let pack = w.args(op, cuda)?;
    let q_at = cuda.write(op, "rows of weights", &mut q.view_mut())?;
    let scales_at = cuda.write(op, "scales", &mut scales.view_mut())?;
    // SAFETY: the pack is in the order that the launcher reads and has scales in blocks, the scratch has the sizes that
    // it writes.
    cuda.check("fp8_rows", unsafe { ffi::moe_fp8_rows(&pack, q_at, scales_at, cuda.raw()?) })?;
    let [x, x_scales] = rows.at(op, cuda)?;
    let [m, _] = rows.dims();
    let x_operand = Fp8Operand { q: x, scales: x_scales, rows: m };
    let w_operand = Fp8Operand { q: q_at.cast_const(), scales: scales_at.cast_const(), rows: n };
    blas_lt::fp8_product(cuda, op, &x_operand, &w_operand, k, (out, output))
}

/// [`linear_by_rows`] of any number of rows in bf16; rows that are left over take [`linear`].
pub(super) fn linear_by_rows_of(
    op: &str,
    x: View,
    w: &DevicePack,
    (out, output): (ViewMut, Output),
    ex: &Exec,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let [_, _, k] = w.dims();
    let whole = x.rows() / BLAS_FP8_ROWS * BLAS_FP8_ROWS;
    let (head, tail) = out.split_at(whole)?;
    let head_x = cuda.read(op, "x", x.narrow(0, whole)?)?;
    linear_by_rows(op, &quantised(op, head_x, [whole, k], Fp8Order::Rows, ex)?, w, (head, output), ex)?;
    match x.rows() - whole {
        0 => Ok(()),
        rest => {
            let x = cuda.read(op, "x", x.narrow(whole, rest)?)?;
            linear(op, &quantised(op, x, [rest, k], Fp8Order::Quads, ex)?, (w, None), (tail, output), ex)
        }
    }
}
