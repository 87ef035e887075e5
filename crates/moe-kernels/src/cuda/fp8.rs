//! Rows in FP8 on a device, which products multiply with FP8 weights.

use candle_core::{DType, Result};

use super::args::{Fp8QuantiseArgs, In};
use super::{ffi, small};
use crate::buffer::Scratch;
use crate::exec::Exec;
use crate::fp8::FP8_GROUP;

/// Rows [R, K] as E4M3, columns in the order of the products' operand, with a scale for each row and 128 columns.
pub(super) struct Fp8Rows {
    /// [R, K] bytes.
    pub q: In,
    /// [K / 128, R] f32.
    pub scales: In,
    // Until the launches that read them are on the stream.
    _buffers: [Scratch; 2],
}

impl Fp8Rows {
    /// Quantises `x` [rows, columns] bf16, 16-byte aligned; columns are a multiple of 128.
    pub(super) fn new(op: &str, x: In, (rows, columns): (usize, usize), ex: &Exec) -> Result<Self> {
        let cuda = ex.cuda(op)?;
        let mut q = ex.scratch(DType::U8, &[rows, columns])?;
        let mut scales = ex.scratch(DType::F32, &[columns / FP8_GROUP, rows])?;
        let args = Fp8QuantiseArgs {
            x,
            q: cuda.write(op, "rows in FP8", &mut q.view_mut())?,
            scales: cuda.write(op, "scales", &mut scales.view_mut())?,
            rows: small(op, rows)?,
            columns: small(op, columns)?,
        };
        // SAFETY: the scratch has the sizes that the launcher writes, and the form has checked its conditions.
        cuda.check("fp8_quantise", unsafe { ffi::moe_fp8_quantise(&args, cuda.raw()?) })?;
        Ok(Self { q: args.q.cast_const(), scales: args.scales.cast_const(), _buffers: [q, scales] })
    }
}
