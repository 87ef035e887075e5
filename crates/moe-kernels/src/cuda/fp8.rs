//! Rows in FP8 on a device, which products multiply with FP8 weights.

use std::ptr;

use candle_core::{DType, Result};

use super::args::{Fp8PlacesArgs, Fp8QuantiseArgs, In};
use super::{ffi, small};
use crate::buffer::Scratch;
use crate::exec::Exec;
use crate::fp8::FP8_GROUP;

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

/// Rows [R, K] as E4M3, columns in the order of the products' operand, with a scale for each row and 128 columns.
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
        };
        // SAFETY: the scratch has the sizes that the launcher writes, and the form has checked its conditions.
        cuda.check("fp8_quantise", unsafe { ffi::moe_fp8_quantise(&args, cuda.raw()?) })?;
        Ok(Self { q: args.q.cast_const(), scales: args.scales.cast_const(), _buffers: [q, scales] })
    }
}
