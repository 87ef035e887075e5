//! The gated activation alone, for gate and up products that were computed separately.

use candle_core::{DType, Result, bail};

use crate::arguments::{expect, expect_dims, expect_dtype, expect_matrix};
use crate::cpu::activation::{Gated, SigmoidGate};
use crate::cpu::dispatch;
use crate::cpu::parallel::{for_each_item, rows_per_task};
use crate::cpu::simd::{LANES, Lanes};
use crate::exec::Exec;
use crate::tags::Activation;
use crate::view::{View, ViewMut};
use crate::with_float;

/// out = act(gate, up), element by element, in f32 with one rounding: the bits that
/// [`grouped_gate_up_into`](crate::grouped_gate_up_into) gives for the same sums.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `gate`, `up` | any dims, f32 |
/// | `out` | same dims, model dtype (f32, bf16, f16) |
///
/// # Errors
/// A wrong dtype or wrong dims.
pub fn gated_activation_into(
    gate: View,
    up: View,
    activation: Activation,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "gated_activation";
    expect_dtype(op, "gate", &gate, DType::F32)?;
    expect(op, "up", &up, DType::F32, gate.dims())?;
    expect_dims(op, "out", &out, gate.dims())?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::gated(ex, op, (gate, up), activation, out);
    }
    with_float!(out.dtype(), op, T => run::<T>(gate, up, activation, out, ex))
}

/// out = act(gate, up) of rows that hold the gate values, then the up values; the rest is as in
/// [`gated_activation_into`].
///
/// | argument | shape, dtype |
/// |---|---|
/// | `rows` | [T, 2I] f32 |
/// | `out` | [T, I] model dtype (f32, bf16, f16) |
///
/// # Errors
/// A wrong dtype or wrong dims.
pub fn gated_rows_into(rows: View, activation: Activation, out: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "gated_rows";
    let (t, width) = expect_matrix(op, "out", &out)?;
    expect(op, "rows", &rows, DType::F32, &[t, 2 * width])?;
    ex.launched(|| op);
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::gated_rows(ex, op, rows, activation, out);
    }
    with_float!(out.dtype(), op, T => run_rows::<T>(rows, activation, out, ex))
}

/// x = sigmoid(gate) · x, element by element, in f32 with one rounding. The gates of a row are the last values of its
/// row of `gates`.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `gates` | [T, at least N] f32 |
/// | `x` | [T, N] model dtype (f32, bf16, f16), updated |
///
/// # Errors
/// A wrong dtype or wrong dims.
pub fn sigmoid_gate_into(gates: View, x: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "sigmoid_gate";
    expect_gates(op, &gates, x.dims())?;
    ex.launched(|| op);
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::sigmoid_gate(ex.cuda(op)?, op, gates, x);
    }
    with_float!(x.dtype(), op, T => scale::<T>(gates, x, ex))
}

/// Checks the dims and the dtype of the gates of rows of these dims.
pub(super) fn expect_gates(op: &str, gates: &View, x: &[usize]) -> Result<()> {
    let (_, held) = expect_matrix(op, "gates", gates)?;
    let &[rows, width] = x else { bail!("{op}: expected x [T, N], got {x:?}") };
    expect(op, "gates", gates, DType::F32, &[rows, held.max(width)])
}

fn scale<T: Lanes>(gates: View, mut x: ViewMut, ex: &Exec) -> Result<()> {
    let held = gates.dims()[1];
    let width = x.dims()[1];
    if width == 0 {
        return Ok(());
    }
    let x = x.cpu_mut::<T>()?;
    let len = x.len();
    let tasks = gates.cpu::<f32>()?.chunks_exact(held).zip(x.chunks_exact_mut(width)).collect();
    for_each_item(ex, tasks, len, |(gates, x)| {
        dispatch(ex.isa(), SigmoidGate { gate: &gates[held - width..], x });
    });
    Ok(())
}

fn run_rows<T: Lanes>(rows: View, activation: Activation, mut out: ViewMut, ex: &Exec) -> Result<()> {
    let width = out.dims()[1].max(1);
    let rows = rows.cpu::<f32>()?;
    let out = out.cpu_mut::<T>()?;
    let tasks = rows.chunks_exact(2 * width).zip(out.chunks_exact_mut(width)).collect();
    for_each_item(ex, tasks, rows.len(), |(row, out)| {
        let (gate, up) = row.split_at(width);
        dispatch(ex.isa(), Gated { gate, up, activation, out });
    });
    Ok(())
}

fn run<T: Lanes>(gate: View, up: View, activation: Activation, mut out: ViewMut, ex: &Exec) -> Result<()> {
    let gate = gate.cpu::<f32>()?;
    let up = up.cpu::<f32>()?;
    let out = out.cpu_mut::<T>()?;
    let Some(chunk) = rows_per_task(ex, gate.len(), LANES) else { return Ok(()) };
    let tasks = gate.chunks(chunk).zip(up.chunks(chunk)).zip(out.chunks_mut(chunk)).collect();
    for_each_item(ex, tasks, gate.len(), |((gate, up), out)| {
        dispatch(ex.isa(), Gated { gate, up, activation, out });
    });
    Ok(())
}
