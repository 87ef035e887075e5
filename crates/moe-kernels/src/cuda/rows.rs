//! Row-wise ops on CUDA. bf16 weights with an f32 residual stream have their own kernels; everything else uses the
//! kernels for any dtype.

use candle_core::{DType, Result};

use super::args::CopyStatesArgs;
use super::{aligned, any, ffi, small};
use crate::exec::Exec;
use crate::operands::StateArrays;
use crate::view::{View, ViewMut};

/// Number of values that a thread of the row-wise kernels processes at a time.
const VECTOR: usize = 8;
/// The longest rows that they keep in shared memory.
const MAX_HIDDEN: usize = 16 * 1024;

/// Whether the kernels for bf16 weights with an f32 residual stream can be used.
fn fits(weights: DType, stream: DType, hidden: usize) -> bool {
    // The norms keep a row in shared memory.
    hidden <= MAX_HIDDEN
        && weights == DType::BF16
        && stream == DType::F32
        && hidden > 0
        && hidden.is_multiple_of(VECTOR)
}

pub(crate) fn embedding(table: View, ids: View, mut out: ViewMut, ex: &Exec) -> Result<()> {
    let op = "embedding";
    let cuda = ex.cuda("embedding")?;
    let v = table.dims()[0];
    let h = table.dims()[1];
    if !fits(table.dtype(), out.dtype(), h) || !aligned(&[table, out.as_view()]) {
        return any::gather(cuda, op, table, ids, out);
    }
    let table = cuda.read(op, "table", table)?;
    let ids_at = cuda.read(op, "ids", ids)?;
    let out = cuda.write(op, "out", &mut out)?;
    let tokens = small(op, ids.elem_count())?;
    // SAFETY: the op has checked dims and dtypes, and `fits` the launcher's conditions.
    cuda.check(op, unsafe {
        ffi::moe_embedding(table, ids_at, out, tokens, small(op, h)?, small(op, v)?, cuda.raw()?)
    })
}

pub(crate) fn rms_norm(x: View, weight: View, eps: f32, mut out: ViewMut, ex: &Exec) -> Result<()> {
    let op = "rms_norm";
    let cuda = ex.cuda("rms_norm")?;
    let rows = x.dims()[0];
    let h = x.dims()[1];
    if !fits(weight.dtype(), x.dtype(), h) || !aligned(&[x, weight, out.as_view()]) {
        return any::rms_norm(cuda, op, x, weight, eps, out);
    }
    let x = cuda.read(op, "x", x)?;
    let weight = cuda.read(op, "weight", weight)?;
    let out = cuda.write(op, "out", &mut out)?;
    // SAFETY: the op has checked dims and dtypes, and `fits` the launcher's conditions.
    cuda.check(op, unsafe {
        ffi::moe_rms_norm(x, weight, eps, out, small(op, rows)?, small(op, h)?, cuda.raw()?)
    })
}

pub(crate) fn add_rms_norm(
    delta: View,
    weight: View,
    eps: f32,
    mut residual: ViewMut,
    mut out: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let op = "add_rms_norm";
    let cuda = ex.cuda("add_rms_norm")?;
    let rows = delta.dims()[0];
    let h = delta.dims()[1];
    if !fits(weight.dtype(), delta.dtype(), h)
        || !aligned(&[delta, weight, residual.as_view(), out.as_view()])
    {
        return any::add_rms_norm(cuda, op, delta, weight, eps, residual, out);
    }
    let delta = cuda.read(op, "delta", delta)?;
    let weight = cuda.read(op, "weight", weight)?;
    let residual = cuda.write(op, "residual", &mut residual)?;
    let out = cuda.write(op, "out", &mut out)?;
    let rows = small(op, rows)?;
    let h = small(op, h)?;
    // SAFETY: the op has checked dims and dtypes, and `fits` the launcher's conditions.
    cuda.check(op, unsafe { ffi::moe_add_rms_norm(delta, residual, weight, eps, out, rows, h, cuda.raw()?) })
}

pub(crate) fn copy_states(arrays: Vec<StateArrays>, rows: &[[u32; 2]], ex: &Exec) -> Result<()> {
    let op = "copy_states";
    let cuda = ex.cuda("copy_states")?;
    let mut list: Vec<u64> = Vec::with_capacity(3 * arrays.len());
    for StateArrays { from, mut to } in arrays {
        let elements: usize = from.dims()[1..].iter().product();
        let bytes = elements * from.dtype().size_in_bytes();
        let from: *const u8 = cuda.read(op, "an array", from)?;
        let to: *mut u8 = cuda.write(op, "an array", &mut to)?;
        list.extend([from as u64, to as u64, bytes as u64]);
    }
    let raw = CopyStatesArgs {
        list: list.as_ptr().cast(),
        rows: rows.as_ptr().cast(),
        arrays: small(op, list.len() / 3)?,
        copies: small(op, rows.len())?,
    };
    // SAFETY: the op has checked that every row is inside of its array. The launcher reads both lists before it
    // returns.
    cuda.check(op, unsafe { ffi::moe_copy_states(&raw, cuda.raw()?) })
}
