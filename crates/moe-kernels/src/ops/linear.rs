//! Dense products: `x · wᵀ + bias`.
//!
//! On the CPU a product with a quantised weight has the bits of a product with the dequantised f32 matrix, whose
//! columns are in packed order. This holds for f32 activations, and for codes that stand for floats. With bf16 or f16
//! activations and integer weights, a row of x is summed as 16-bit fixed point in blocks of up to 128 columns. The
//! error is at most 2^-15 of the largest value of a block.

use std::ops::Range;

use candle_core::{DType, Result, bail};

use crate::arguments::{expect_dims, expect_dtype, expect_matrix, expect_optional};
use crate::cpu::epilogue::Store;
use crate::cpu::gemm::{Products, products};
use crate::cpu::quant::{self, QuantProducts};
use crate::cpu::shared::Shared;
use crate::cpu::simd::Lanes;
use crate::cpu::units::Units;
use crate::exec::Exec;
use crate::plan::{Form, LinearForm};
use crate::rows_view::RowsView;
use crate::view::{View, ViewMut};
use crate::weight::WeightView;
use crate::with_float;

/// Number of segments S into which a row-parallel product cuts its K: the largest of 8, 4, 2, 1 that divides `k`. If a
/// tensor-parallel size divides S, such a product can be split over the ranks without changing a bit.
pub fn row_parallel_segments(k: usize) -> usize {
    [8, 4, 2].into_iter().find(|s| k.is_multiple_of(*s)).unwrap_or(1)
}

/// out = x · wᵀ + bias, summed in f32, rounded once.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [T, K] model dtype (f32, bf16, f16); or FP8 from [`ProductRows`](crate::ProductRows) |
/// | `w` | [N, K] same dtype, in rows or panels; or quantised, packed for this product |
/// | `bias` | \[N\] same dtype |
/// | `out` | [T, N] same dtype or f32 |
///
/// An output depends only on its row of x, its row of w and K, never on T, N or the number of threads.
///
/// # Errors
/// A wrong dtype or wrong dims.
pub fn linear_into<'x, 'w>(
    x: impl Into<RowsView<'x>>,
    w: impl Into<WeightView<'w>>,
    bias: Option<View>,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    product("linear", false, x.into(), w.into(), bias, out, ex)
}

/// [`linear_into`] with K cut into [`row_parallel_segments`] equal segments. Each segment's f32 sum is computed like a
/// separate product, then the sums are added in ascending order, then the bias, and the result is rounded once.
/// Tensor-parallel ranks that hold whole segments reproduce its bits.
///
/// # Errors
/// A wrong dtype or wrong dims.
pub fn linear_row_parallel_into<'x, 'w>(
    x: impl Into<RowsView<'x>>,
    w: impl Into<WeightView<'w>>,
    bias: Option<View>,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    product("linear_row_parallel", true, x.into(), w.into(), bias, out, ex)
}

fn product(
    op: &str,
    row_parallel: bool,
    x: RowsView,
    w: WeightView,
    bias: Option<View>,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let x = match x {
        RowsView::Floats(x) => x,
        #[cfg(feature = "cuda")]
        RowsView::Fp8(rows) => {
            expect_fp8(op, rows, &w, bias, &out)?;
            return crate::cuda::linear::linear_of_rows(op, rows, w, bias, out, ex);
        }
        #[cfg(not(feature = "cuda"))]
        x => x.floats(op)?,
    };
    let (t, k) = expect_matrix(op, "x", &x)?;
    expect_dtype(op, "w", &w, x.dtype())?;
    let n = expect_weight(op, &w, bias, k)?;
    expect_dims(op, "out", &out, &[t, n])?;
    if out.dtype() != x.dtype() && out.dtype() != DType::F32 {
        bail!("{op}: expected out of dtype {} or f32, got {}", x.dtype().as_str(), out.dtype().as_str())
    }
    let rows = [0, expect_u32(op, t)?];
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::linear::linear(op, x, w, bias, out, ex);
    }
    ex.launched(|| LinearForm::Cpu.name());
    let of = if row_parallel { row_parallel_segments(k) } else { 1 };
    expect_segments(op, &w, of)?;
    let rows = Rows { of, segments: 0..of, offsets: &rows, out_rows: None };
    with_float!(x.dtype(), op, X => match out.dtype() {
        DType::F32 => run::<X, f32>(x, w, bias, rows, out, ex),
        _ => run::<X, X>(x, w, bias, rows, out, ex),
    })
}

/// Fails for a quantised weight that is packed in a different number of segments. Floats may be cut into any number.
pub(super) fn expect_segments(op: &str, w: &WeightView, of: usize) -> Result<()> {
    let WeightView::Quantised(w) = w else { return Ok(()) };
    match w.segments(op)? {
        packed if packed == of => Ok(()),
        packed => bail!("{op}: expected a matrix packed in {of} segments, got one in {packed}"),
    }
}

/// Checks the weight by which rows in FP8 are multiplied, and the output.
#[cfg(feature = "cuda")]
pub(super) fn expect_fp8(
    op: &str,
    rows: &crate::Fp8Rows,
    w: &WeightView,
    bias: Option<View>,
    out: &ViewMut,
) -> Result<()> {
    let [t, k] = rows.dims();
    let n = expect_weight(op, w, bias, k)?;
    expect_dims(op, "out", out, &[t, n])?;
    match out.dtype() {
        DType::BF16 | DType::F32 => Ok(()),
        other => bail!("{op}: expected out of dtype bf16 or f32, got {}", other.as_str()),
    }
}

/// Checks a weight [N, K] and its bias, and returns N.
pub(super) fn expect_weight(op: &str, w: &WeightView, bias: Option<View>, k: usize) -> Result<usize> {
    let (n, _) = expect_matrix(op, "w", w)?;
    expect_dims(op, "w", w, &[n, k])?;
    expect_optional(op, "bias", bias.as_ref(), w.dtype(), &[n])?;
    Ok(n)
}

/// A number of rows as u32, the type of offsets.
pub(super) fn expect_u32(op: &str, rows: usize) -> Result<u32> {
    match u32::try_from(rows) {
        Ok(rows) => Ok(rows),
        Err(_) => bail!("{op}: {rows} rows are more than a u32 counts; split them"),
    }
}

/// Which rows are multiplied by which matrices, and over which columns.
pub(super) struct Rows<'a> {
    /// The number of equal segments of K. Each is summed like a separate product.
    pub of: usize,
    /// The segments that are multiplied.
    pub segments: Range<usize>,
    /// The rows of x of each matrix.
    pub offsets: &'a [u32],
    /// The row of `out` that row i of x writes; `None` means row i.
    pub out_rows: Option<&'a [u32]>,
}

/// Products of rows of x with matrices [.., N, K], on the CPU. The op has checked all arguments.
pub(super) fn run<X: Lanes, O: Lanes>(
    x: View,
    w: WeightView,
    bias: Option<View>,
    rows: Rows,
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "a product";
    let &[.., n, k] = w.dims() else { bail!("expected matrices, got dims {:?}", w.dims()) };
    let x = x.cpu::<X>()?;
    let bias = bias.map(|b| b.cpu::<X>()).transpose()?;
    let out = Shared::new(out.cpu_mut::<O>()?);
    let store = Store { isa: ex.isa(), n, bias, rows: rows.out_rows, out };
    let Rows { of, segments, offsets, .. } = rows;
    if let WeightView::Quantised(w) = w {
        let p = QuantProducts { x, index: None, w: w.matrix(op)?, segments, offsets, units: Units::Rows(n) };
        return quant::products(&p, ex, &store);
    }
    let (w, order) = w.values(op)?;
    let p = Products {
        x,
        index: None,
        w: w.cpu()?,
        order,
        matrix_rows: n,
        k: k / of * segments.len(),
        stride: k,
        start: k / of * segments.start,
        segments: segments.len(),
        offsets,
        units: Units::Rows(n),
    };
    products(&p, ex, &store)
}
