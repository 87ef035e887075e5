//! Dense products on CUDA.

use candle_core::{DType, Result};

use super::args::{LinearStreamArgs, LinearTensorArgs, Output};
use super::{aligned, any, blas, ffi, small};
use crate::exec::Exec;
use crate::view::{View, ViewMut};

/// Most rows for which streaming the weights beats the tensor-core kernel (docs/kernels-decode.md).
const STREAM_ROWS: usize = 4;
/// From this many rows on cuBLAS is the fastest.
const BLAS_ROWS: usize = 65;
/// From this many weight rows on, a product is a vocabulary projection.
const WIDE: usize = 32 * 1024;
/// Longest rows of x of which [`STREAM_ROWS`] fit beside the weights' ring.
const STREAM_K: usize = 8192;

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
    let invariant = ex.batch_invariant();
    let bf16 = x.dtype() == DType::BF16 && k > 0 && k.is_multiple_of(64);
    if bf16 && !invariant && m >= BLAS_ROWS && bias.is_none() {
        return blas::product(cuda, op, x, w, out);
    }
    let streams = !invariant && m <= STREAM_ROWS && k <= STREAM_K && (n < WIDE || cuda.major < 9);
    if !bf16 || !(streams || cuda.major >= 9) || !aligned(&[x, w, out.as_view()]) {
        return any::linear(ex, op, x, w, bias, out);
    }
    let output = Output::stored_as(out.dtype());
    let (x, w_at) = (cuda.read(op, "x", x)?, cuda.read(op, "w", w)?);
    let bias = cuda.read_or_null(op, "bias", bias)?;
    let out = cuda.write(op, "out", &mut out)?;
    let (m, n, k) = (small(op, m)?, small(op, n)?, small(op, k)?);
    let (stream, none) = (cuda.raw()?, std::ptr::null());
    let code = if streams {
        // SAFETY: dims and dtypes are checked at the door, the launcher's conditions above.
        unsafe {
            ffi::moe_linear_stream(
                &LinearStreamArgs { x, norm: none, eps: 0., w: w_at, bias, out, output, m, n, k },
                stream,
            )
        }
    } else {
        let splits = if invariant { -1 } else { 0 };
        // SAFETY: as above.
        unsafe {
            ffi::moe_linear_tensor(
                &LinearTensorArgs { x, w: w_at, bias, out, output, m, n, k, splits },
                stream,
            )
        }
    };
    cuda.check(op, code)
}
