//! Dense products on CUDA.

use candle_core::Result;

use super::args::{LinearStreamArgs, LinearTensorArgs, Output};
use super::{aligned, any, blas, ffi, small};
use crate::exec::Exec;
use crate::monolithic::PreNorm;
use crate::plan::{Form, FusedLinearForm, LinearCall, LinearForm};
use crate::view::{View, ViewMut};

/// out = x · wᵀ + bias; the door has checked dims and dtypes.
pub(crate) fn linear(
    op: &str,
    x: View,
    w: View,
    bias: Option<View>,
    mut out: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let (m, n, k) = (x.dims()[0], w.dims()[0], w.dims()[1]);
    let aligned = aligned(&[x, w, out.as_view()]);
    let call = LinearCall { rows: m, n, k, dtype: x.dtype(), quant: None, bias: bias.is_some(), aligned };
    match LinearForm::choose(&call, &ex.machine()) {
        Some(LinearForm::Blas) => blas::product(cuda, op, x, w, out),
        Some(LinearForm::Stream) => {
            let output = Output::stored_as(out.dtype());
            stream(op, x, None, (w, bias), (&mut out, output), ex)
        }
        Some(LinearForm::Tensor) => {
            let args = LinearTensorArgs {
                x: cuda.read(op, "x", x)?,
                w: cuda.read(op, "w", w)?,
                bias: cuda.read_or_null(op, "bias", bias)?,
                out: cuda.write(op, "out", &mut out)?,
                output: Output::stored_as(out.dtype()),
                m: small(op, m)?,
                n: small(op, n)?,
                k: small(op, k)?,
                splits: if ex.batch_invariant() { -1 } else { 0 },
            };
            // SAFETY: dims and dtypes are checked at the door, the launcher's conditions by the form.
            cuda.check(op, unsafe { ffi::moe_linear_tensor(&args, cuda.raw()?) })
        }
        _ => any::linear(ex, op, x, w, bias, out),
    }
}

/// Whether [`norm_linear`] and [`linear_add`] compute a product over these views.
pub(crate) fn fuses(call: &LinearCall, views: &[View], ex: &Exec) -> bool {
    let call = LinearCall { aligned: aligned(views), ..*call };
    ex.is_cuda() && FusedLinearForm::choose(&call, &ex.machine()) == Some(FusedLinearForm::Stream)
}

/// See [`crate::norm_linear_into`]; [`fuses`] has said yes.
pub(crate) fn norm_linear(
    op: &str,
    residual: View,
    norm: &PreNorm,
    w: View,
    bias: Option<View>,
    mut out: ViewMut,
    ex: &Exec,
) -> Result<()> {
    stream(op, residual, Some(norm), (w, bias), (&mut out, Output::F32), ex)
}

/// See [`crate::linear_add_into`]; [`fuses`] has said yes.
pub(crate) fn linear_add(
    op: &str,
    x: View,
    w: View,
    bias: Option<View>,
    mut residual: ViewMut,
    ex: &Exec,
) -> Result<()> {
    stream(op, x, None, (w, bias), (&mut residual, Output::AddF32), ex)
}

/// The launch in which weights stream past a few rows.
fn stream(
    op: &str,
    x: View,
    norm: Option<&PreNorm>,
    (w, bias): (View, Option<View>),
    (out, output): (&mut ViewMut, Output),
    ex: &Exec,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let args = LinearStreamArgs {
        x: cuda.read(op, "x", x)?,
        norm: cuda.read_or_null(op, "norm", norm.map(|norm| norm.weight))?,
        eps: norm.map_or(0., |norm| norm.eps),
        w: cuda.read(op, "w", w)?,
        bias: cuda.read_or_null(op, "bias", bias)?,
        out: cuda.write(op, "out", out)?,
        output,
        m: small(op, x.rows())?,
        n: small(op, w.rows())?,
        k: small(op, w.dims()[1])?,
    };
    // SAFETY: dims and dtypes are checked at the door, the launcher's conditions by the form.
    cuda.check(op, unsafe { ffi::moe_linear_stream(&args, cuda.raw()?) })
}
