//! A product together with the norm before it, or with the addition to the residual stream after it: one launch if a
//! kernel does both, otherwise two.

use candle_core::{DType, Result};

use super::linear::expect_weight;
use super::{add_into, linear_into, linear_row_parallel_into, rms_norm_into};
use crate::arguments::{expect, expect_dtype, expect_matrix};
use crate::exec::Exec;
use crate::monolithic::PreNorm;
use crate::rows_view::RowsView;
use crate::view::{View, ViewMut};
use crate::weight::WeightView;

/// out [T, N] f32 = norm(residual [T, H] f32) · wᵀ + bias.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `norm` | weight \[H\] model dtype (f32, bf16, f16) |
/// | `w` | [N, H] model dtype |
/// | `bias` | \[N\] model dtype |
///
/// # Errors
/// Wrong dims or dtypes.
pub fn norm_linear_into<'w>(
    residual: View,
    norm: &PreNorm,
    w: impl Into<WeightView<'w>>,
    bias: Option<View>,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    norm_product(residual, norm, w.into(), bias, out, ex)
}

fn norm_product(
    residual: View,
    norm: &PreNorm,
    w: WeightView,
    bias: Option<View>,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "norm_linear";
    let dtype = w.dtype();
    let (t, h) = expect_matrix(op, "residual", &residual)?;
    expect_dtype(op, "residual", &residual, DType::F32)?;
    expect(op, "norm", &norm.weight, dtype, &[h])?;
    let n = expect_weight(op, &w, bias, h)?;
    expect(op, "out", &out, DType::F32, &[t, n])?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda()
        && crate::cuda::linear::fuses(t, w, bias.is_some(), &[residual, out.as_view(), norm.weight], ex)
    {
        return crate::cuda::linear::norm_linear(op, residual, norm, w, bias, out, ex);
    }
    let mut x = ex.scratch(dtype, residual.dims())?;
    rms_norm_into(residual, norm.weight, norm.eps, x.view_mut(), ex)?;
    linear_into(x.view(), w, bias, out, ex)
}

/// residual [T, N] f32 += x [T, K] · wᵀ + bias, a row-parallel product on one rank.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [T, K] model dtype (f32, bf16, f16); or in FP8, made for this product |
/// | `w` | [N, K] model dtype |
/// | `bias` | \[N\] model dtype |
///
/// # Errors
/// Wrong dims or dtypes.
pub fn linear_add_into<'x, 'w>(
    x: impl Into<RowsView<'x>>,
    w: impl Into<WeightView<'w>>,
    bias: Option<View>,
    residual: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    product_add(x.into(), w.into(), bias, residual, ex)
}

fn product_add(
    x: RowsView,
    w: WeightView,
    bias: Option<View>,
    residual: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "linear_add";
    let (t, k) = match x {
        RowsView::Floats(x) => {
            expect_dtype(op, "x", &x, w.dtype())?;
            expect_matrix(op, "x", &x)?
        }
        RowsView::Fp8(rows) => rows.dims().into(),
    };
    let n = expect_weight(op, &w, bias, k)?;
    expect(op, "residual", &residual, DType::F32, &[t, n])?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        use crate::cuda::linear;
        let mut views = vec![residual.as_view()];
        if let RowsView::Floats(x) = x {
            views.push(x);
            if linear::fuses(t, w, bias.is_some(), &views, ex) {
                return linear::linear_add(op, x, w, bias, residual, ex);
            }
        }
        if linear::adds(t, w, bias.is_some(), &views, ex) {
            return linear::add_product(op, x, (w, bias), residual, ex);
        }
    }
    let mut delta = ex.scratch(DType::F32, residual.dims())?;
    linear_row_parallel_into(x, w, bias, delta.view_mut(), ex)?;
    add_into(delta.view(), residual, ex)
}
