//! Dense products: `x · wᵀ + bias`.

use candle_core::{DType, Result, bail};

use crate::cpu::epilogue::Store;
use crate::cpu::gemm::{Products, Units, products};
use crate::cpu::shared::Shared;
use crate::cpu::simd::Lanes;
use crate::door::{expect_dims, expect_dtype, expect_matrix};
use crate::exec::Exec;
use crate::view::{View, ViewMut};
use crate::with_float;

/// Number of segments S into which a row-parallel product cuts its K: the largest of 8, 4, 2, 1
/// that divides `k`. A tensor-parallel size that divides S splits such a product over ranks
/// without changing a bit.
pub fn row_parallel_segments(k: usize) -> usize {
    [8, 4, 2].into_iter().find(|s| k.is_multiple_of(*s)).unwrap_or(1)
}

/// out = x · wᵀ + bias, summed in f32, rounded once.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [T, K] model dtype (f32, bf16, f16) |
/// | `w` | [N, K] same dtype |
/// | `bias` | \[N\] same dtype |
/// | `out` | [T, N] same dtype or f32 |
///
/// An output depends on its row of x, its row of w and K only, never on T, N or threads.
///
/// # Errors
/// A wrong dtype or wrong dims.
pub fn linear_into(x: View, w: View, bias: Option<View>, out: ViewMut, ex: &mut Exec) -> Result<()> {
    product("linear", 1, x, w, bias, out, ex)
}

/// [`linear_into`] with K cut into [`row_parallel_segments`] equal segments: each segment's f32
/// sum is computed like a product of its own, the sums are added in ascending order, then the
/// bias, then one rounding. Tensor-parallel ranks that hold whole segments reproduce its bits.
///
/// # Errors
/// A wrong dtype or wrong dims.
pub fn linear_row_parallel_into(
    x: View,
    w: View,
    bias: Option<View>,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let segments = row_parallel_segments(x.dims().last().copied().unwrap_or(0));
    product("linear_row_parallel", segments, x, w, bias, out, ex)
}

fn product(
    op: &str,
    segments: usize,
    x: View,
    w: View,
    bias: Option<View>,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let (t, k) = expect_matrix(op, "x", &x)?;
    let (n, _) = expect_matrix(op, "w", &w)?;
    expect_dims(op, "w", &w, &[n, k])?;
    expect_dtype(op, "w", &w, x.dtype())?;
    if let Some(bias) = &bias {
        expect_dims(op, "bias", bias, &[n])?;
        expect_dtype(op, "bias", bias, x.dtype())?;
    }
    expect_dims(op, "out", &out, &[t, n])?;
    if out.dtype() != x.dtype() && out.dtype() != DType::F32 {
        bail!("{op}: expected out of dtype {} or f32, got {}", x.dtype().as_str(), out.dtype().as_str())
    }
    if u32::try_from(t).is_err() {
        bail!("{op}: {t} rows are more than a u32 counts; split them")
    }
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::linear::linear(op, x, w, bias, out, ex);
    }
    with_float!(x.dtype(), op, X => {
        if out.dtype() == DType::F32 {
            run::<X, f32>(segments, x, w, bias, out, ex)
        } else {
            run::<X, X>(segments, x, w, bias, out, ex)
        }
    })
}

fn run<X: Lanes, O: Lanes>(
    segments: usize,
    x: View,
    w: View,
    bias: Option<View>,
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let (n, k) = (w.dims()[0], w.dims()[1]);
    let bias = bias.map(|b| b.cpu::<X>()).transpose()?;
    let rows = [0, x.rows() as u32];
    let p = Products {
        x: x.cpu::<X>()?,
        index: None,
        w: w.cpu()?,
        matrix_rows: n,
        k,
        stride: k,
        start: 0,
        segments,
        offsets: &rows,
        units: Units::Rows(n),
    };
    let out = Shared::new(out.cpu_mut::<O>()?);
    products(&p, ex, &Store { isa: ex.isa(), n, bias, rows: None, out })
}
