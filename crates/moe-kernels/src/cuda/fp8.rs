//! Rows in FP8 on a device, which products multiply with FP8 weights.

use std::ptr;

use candle_core::{DType, Result};

use super::args::{Fp8LinearArgs, Fp8PlacesArgs, Fp8QuantiseArgs, In, Output};
use super::blas_lt::{self, Fp8Operand};
use super::quant::DevicePack;
use super::{ffi, small};
use crate::buffer::Scratch;
use crate::exec::Exec;
use crate::fp8::FP8_GROUP;
use crate::view::{View, ViewMut};

/// Lines of scales are copied in pieces of so many.
const SCALE_PIECE: usize = 4;

/// The slots of a step in order of experts: those of expert 0, then those of expert 1, ..
pub(super) struct SlotPlaces {
    /// [T K] u32, slot of each place.
    slot_at: In,
    /// [T K] u32, place of each slot that has a local expert.
    place_of: In,
    top_k: usize,
    // Until the launches that read them are on the stream.
    _buffers: [Scratch; 2],
}

impl SlotPlaces {
    /// Of the slots [experts, bucket] of each expert, `counts` \[experts\] of them there; `tokens` of `top_k` slots in all.
    pub(super) fn new(
        op: &str,
        (slots, counts): (In, In),
        (bucket, experts): (usize, usize),
        (tokens, top_k): (usize, usize),
        ex: &Exec,
    ) -> Result<Self> {
        let cuda = ex.cuda(op)?;
        let num_slots = tokens * top_k;
        let mut slot_at = ex.scratch(DType::U32, &[num_slots])?;
        let mut place_of = ex.scratch(DType::U32, &[num_slots])?;
        let args = Fp8PlacesArgs {
            slots,
            counts,
            bucket: small(op, bucket)?,
            slot_at: cuda.write(op, "slots in order", &mut slot_at.view_mut())?,
            place_of: cuda.write(op, "places", &mut place_of.view_mut())?,
            experts: small(op, experts)?,
            num_slots: small(op, num_slots)?,
        };
        // SAFETY: routing has listed the slots, each below `num_slots` and in one list; the scratch has that many words.
        cuda.check("fp8_places", unsafe { ffi::moe_fp8_places(&args, cuda.raw()?) })?;
        let (at, of) = (args.slot_at.cast_const(), args.place_of.cast_const());
        Ok(Self { slot_at: at, place_of: of, top_k, _buffers: [slot_at, place_of] })
    }
}

/// In which order each 128 columns of a row lie.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Columns {
    /// That of the second operand in shared memory, and of a pack's rows.
    Rows,
    /// That of the first operand, a lane's four columns together.
    Quads,
}

/// Rows [R, K] as E4M3, with a scale for each row and 128 columns.
pub(super) struct Fp8Rows {
    /// [R, K] bytes.
    pub q: In,
    /// [K / 128, R rounded up to 4] f32.
    pub scales: In,
    // Until the launches that read them are on the stream.
    _buffers: [Scratch; 2],
}

impl Fp8Rows {
    /// Quantises `x` [rows, columns] bf16, 16-byte aligned; columns are a multiple of 128. With `places` each row goes to
    /// those of its slots, so that R is `rows` times the slots of a row.
    pub(super) fn new(
        op: &str,
        x: In,
        (rows, columns): (usize, usize),
        order: Columns,
        places: Option<&SlotPlaces>,
        ex: &Exec,
    ) -> Result<Self> {
        let cuda = ex.cuda(op)?;
        let (slot_at, place_of, top_k) =
            places.map_or((ptr::null(), ptr::null(), 1), |p| (p.slot_at, p.place_of, p.top_k));
        let lines = (rows * top_k).next_multiple_of(SCALE_PIECE);
        let mut q = ex.scratch(DType::U8, &[rows * top_k, columns])?;
        let mut scales = ex.scratch(DType::F32, &[columns / FP8_GROUP, lines])?;
        let args = Fp8QuantiseArgs {
            x,
            q: cuda.write(op, "rows in FP8", &mut q.view_mut())?,
            scales: cuda.write(op, "scales", &mut scales.view_mut())?,
            slot_at,
            place_of,
            rows: small(op, rows)?,
            columns: small(op, columns)?,
            top_k: small(op, top_k)?,
            quads: i32::from(order == Columns::Quads),
        };
        // SAFETY: the scratch has the sizes that the launcher writes, and the form has checked its conditions.
        cuda.check("fp8_quantise", unsafe { ffi::moe_fp8_quantise(&args, cuda.raw()?) })?;
        Ok(Self { q: args.q.cast_const(), scales: args.scales.cast_const(), _buffers: [q, scales] })
    }
}

/// out = x · wᵀ + bias with x quantised; the form has checked the conditions.
pub(super) fn linear(
    op: &str,
    x: View,
    (w, bias): (&DevicePack, Option<View>),
    mut out: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let (cuda, [_, _, k]) = (ex.cuda(op)?, w.dims());
    let rows = Fp8Rows::new(op, cuda.read(op, "x", x)?, (x.rows(), k), Columns::Quads, None, ex)?;
    let args = Fp8LinearArgs {
        q: rows.q,
        scales: rows.scales,
        w: w.args(op, cuda)?,
        bias: cuda.read_or_null(op, "bias", bias)?,
        output: Output::stored_as(out.dtype()),
        out: cuda.write(op, "out", &mut out)?,
        m: small(op, x.rows())?,
        splits: 0,
    };
    // SAFETY: dims and dtypes are checked at the door, the launcher's conditions by the form; its rows were quantised by the
    // launch before.
    cuda.check("fp8_linear", unsafe { ffi::moe_fp8_linear(&args, cuda.raw()?) })
}

/// The same by cuBLASLt, to which the pack is written out as rows.
pub(super) fn linear_by_rows(op: &str, x: View, w: &DevicePack, out: ViewMut, ex: &Exec) -> Result<()> {
    let (cuda, [_, n, k]) = (ex.cuda(op)?, w.dims());
    // It takes rows of x by fours; there are at most three more.
    let whole = x.rows() / blas_lt::FP8_ROWS * blas_lt::FP8_ROWS;
    let (head, tail) = out.split_at(whole)?;
    let head_x = x.narrow(0, whole)?;
    let rows = Fp8Rows::new(op, cuda.read(op, "x", head_x)?, (whole, k), Columns::Rows, None, ex)?;
    let mut q = ex.scratch(DType::U8, &[n, k])?;
    let lines = (k / FP8_GROUP).next_multiple_of(SCALE_PIECE);
    let mut scales = ex.scratch(DType::F32, &[n / blas_lt::FP8_BLOCK, lines])?;
    let pack = w.args(op, cuda)?;
    let q_at = cuda.write(op, "rows of weights", &mut q.view_mut())?;
    let scales_at = cuda.write(op, "scales", &mut scales.view_mut())?;
    // SAFETY: the pack lies in the order that the launcher reads and has scales in blocks, the scratch has the sizes that it
    // writes.
    cuda.check("fp8_rows", unsafe { ffi::moe_fp8_rows(&pack, q_at, scales_at, cuda.raw()?) })?;
    let x_operand = Fp8Operand { q: rows.q, scales: rows.scales, rows: whole };
    let w_operand = Fp8Operand { q: q_at.cast_const(), scales: scales_at.cast_const(), rows: n };
    blas_lt::fp8_product(cuda, op, &x_operand, &w_operand, k, head)?;
    match x.rows() - whole {
        0 => Ok(()),
        rest => linear(op, x.narrow(whole, rest)?, (w, None), tail, ex),
    }
}
