//! Products: dense, and grouped by expert.

use candle_core::{Result, bail};

use super::{Dtype, ffi, int};
use crate::cuda::args::{AnyDownArgs, AnyGateUpArgs, AnyGatedArgs, AnyLinearArgs, In};
use crate::exec::Exec;
use crate::operands::ExpertGroups;
use crate::tags::{Activation, activation_name};
use crate::view::{View, ViewMut};

// SAFETY of every call below: as in `rows`.

pub(crate) fn linear(
    ex: &Exec,
    op: &str,
    x: View,
    w: View,
    bias: Option<View>,
    mut out: ViewMut,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let args = AnyLinearArgs {
        x: cuda.read(op, "x", x)?,
        w: cuda.read(op, "w", w)?,
        bias: cuda.read_or_null(op, "bias", bias)?,
        dtype: Dtype::of(op, x.dtype())?,
        out_dtype: Dtype::of(op, out.dtype())?,
        out: cuda.write(op, "out", &mut out)?,
        rows: int(op, x.rows())?,
        n: int(op, w.rows())?,
        k: int(op, w.dims()[1])?,
        invariant: i32::from(ex.batch_invariant()),
    };
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_linear(&args, cuda.raw()?) })
}

/// The launcher's code of an activation with its parameters.
pub(crate) fn activation_code(op: &str, activation: Activation) -> Result<(i32, f32, f32)> {
    Ok(match activation {
        Activation::SwiGlu => (0, 0.0, 0.0),
        Activation::SwiGluOai { alpha, limit } => (1, alpha, limit),
        Activation::Gelu => (2, 0.0, 0.0),
        Activation::GeluTanh => (3, 0.0, 0.0),
        Activation::ClampedSwiGlu { .. } | Activation::Relu => {
            bail!("{op}: {} has no GPU kernels; use the CPU", activation_name(activation))
        }
    })
}

pub(crate) fn gate_up(
    ex: &Exec,
    op: &str,
    x: View,
    groups: &ExpertGroups,
    (w13, bias): (View, Option<View>),
    activation: Activation,
    mut out: ViewMut,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let (activation, alpha, limit) = activation_code(op, activation)?;
    let args = AnyGateUpArgs {
        x: cuda.read(op, "x", x)?,
        offsets: cuda.read(op, "offsets", groups.offsets)?,
        in_rows: cuda.read(op, "in_rows", groups.in_rows)?,
        w13: cuda.read(op, "w13", w13)?,
        bias: cuda.read_or_null(op, "w13_bias", bias)?,
        out: cuda.write(op, "out", &mut out)?,
        dtype: Dtype::of(op, x.dtype())?,
        activation,
        alpha,
        limit,
        x_rows: int(op, x.rows())?,
        rows: int(op, groups.in_rows.elem_count())?,
        experts: int(op, w13.rows())?,
        width: int(op, w13.dims()[1] / 2)?,
        hidden: int(op, w13.dims()[2])?,
        invariant: i32::from(ex.batch_invariant()),
    };
    // SAFETY: see above; rows beyond x read nothing, and offsets beyond the rows are cut.
    cuda.check(op, unsafe { ffi::moe_any_gate_up(&args, cuda.raw()?) })
}

/// See [`crate::gated_activation_into`].
pub(crate) fn gated(
    ex: &Exec,
    op: &str,
    (gate, up): (View, View),
    activation: Activation,
    out: ViewMut,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let rows = out.rows();
    let width = out.elem_count().checked_div(rows).unwrap_or(0);
    let gate = cuda.read(op, "gate", gate)?;
    let up = cuda.read(op, "up", up)?;
    gated_apart(ex, op, (gate, up, width), (rows, width), activation, out)
}

/// See [`crate::gated_rows_into`].
pub(crate) fn gated_rows(
    ex: &Exec,
    op: &str,
    rows: View,
    activation: Activation,
    out: ViewMut,
) -> Result<()> {
    let height = out.rows();
    let width = out.dims()[1];
    let gate: *const f32 = ex.cuda(op)?.read(op, "rows", rows)?;
    let up = gate.wrapping_add(width);
    gated_apart(ex, op, (gate.cast(), up.cast(), 2 * width), (height, width), activation, out)
}

/// Activates gate and up values whose rows are `stride` elements apart.
fn gated_apart(
    ex: &Exec,
    op: &str,
    (gate, up, stride): (In, In, usize),
    (rows, width): (usize, usize),
    activation: Activation,
    mut out: ViewMut,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let (activation, alpha, limit) = activation_code(op, activation)?;
    let args = AnyGatedArgs {
        gate,
        up,
        dtype: Dtype::of(op, out.dtype())?,
        out: cuda.write(op, "out", &mut out)?,
        rows: int(op, rows)?,
        width: int(op, width)?,
        stride: int(op, stride)?,
        activation,
        alpha,
        limit,
    };
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_gated(&args, cuda.raw()?) })
}

pub(crate) fn down(
    ex: &Exec,
    op: &str,
    x: View,
    groups: &ExpertGroups,
    (w2, bias): (View, Option<View>),
    mut out: ViewMut,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let args = AnyDownArgs {
        x: cuda.read(op, "x", x)?,
        offsets: cuda.read(op, "offsets", groups.offsets)?,
        out_rows: cuda.read(op, "out_rows", groups.out_rows)?,
        w2: cuda.read(op, "w2", w2)?,
        bias: cuda.read_or_null(op, "w2_bias", bias)?,
        dtype: Dtype::of(op, x.dtype())?,
        rows: int(op, x.rows())?,
        num_out: int(op, out.rows())?,
        out: cuda.write(op, "out", &mut out)?,
        experts: int(op, w2.rows())?,
        hidden: int(op, w2.dims()[1])?,
        width: int(op, w2.dims()[2])?,
        invariant: i32::from(ex.batch_invariant()),
    };
    // SAFETY: see above; rows beyond out are not written.
    cuda.check(op, unsafe { ffi::moe_any_down(&args, cuda.raw()?) })
}
