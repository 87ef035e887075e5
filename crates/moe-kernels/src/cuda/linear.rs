//! Dense products on CUDA.

use candle_core::{DType, Result, bail};

use super::args::{LinearStreamArgs, LinearTensorArgs, Output, QuantLinearStreamArgs, QuantLinearTensorArgs};
use super::quant::DevicePack;
use super::{aligned, any, blas, ffi, fp8, quant, small};
use crate::exec::Exec;
use crate::fp8::Fp8Order;
use crate::monolithic::PreNorm;
use crate::plan::{Form, FusedLinearForm, LinearCall, LinearForm};
use crate::rows_view::{Fp8Rows, RowsView};
use crate::view::{View, ViewMut};
use crate::weight::WeightView;

/// A matrix [n, k] on a device.
#[derive(Clone, Copy)]
enum Matrix<'a> {
    /// Floats in rows.
    Rows(View<'a>),
    /// One quantised matrix.
    Pack(&'a DevicePack),
}

impl<'a> Matrix<'a> {
    fn of(op: &str, w: WeightView<'a>) -> Result<Self> {
        Ok(match w {
            WeightView::Quantised(w) => Self::Pack(w.device_pack(op)?),
            w => Self::Rows(w.rows(op)?),
        })
    }

    fn call(self, rows: usize, dtype: DType, bias: bool, views: &[View]) -> LinearCall {
        let aligned = aligned(views);
        match self {
            Self::Rows(w) => {
                let n = w.dims()[0];
                let k = w.dims()[1];
                let aligned = aligned && super::aligned(&[w]);
                LinearCall { rows, n, k, dtype, quant: None, bias, aligned }
            }
            Self::Pack(pack) => {
                let [_, n, k] = pack.dims();
                LinearCall { rows, n, k, dtype, quant: Some(pack.weights()), bias, aligned }
            }
        }
    }

    /// The name of the kernel that multiplies rows of `x` and contains the norm or the addition.
    fn fused_kernel(self, x: View) -> String {
        FusedLinearForm::Stream.kernel(&self.call(x.rows(), DType::BF16, false, &[]))
    }
}

/// out = x · wᵀ + bias. The op has checked dims and dtypes.
pub(crate) fn linear(
    op: &str,
    x: View,
    w: WeightView,
    bias: Option<View>,
    out: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let output = Output::stored_as(out.dtype());
    multiply(op, x, (w, bias), (out, output), ex)
}

/// out = x · wᵀ + bias, stored or added.
fn multiply(
    op: &str,
    x: View,
    (w, bias): (WeightView, Option<View>),
    (mut out, output): (ViewMut, Output),
    ex: &Exec,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let w = Matrix::of(op, w)?;
    let call = w.call(x.rows(), x.dtype(), bias.is_some(), &[x, out.as_view()]);
    let form = LinearForm::choose(&call, &ex.machine());
    ex.launched(|| form.unwrap_or(LinearForm::Any).kernel(&call));
    let ordered = match (form, w) {
        (Some(form), Matrix::Pack(pack)) if form.orders_rows(&call) => Some(quant::ordered(op, x, pack, ex)?),
        _ => None,
    };
    let x = ordered.as_ref().map_or(x, |rows| rows.view());
    match (form, w) {
        (Some(LinearForm::Blas), Matrix::Rows(w)) => blas::product(cuda, op, x, w, (out, output)),
        (Some(LinearForm::QuantBlas), Matrix::Pack(pack)) => {
            let mut floats = ex.scratch(DType::BF16, &[call.n, call.k])?;
            match ordered {
                Some(_) => pack.dequantise_in_pack_order(op, floats.view_mut(), ex)?,
                None => pack.dequantise_into(op, floats.view_mut(), ex)?,
            }
            blas::product(cuda, op, x, floats.view(), (out, output))
        }
        (Some(LinearForm::Fp8Blas), Matrix::Pack(pack)) => {
            fp8::linear_by_rows_of(op, x, pack, (out, output), ex)
        }
        (Some(LinearForm::Fp8), Matrix::Pack(pack)) => {
            let x = cuda.read(op, "x", x)?;
            let rows = fp8::quantised(op, x, [call.rows, call.k], Fp8Order::Quads, ex)?;
            fp8::linear(op, &rows, (pack, bias), (out, output), ex)
        }
        (Some(LinearForm::Stream), w) => stream(op, x, None, (w, bias), (&mut out, output), ex),
        (Some(LinearForm::Tensor), w) => tensor(op, x, (w, bias), (&mut out, output), ex),
        _ if output == Output::AddF32 => bail!("{op}: expected a product that adds, got {call:?}"),
        (_, Matrix::Rows(w)) => any::linear(ex, op, x, w, bias, out),
        (_, Matrix::Pack(pack)) => quant::linear(op, x, pack, bias, out, ex),
    }
}

/// Whether the product of this number of rows adds to the residual stream.
pub(crate) fn adds(rows: usize, w: WeightView, bias: bool, views: &[View], ex: &Exec) -> bool {
    let Ok(matrix) = Matrix::of("a product that adds", w) else { return false };
    let call = matrix.call(rows, w.dtype(), bias, views);
    LinearForm::choose(&call, &ex.machine()).is_some_and(|form| form.adds(rows).is_ok())
}

/// residual += x · wᵀ + bias. The caller must have asked [`adds`].
pub(crate) fn add_product(
    op: &str,
    x: RowsView,
    (w, bias): (WeightView, Option<View>),
    residual: ViewMut,
    ex: &Exec,
) -> Result<()> {
    match x {
        RowsView::Floats(x) => multiply(op, x, (w, bias), (residual, Output::AddF32), ex),
        RowsView::Fp8(rows) => linear_of_fp8(op, rows, (w, bias), (residual, Output::AddF32), ex),
    }
}

/// The order of FP8 rows that the product of `rows` rows with `w` reads; `None` if it reads bf16.
pub(crate) fn fp8_order(rows: usize, w: WeightView, bias: bool, ex: &Exec) -> Result<Option<Fp8Order>> {
    let call = Matrix::of("a product's rows", w)?.call(rows, w.dtype(), bias, &[]);
    Ok(LinearForm::choose(&call, &ex.machine()).and_then(|form| form.fp8_order(rows)))
}

/// out = rows · wᵀ + bias, stored or added, for rows that were made for this product. The op has checked dims and
/// dtypes.
fn linear_of_fp8(
    op: &str,
    rows: &Fp8Rows,
    (w, bias): (WeightView, Option<View>),
    (out, output): (ViewMut, Output),
    ex: &Exec,
) -> Result<()> {
    let reads = fp8_order(rows.dims()[0], w, bias.is_some(), ex)?;
    let [t, _] = rows.dims();
    match (Matrix::of(op, w)?, rows.order) {
        (Matrix::Pack(pack), order) if reads == Some(order) && aligned(&[out.as_view()]) => match order {
            Fp8Order::Rows => {
                ex.launched(|| LinearForm::Fp8Blas.name());
                fp8::linear_by_rows(op, rows, pack, (out, output), ex)
            }
            Fp8Order::Quads => {
                ex.launched(|| LinearForm::Fp8.name());
                fp8::linear(op, rows, (pack, bias), (out, output), ex)
            }
        },
        (_, order) => bail!(
            "{op}: {t} rows in FP8, {order:?}, were made for another product: this one reads {reads:?}; make them with \
             ProductRows::of_product"
        ),
    }
}

/// out = rows · wᵀ + bias, stored, for rows that were made for this product.
pub(crate) fn linear_of_rows(
    op: &str,
    rows: &Fp8Rows,
    w: WeightView,
    bias: Option<View>,
    out: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let output = Output::stored_as(out.dtype());
    linear_of_fp8(op, rows, (w, bias), (out, output), ex)
}

/// Whether [`norm_linear`] and [`linear_add`] compute a product of this number of rows over these views.
pub(crate) fn fuses(rows: usize, w: WeightView, bias: bool, views: &[View], ex: &Exec) -> bool {
    let Ok(matrix) = Matrix::of("a fused product", w) else { return false };
    let call = matrix.call(rows, w.dtype(), bias, views);
    ex.is_cuda() && FusedLinearForm::choose(&call, &ex.machine()) == Some(FusedLinearForm::Stream)
}

/// See [`crate::norm_linear_into`]. The caller must have asked [`fuses`].
pub(crate) fn norm_linear(
    op: &str,
    residual: View,
    norm: &PreNorm,
    w: WeightView,
    bias: Option<View>,
    mut out: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let matrix = Matrix::of(op, w)?;
    ex.launched(|| matrix.fused_kernel(residual));
    stream(op, residual, Some(norm), (matrix, bias), (&mut out, Output::F32), ex)
}

/// See [`crate::linear_add_into`]. The caller must have asked [`fuses`].
pub(crate) fn linear_add(
    op: &str,
    x: View,
    w: WeightView,
    bias: Option<View>,
    mut residual: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let matrix = Matrix::of(op, w)?;
    ex.launched(|| matrix.fused_kernel(x));
    stream(op, x, None, (matrix, bias), (&mut residual, Output::AddF32), ex)
}

/// The launch of warpgroup products. The rows are in the order of the columns of `w`.
fn tensor(
    op: &str,
    x: View,
    (w, bias): (Matrix, Option<View>),
    (out, output): (&mut ViewMut, Output),
    ex: &Exec,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let x_at = cuda.read(op, "x", x)?;
    let bias = cuda.read_or_null(op, "bias", bias)?;
    let out = cuda.write(op, "out", out)?;
    let m = small(op, x.rows())?;
    let splits = if ex.batch_invariant() { -1 } else { 0 };
    // SAFETY: the op has checked dims and dtypes, and the form has checked the launchers' conditions.
    unsafe {
        match w {
            Matrix::Rows(w) => {
                let n = small(op, w.rows())?;
                let k = small(op, w.dims()[1])?;
                let w = cuda.read(op, "w", w)?;
                let args = LinearTensorArgs { x: x_at, w, bias, out, output, m, n, k, splits };
                cuda.check(op, ffi::moe_linear_tensor(&args, cuda.raw()?))
            }
            Matrix::Pack(pack) => {
                let w = pack.args_in_pack_order(op, cuda)?;
                let args = QuantLinearTensorArgs { x: x_at, w, bias, out, output, m, splits };
                cuda.check(op, ffi::moe_quant_linear_tensor(&args, cuda.raw()?))
            }
        }
    }
}

/// The launch in which weights are streamed past a few rows. The rows are in the order of the columns of `w`.
fn stream(
    op: &str,
    x: View,
    norm: Option<&PreNorm>,
    (w, bias): (Matrix, Option<View>),
    (out, output): (&mut ViewMut, Output),
    ex: &Exec,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let x_at = cuda.read(op, "x", x)?;
    let bias = cuda.read_or_null(op, "bias", bias)?;
    let weight = cuda.read_or_null(op, "norm", norm.map(|norm| norm.weight))?;
    let eps = norm.map_or(0., |norm| norm.eps);
    let out = cuda.write(op, "out", out)?;
    let m = small(op, x.rows())?;
    // SAFETY: the op has checked dims and dtypes, and the form has checked the launchers' conditions.
    unsafe {
        match w {
            Matrix::Rows(w) => {
                let n = small(op, w.rows())?;
                let k = small(op, w.dims()[1])?;
                let w = cuda.read(op, "w", w)?;
                let args = LinearStreamArgs { x: x_at, norm: weight, eps, w, bias, out, output, m, n, k };
                cuda.check(op, ffi::moe_linear_stream(&args, cuda.raw()?))
            }
            Matrix::Pack(pack) => {
                let w = pack.args_in_pack_order(op, cuda)?;
                let args = QuantLinearStreamArgs { x: x_at, norm: weight, eps, w, bias, out, output, m };
                cuda.check(op, ffi::moe_quant_linear_stream(&args, cuda.raw()?))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::quant_format::QuantFormat;
    use crate::plan::{ColumnOrder, Gpu, QuantWeights};
    use crate::scheme::{QuantGroup, QuantScheme};

    #[test]
    fn the_host_and_the_kernel_agree_on_what_streams() {
        let gpu = Gpu::HOPPER;
        let group = QuantGroup::Size(128);
        let int = QuantScheme::int(4, group);
        let fp8 = QuantScheme::fp8(QuantGroup::Channel);
        let q4k = QuantScheme::int(4, QuantGroup::Size(32)).with_minima().with_shared_scales(8);
        let schemes = [
            (int, DType::F16, QuantFormat::Int4),
            (fp8, DType::F32, QuantFormat::Fp8),
            (q4k, DType::U8, QuantFormat::Q4k),
        ];
        let mut fitting = 0;
        let mut refused = 0;
        for (scheme, scales, format) in schemes {
            let quant =
                QuantWeights { scheme, scales, gate_up: false, in_blocks: false, order: ColumnOrder::Input };
            for rows in 1..=8 {
                for k in (64..=20_480).step_by(64) {
                    let quantised = Some(quant);
                    let call = LinearCall {
                        rows,
                        n: 64,
                        k,
                        dtype: DType::BF16,
                        quant: quantised,
                        bias: false,
                        aligned: true,
                    };
                    let n = |n: usize| i32::try_from(n).unwrap();
                    // SAFETY: a pure function of numbers.
                    let kernel = unsafe {
                        ffi::moe_quant_linear_stream_fits(format, n(rows), n(k), n(gpu.block_shared_memory))
                    };
                    let host = call.expect_quant_stream(quant, gpu);
                    assert_eq!(host.is_ok(), kernel == 1, "{call:?}: {host:?}");
                    if host.is_ok() { fitting += 1 } else { refused += 1 }
                }
            }
        }
        assert!(fitting > 1000 && refused > 1000, "{fitting} fit, {refused} do not");
    }
}
