//! Row-wise ops: RMS norm, residual addition, softmax.

use candle_core::{DType, Result};

use crate::arguments::{expect, expect_dims, expect_dtype, expect_matrix, expect_stream};
use crate::cpu::dispatch;
use crate::cpu::norm::{Add, AddRmsNorm, RmsNorm, Softmax};
use crate::cpu::parallel::{for_each_item, rows_per_task};
use crate::cpu::simd::{LANES, Lanes};
use crate::exec::Exec;
use crate::view::{View, ViewMut};
use crate::with_float;

/// out = x / sqrt(mean(x²) + eps) · weight by rows, in f32, rounded once
/// (Zhang and Sennrich, 2019).
///
/// | argument | shape, dtype |
/// |---|---|
/// | `weight` | \[D\] model dtype (f32, bf16, f16) or f32 |
/// | `x` | [R, D] model dtype or f32 |
/// | `out` | [R, D] model dtype |
///
/// # Errors
/// A wrong dtype or wrong dims.
pub fn rms_norm_into(x: View, weight: View, eps: f32, out: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "rms_norm";
    let (r, d) = expect_matrix(op, "x", &x)?;
    expect_norm_weight(op, &weight, &out, d)?;
    expect_stream(op, "x", &x, out.dtype())?;
    expect_dims(op, "out", &out, &[r, d])?;
    ex.launched(|| op);
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::rows::rms_norm(x, weight, eps, out, ex);
    }
    with_float!(out.dtype(), op, T => match (x.dtype(), weight.dtype()) {
        (DType::F32, DType::F32) => norm::<T, f32, f32>(x, weight, eps, out, ex),
        (DType::F32, _) => norm::<T, f32, T>(x, weight, eps, out, ex),
        (_, DType::F32) => norm::<T, T, f32>(x, weight, eps, out, ex),
        _ => norm::<T, T, T>(x, weight, eps, out, ex),
    })
}

/// Fails unless a norm's weight has `size` values in the dtype of the result, or in f32. Some models multiply by one
/// plus the stored weight, which has more digits than a model dtype.
fn expect_norm_weight(op: &str, weight: &View, out: &ViewMut, size: usize) -> Result<()> {
    expect_dims(op, "weight", weight, &[size])?;
    expect_stream(op, "weight", weight, out.dtype())
}

fn norm<T: Lanes, S: Lanes, W: Lanes>(
    x: View,
    weight: View,
    eps: f32,
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let x = x.cpu::<S>()?;
    let weight = weight.cpu::<W>()?;
    let out = out.cpu_mut::<T>()?;
    let Some(chunk) = rows_per_task(ex, x.len(), weight.len()) else { return Ok(()) };
    let tasks = out.chunks_mut(chunk).zip(x.chunks(chunk)).collect();
    for_each_item(ex, tasks, x.len(), |(out, x)| dispatch(ex.isa(), RmsNorm { x, weight, eps, out }));
    Ok(())
}

/// acc = round(acc + x), element by element.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | any dims, f32, bf16 or f16 |
/// | `acc` | same dims, f32, bf16 or f16 |
///
/// # Errors
/// A wrong dtype or wrong dims.
pub fn add_into(x: View, acc: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "add";
    expect_dims(op, "acc", &acc, x.dims())?;
    ex.launched(|| op);
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::add(ex.cuda(op)?, op, x, acc);
    }
    with_float!(x.dtype(), op, T => with_float!(acc.dtype(), op, S => add::<T, S>(x, acc, ex)))
}

fn add<T: Lanes, S: Lanes>(x: View, mut acc: ViewMut, ex: &mut Exec) -> Result<()> {
    let x = x.cpu::<T>()?;
    let acc = acc.cpu_mut::<S>()?;
    let Some(chunk) = rows_per_task(ex, x.len(), LANES) else { return Ok(()) };
    let tasks = acc.chunks_mut(chunk).zip(x.chunks(chunk)).collect();
    for_each_item(ex, tasks, x.len(), |(acc, x)| dispatch(ex.isa(), Add { x, acc }));
    Ok(())
}

/// residual = round(residual + delta), then out = rms_norm(residual), in one pass: the ops between two sub-layers of a
/// pre-norm transformer.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `weight` | \[H\] model dtype (f32, bf16, f16) or f32 |
/// | `delta` | [T, H] model dtype or f32 |
/// | `residual` | [T, H] dtype of `delta`, updated |
/// | `out` | [T, H] model dtype |
///
/// # Errors
/// A wrong dtype or wrong dims.
pub fn add_rms_norm_into(
    delta: View,
    weight: View,
    eps: f32,
    residual: ViewMut,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "add_rms_norm";
    let (t, h) = expect_matrix(op, "delta", &delta)?;
    expect_norm_weight(op, &weight, &out, h)?;
    expect_stream(op, "delta", &delta, out.dtype())?;
    expect(op, "residual", &residual, delta.dtype(), &[t, h])?;
    expect_dims(op, "out", &out, &[t, h])?;
    ex.launched(|| op);
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::rows::add_rms_norm(delta, weight, eps, residual, out, ex);
    }
    with_float!(out.dtype(), op, T => match (delta.dtype(), weight.dtype()) {
        (DType::F32, DType::F32) => add_norm::<T, f32, f32>(delta, weight, eps, residual, out, ex),
        (DType::F32, _) => add_norm::<T, f32, T>(delta, weight, eps, residual, out, ex),
        (_, DType::F32) => add_norm::<T, T, f32>(delta, weight, eps, residual, out, ex),
        _ => add_norm::<T, T, T>(delta, weight, eps, residual, out, ex),
    })
}

fn add_norm<T: Lanes, S: Lanes, W: Lanes>(
    delta: View,
    weight: View,
    eps: f32,
    mut residual: ViewMut,
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let delta = delta.cpu::<S>()?;
    let weight = weight.cpu::<W>()?;
    let residual = residual.cpu_mut::<S>()?;
    let out = out.cpu_mut::<T>()?;
    let Some(chunk) = rows_per_task(ex, delta.len(), weight.len()) else { return Ok(()) };
    let rows = delta.chunks(chunk).zip(residual.chunks_mut(chunk)).zip(out.chunks_mut(chunk));
    for_each_item(ex, rows.collect(), delta.len(), |((delta, residual), out)| {
        dispatch(ex.isa(), AddRmsNorm { delta, weight, eps, residual, out });
    });
    Ok(())
}

/// out = softmax(x) by rows, in f32. A row's bits depend on that row only.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [R, N] f32 |
/// | `out` | [R, N] f32 |
///
/// # Errors
/// A wrong dtype or wrong dims.
pub fn softmax_into(x: View, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "softmax";
    let (r, n) = expect_matrix(op, "x", &x)?;
    expect_dtype(op, "x", &x, DType::F32)?;
    expect(op, "out", &out, DType::F32, &[r, n])?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::softmax(ex.cuda(op)?, op, x, out);
    }
    let x = x.cpu::<f32>()?;
    let out = out.cpu_mut::<f32>()?;
    let Some(chunk) = rows_per_task(ex, x.len(), n) else { return Ok(()) };
    let tasks = out.chunks_mut(chunk).zip(x.chunks(chunk)).collect();
    for_each_item(ex, tasks, x.len(), |(out, x)| dispatch(ex.isa(), Softmax { x, n, out }));
    Ok(())
}
