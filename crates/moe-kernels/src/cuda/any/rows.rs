//! Row-wise ops: gather, copy, additions, norms, softmax, weighted sum.

use candle_core::Result;

use super::{CudaExec, Dtype, count, ffi, int};
use crate::view::{View, ViewMut};

// SAFETY of every call below: the op has checked dims and dtypes, so each pointer covers as
// many elements as the launcher states; the views' borrows keep the memory alive until the launch
// is on the stream, on which memory is only reused in order.

pub(crate) fn gather(cuda: &CudaExec, op: &str, table: View, ids: View, mut out: ViewMut) -> Result<()> {
    let rows = int(op, ids.elem_count())?;
    let width = int(op, table.dims()[1])?;
    let dtype = Dtype::of(op, table.dtype())?;
    let out_dtype = Dtype::of(op, out.dtype())?;
    let from = cuda.read(op, "table", table)?;
    let to = cuda.write(op, "out", &mut out)?;
    let ids = cuda.read(op, "ids", ids)?;
    let table_rows = int(op, table.rows())?;
    let stream = cuda.raw()?;
    // SAFETY: see above; an id beyond the table reads nothing.
    cuda.check(op, unsafe {
        ffi::moe_any_gather(from, ids, to, dtype, out_dtype, rows, width, table_rows, stream)
    })
}

pub(crate) fn copy(cuda: &CudaExec, op: &str, x: View, mut out: ViewMut) -> Result<()> {
    let dtype = Dtype::of(op, x.dtype())?;
    let out_dtype = Dtype::of(op, out.dtype())?;
    let n = count(op, x.elem_count())?;
    let x = cuda.read(op, "rows", x)?;
    let out = cuda.write(op, "out", &mut out)?;
    let stream = cuda.raw()?;
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_copy(x, out, dtype, out_dtype, n, stream) })
}

pub(crate) fn add(cuda: &CudaExec, op: &str, x: View, mut acc: ViewMut) -> Result<()> {
    let dtype = Dtype::of(op, x.dtype())?;
    let acc_dtype = Dtype::of(op, acc.dtype())?;
    let n = count(op, x.elem_count())?;
    let x = cuda.read(op, "x", x)?;
    let acc = cuda.write(op, "acc", &mut acc)?;
    let stream = cuda.raw()?;
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_add(x, acc, dtype, acc_dtype, n, stream) })
}

pub(crate) fn add_scaled(cuda: &CudaExec, op: &str, x: View, scales: View, mut acc: ViewMut) -> Result<()> {
    let rows = x.rows();
    let height = int(op, rows)?;
    let width = int(op, x.elem_count().checked_div(rows).unwrap_or(0))?;
    let dtype = Dtype::of(op, x.dtype())?;
    let acc_dtype = Dtype::of(op, acc.dtype())?;
    let x = cuda.read(op, "x", x)?;
    let scales = cuda.read(op, "scales", scales)?;
    let acc = cuda.write(op, "acc", &mut acc)?;
    let stream = cuda.raw()?;
    // SAFETY: see above.
    cuda.check(op, unsafe {
        ffi::moe_any_add_scaled(x, scales, acc, dtype, acc_dtype, height, width, stream)
    })
}

pub(crate) fn scale_rows(cuda: &CudaExec, op: &str, x: View, scales: View, mut out: ViewMut) -> Result<()> {
    let rows = int(op, x.rows())?;
    let width = int(op, x.dims()[1])?;
    let dtype = Dtype::of(op, x.dtype())?;
    let x = cuda.read(op, "rows", x)?;
    let scales = cuda.read(op, "scale", scales)?;
    let out = cuda.write(op, "out", &mut out)?;
    let stream = cuda.raw()?;
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
    let tokens = int(op, slots.rows())?;
    let top_k = int(op, slots.dims()[1])?;
    let width = int(op, slots.dims()[2])?;
    let dtype = Dtype::of(op, out.dtype())?;
    let slots = cuda.read(op, "slots", slots)?;
    let ids = cuda.read(op, "topk_ids", ids)?;
    let weights = cuda.read(op, "topk_weights", weights)?;
    let out = cuda.write(op, "out", &mut out)?;
    let stream = cuda.raw()?;
    // SAFETY: see above.
    cuda.check(op, unsafe {
        ffi::moe_any_weighted_sum(slots, ids, weights, out, dtype, tokens, top_k, width, stream)
    })
}

pub(crate) fn fill(cuda: &CudaExec, op: &str, value: f32, mut out: ViewMut) -> Result<()> {
    let n = count(op, out.elem_count())?;
    let out = cuda.write(op, "out", &mut out)?;
    let stream = cuda.raw()?;
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_fill(out, value, n, stream) })
}

pub(crate) fn sequence(cuda: &CudaExec, op: &str, step: u32, mut out: ViewMut) -> Result<()> {
    let n = count(op, out.elem_count())?;
    let out = cuda.write(op, "out", &mut out)?;
    let stream = cuda.raw()?;
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_sequence(out, step, n, stream) })
}

pub(crate) fn sigmoid(cuda: &CudaExec, op: &str, mut x: ViewMut) -> Result<()> {
    let n = count(op, x.elem_count())?;
    let x = cuda.write(op, "x", &mut x)?;
    let stream = cuda.raw()?;
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_sigmoid(x, n, stream) })
}

pub(crate) fn sigmoid_gate(cuda: &CudaExec, op: &str, gates: View, mut x: ViewMut) -> Result<()> {
    let rows = int(op, x.rows())?;
    let width = int(op, x.dims()[1])?;
    let gate_row = int(op, gates.dims()[1])?;
    let dtype = Dtype::of(op, x.dtype())?;
    let gates = cuda.read(op, "gates", gates)?;
    let x = cuda.write(op, "x", &mut x)?;
    let stream = cuda.raw()?;
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_sigmoid_gate(gates, x, dtype, rows, width, gate_row, stream) })
}

pub(crate) fn rms_norm(
    cuda: &CudaExec,
    op: &str,
    x: View,
    weight: View,
    eps: f32,
    mut out: ViewMut,
) -> Result<()> {
    let rows = int(op, x.rows())?;
    let width = int(op, x.dims()[1])?;
    let dtype = Dtype::of(op, out.dtype())?;
    let stream_dtype = Dtype::of(op, x.dtype())?;
    let weight_dtype = Dtype::of(op, weight.dtype())?;
    let x = cuda.read(op, "x", x)?;
    let weight = cuda.read(op, "weight", weight)?;
    let out = cuda.write(op, "out", &mut out)?;
    let stream = cuda.raw()?;
    // SAFETY: see above.
    cuda.check(op, unsafe {
        ffi::moe_any_rms_norm(x, weight, eps, out, dtype, stream_dtype, weight_dtype, rows, width, stream)
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
    let rows = int(op, delta.rows())?;
    let width = int(op, delta.dims()[1])?;
    let dtype = Dtype::of(op, out.dtype())?;
    let stream_dtype = Dtype::of(op, delta.dtype())?;
    let weight_dtype = Dtype::of(op, weight.dtype())?;
    let delta = cuda.read(op, "delta", delta)?;
    let weight = cuda.read(op, "weight", weight)?;
    let residual = cuda.write(op, "residual", &mut residual)?;
    let out = cuda.write(op, "out", &mut out)?;
    let stream = cuda.raw()?;
    // SAFETY: see above.
    cuda.check(op, unsafe {
        ffi::moe_any_add_rms_norm(
            delta,
            residual,
            weight,
            eps,
            out,
            dtype,
            stream_dtype,
            weight_dtype,
            rows,
            width,
            stream,
        )
    })
}

pub(crate) fn softmax(cuda: &CudaExec, op: &str, x: View, mut out: ViewMut) -> Result<()> {
    let rows = int(op, x.rows())?;
    let width = int(op, x.dims()[1])?;
    let x = cuda.read(op, "x", x)?;
    let out = cuda.write(op, "out", &mut out)?;
    let stream = cuda.raw()?;
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_softmax(x, out, rows, width, stream) })
}
