//! Row-wise ops: gather, copy, additions, norms, softmax, weighted sum.

use candle_core::Result;

use super::{CudaExec, Dtype, count, ffi, int};
use crate::view::{View, ViewMut};

// SAFETY of every call below: the op's door has checked dims and dtypes, so each pointer covers as
// many elements as the launcher states; the views' borrows keep the memory alive until the launch
// is on the stream, on which memory is only reused in order.

pub(crate) fn gather(cuda: &CudaExec, op: &str, table: View, ids: View, mut out: ViewMut) -> Result<()> {
    let (rows, width) = (int(op, ids.elem_count())?, int(op, table.dims()[1])?);
    let (dtype, out_dtype) = (Dtype::of(op, table.dtype())?, Dtype::of(op, out.dtype())?);
    let (from, to) = (cuda.read(op, "table", table)?, cuda.write(op, "out", &mut out)?);
    let (ids, table_rows, stream) = (cuda.read(op, "ids", ids)?, int(op, table.rows())?, cuda.raw()?);
    // SAFETY: see above; an id beyond the table reads nothing.
    cuda.check(op, unsafe {
        ffi::moe_any_gather(from, ids, to, dtype, out_dtype, rows, width, table_rows, stream)
    })
}

pub(crate) fn copy(cuda: &CudaExec, op: &str, x: View, mut out: ViewMut) -> Result<()> {
    let (dtype, out_dtype, n) =
        (Dtype::of(op, x.dtype())?, Dtype::of(op, out.dtype())?, count(op, x.elem_count())?);
    let (x, out, stream) = (cuda.read(op, "rows", x)?, cuda.write(op, "out", &mut out)?, cuda.raw()?);
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_copy(x, out, dtype, out_dtype, n, stream) })
}

pub(crate) fn add(cuda: &CudaExec, op: &str, x: View, mut acc: ViewMut) -> Result<()> {
    let (dtype, acc_dtype, n) =
        (Dtype::of(op, x.dtype())?, Dtype::of(op, acc.dtype())?, count(op, x.elem_count())?);
    let (x, acc, stream) = (cuda.read(op, "x", x)?, cuda.write(op, "acc", &mut acc)?, cuda.raw()?);
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_add(x, acc, dtype, acc_dtype, n, stream) })
}

pub(crate) fn add_scaled(cuda: &CudaExec, op: &str, x: View, scales: View, mut acc: ViewMut) -> Result<()> {
    let rows = x.rows();
    let (height, width) = (int(op, rows)?, int(op, x.elem_count().checked_div(rows).unwrap_or(0))?);
    let (dtype, acc_dtype) = (Dtype::of(op, x.dtype())?, Dtype::of(op, acc.dtype())?);
    let (x, scales) = (cuda.read(op, "x", x)?, cuda.read(op, "scales", scales)?);
    let (acc, stream) = (cuda.write(op, "acc", &mut acc)?, cuda.raw()?);
    // SAFETY: see above.
    cuda.check(op, unsafe {
        ffi::moe_any_add_scaled(x, scales, acc, dtype, acc_dtype, height, width, stream)
    })
}

pub(crate) fn scale_rows(cuda: &CudaExec, op: &str, x: View, scales: View, mut out: ViewMut) -> Result<()> {
    let (rows, width, dtype) = (int(op, x.rows())?, int(op, x.dims()[1])?, Dtype::of(op, x.dtype())?);
    let (x, scales) = (cuda.read(op, "rows", x)?, cuda.read(op, "scale", scales)?);
    let (out, stream) = (cuda.write(op, "out", &mut out)?, cuda.raw()?);
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_scale_rows(x, scales, out, dtype, rows, width, stream) })
}

pub(crate) fn weighted_sum(
    cuda: &CudaExec,
    op: &str,
    slots: View,
    ids: View,
    weights: View,
    mut out: ViewMut,
) -> Result<()> {
    let (tokens, top_k, width) =
        (int(op, slots.rows())?, int(op, slots.dims()[1])?, int(op, slots.dims()[2])?);
    let (dtype, slots) = (Dtype::of(op, out.dtype())?, cuda.read(op, "slots", slots)?);
    let (ids, weights) = (cuda.read(op, "topk_ids", ids)?, cuda.read(op, "topk_weights", weights)?);
    let (out, stream) = (cuda.write(op, "out", &mut out)?, cuda.raw()?);
    // SAFETY: see above.
    cuda.check(op, unsafe {
        ffi::moe_any_weighted_sum(slots, ids, weights, out, dtype, tokens, top_k, width, stream)
    })
}

pub(crate) fn fill(cuda: &CudaExec, op: &str, value: f32, mut out: ViewMut) -> Result<()> {
    let n = count(op, out.elem_count())?;
    let (out, stream) = (cuda.write(op, "out", &mut out)?, cuda.raw()?);
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_fill(out, value, n, stream) })
}

pub(crate) fn sequence(cuda: &CudaExec, op: &str, step: u32, mut out: ViewMut) -> Result<()> {
    let n = count(op, out.elem_count())?;
    let (out, stream) = (cuda.write(op, "out", &mut out)?, cuda.raw()?);
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_sequence(out, step, n, stream) })
}

pub(crate) fn sigmoid(cuda: &CudaExec, op: &str, mut x: ViewMut) -> Result<()> {
    let n = count(op, x.elem_count())?;
    let (x, stream) = (cuda.write(op, "x", &mut x)?, cuda.raw()?);
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_sigmoid(x, n, stream) })
}

pub(crate) fn rms_norm(
    cuda: &CudaExec,
    op: &str,
    x: View,
    weight: View,
    eps: f32,
    mut out: ViewMut,
) -> Result<()> {
    let (rows, width) = (int(op, x.rows())?, int(op, x.dims()[1])?);
    let (dtype, stream_dtype) = (Dtype::of(op, weight.dtype())?, Dtype::of(op, x.dtype())?);
    let (x, weight) = (cuda.read(op, "x", x)?, cuda.read(op, "weight", weight)?);
    let (out, stream) = (cuda.write(op, "out", &mut out)?, cuda.raw()?);
    // SAFETY: see above.
    cuda.check(op, unsafe {
        ffi::moe_any_rms_norm(x, weight, eps, out, dtype, stream_dtype, rows, width, stream)
    })
}

pub(crate) fn add_rms_norm(
    cuda: &CudaExec,
    op: &str,
    delta: View,
    weight: View,
    eps: f32,
    mut residual: ViewMut,
    mut out: ViewMut,
) -> Result<()> {
    let (rows, width) = (int(op, delta.rows())?, int(op, delta.dims()[1])?);
    let (dtype, stream_dtype) = (Dtype::of(op, weight.dtype())?, Dtype::of(op, delta.dtype())?);
    let (delta, weight) = (cuda.read(op, "delta", delta)?, cuda.read(op, "weight", weight)?);
    let (residual, out) = (cuda.write(op, "residual", &mut residual)?, cuda.write(op, "out", &mut out)?);
    let stream = cuda.raw()?;
    // SAFETY: see above.
    cuda.check(op, unsafe {
        ffi::moe_any_add_rms_norm(delta, residual, weight, eps, out, dtype, stream_dtype, rows, width, stream)
    })
}

pub(crate) fn softmax(cuda: &CudaExec, op: &str, x: View, mut out: ViewMut) -> Result<()> {
    let (rows, width) = (int(op, x.rows())?, int(op, x.dims()[1])?);
    let (x, out, stream) = (cuda.read(op, "x", x)?, cuda.write(op, "out", &mut out)?, cuda.raw()?);
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_softmax(x, out, rows, width, stream) })
}
