//! Products: dense, and grouped by expert.

use candle_core::Result;

use super::{Dtype, ffi, int};
use crate::cuda::args::{AnyDownArgs, AnyGateUpArgs, AnyLinearArgs};
use crate::exec::Exec;
use crate::ops::ExpertGroups;
use crate::spec::Activation;
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
    let (cuda, invariant) = (ex.cuda(op)?, i32::from(ex.batch_invariant()));
    let (rows, n, k) = (int(op, x.rows())?, int(op, w.rows())?, int(op, w.dims()[1])?);
    let (dtype, out_dtype) = (Dtype::of(op, x.dtype())?, Dtype::of(op, out.dtype())?);
    let (x, w) = (cuda.read(op, "x", x)?, cuda.read(op, "w", w)?);
    let bias = cuda.read_or_null(op, "bias", bias)?;
    let (out, stream) = (cuda.write(op, "out", &mut out)?, cuda.raw()?);
    // SAFETY: see above.
    cuda.check(op, unsafe {
        ffi::moe_any_linear(
            &AnyLinearArgs { x, w, bias, out, dtype, out_dtype, rows, n, k, invariant },
            stream,
        )
    })
}

/// The launcher's code of an activation with its parameters.
fn activation_code(activation: Activation) -> (i32, f32, f32) {
    match activation {
        Activation::SwiGlu => (0, 0.0, 0.0),
        Activation::SwiGluOai { alpha, limit } => (1, alpha, limit),
        Activation::Gelu => (2, 0.0, 0.0),
        Activation::GeluTanh => (3, 0.0, 0.0),
    }
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
    let (cuda, invariant) = (ex.cuda(op)?, i32::from(ex.batch_invariant()));
    let (x_rows, rows, experts) =
        (int(op, x.rows())?, int(op, groups.in_rows.elem_count())?, int(op, w13.rows())?);
    let (width, hidden) = (int(op, w13.dims()[1] / 2)?, int(op, w13.dims()[2])?);
    let (dtype, (activation, alpha, limit)) = (Dtype::of(op, x.dtype())?, activation_code(activation));
    let (x, w13) = (cuda.read(op, "x", x)?, cuda.read(op, "w13", w13)?);
    let offsets = cuda.read(op, "offsets", groups.offsets)?;
    let in_rows = cuda.read(op, "in_rows", groups.in_rows)?;
    let bias = cuda.read_or_null(op, "w13_bias", bias)?;
    let (out, stream) = (cuda.write(op, "out", &mut out)?, cuda.raw()?);
    // SAFETY: see above; rows beyond x read nothing, and offsets beyond the rows are cut.
    cuda.check(op, unsafe {
        ffi::moe_any_gate_up(
            &AnyGateUpArgs {
                x,
                offsets,
                in_rows,
                w13,
                bias,
                out,
                dtype,
                activation,
                alpha,
                limit,
                x_rows,
                rows,
                experts,
                width,
                hidden,
                invariant,
            },
            stream,
        )
    })
}

pub(crate) fn down(
    ex: &Exec,
    op: &str,
    x: View,
    groups: &ExpertGroups,
    (w2, bias): (View, Option<View>),
    mut out: ViewMut,
) -> Result<()> {
    let (cuda, invariant) = (ex.cuda(op)?, i32::from(ex.batch_invariant()));
    let (rows, num_out, experts) = (int(op, x.rows())?, int(op, out.rows())?, int(op, w2.rows())?);
    let (hidden, width, dtype) = (int(op, w2.dims()[1])?, int(op, w2.dims()[2])?, Dtype::of(op, x.dtype())?);
    let (x, w2) = (cuda.read(op, "x", x)?, cuda.read(op, "w2", w2)?);
    let offsets = cuda.read(op, "offsets", groups.offsets)?;
    let out_rows = cuda.read(op, "out_rows", groups.out_rows)?;
    let bias = cuda.read_or_null(op, "w2_bias", bias)?;
    let (out, stream) = (cuda.write(op, "out", &mut out)?, cuda.raw()?);
    // SAFETY: see above; rows beyond out are not written.
    cuda.check(op, unsafe {
        ffi::moe_any_down(
            &AnyDownArgs {
                x,
                offsets,
                out_rows,
                w2,
                bias,
                out,
                dtype,
                rows,
                num_out,
                experts,
                hidden,
                width,
                invariant,
            },
            stream,
        )
    })
}
