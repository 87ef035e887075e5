//! Large dense products by cuBLAS, which is faster than this crate's kernels above 64 rows (docs/lessons/steps.md).

use std::ffi::c_void;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::cublas::result::{gemm_ex, gemm_strided_batched_ex};
use candle_core::cuda_backend::cudarc::cublas::sys;
use candle_core::{DType, Result, bail};

use super::args::Output;
use super::{CudaExec, small};
use crate::view::{View, ViewMut};

/// Scratch memory that cuBLAS may use, of the size that its documentation recommends for Hopper. It is set once, so
/// that products inside a captured graph allocate nothing.
pub(super) const WORKSPACE_WORDS: usize = (32 << 20) / 4;

/// out [M, N] = x [M, K] · w [N, K]ᵀ, both bf16, summed in f32. The result is stored (bf16 or f32) or, depending on
/// `output`, added to the existing f32 values. The op has checked dims and dtypes.
pub(crate) fn product(
    cuda: &CudaExec,
    op: &str,
    x: View,
    w: View,
    (mut out, output): (ViewMut, Output),
) -> Result<()> {
    let m = small(op, x.rows())?;
    let n = small(op, w.rows())?;
    let k = small(op, w.dims()[1])?;
    let out_type = element_type(out.dtype());
    let x = cuda.read::<c_void>(op, "x", x)?;
    let w = cuda.read::<c_void>(op, "w", w)?;
    let out = cuda.write::<c_void>(op, "out", &mut out)?;
    let one = 1f32;
    let kept = output.kept();
    let one = (&raw const one).cast();
    let kept = (&raw const kept).cast();
    let handle = handle(cuda)?;
    let bf16 = sys::cudaDataType::CUDA_R_16BF;
    let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
    let algorithm = sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP;
    let transposed = sys::cublasOperation_t::CUBLAS_OP_T;
    let plain = sys::cublasOperation_t::CUBLAS_OP_N;
    // Row-major arrays are column-major ones transposed: outᵀ [N, M] = w · xᵀ.
    // SAFETY: the addresses cover [N, K], [M, K] and [M, N] elements on the handle's device.
    unsafe {
        gemm_ex(
            handle, transposed, plain, n, m, k, one, w, bf16, k, x, bf16, k, kept, out, out_type, n, compute,
            algorithm,
        )
    }
    .w()
}

/// Products of every head's rows with the head's matrix, bf16.
pub(crate) struct PerHead<'a> {
    /// Rows of k elements; the distance in elements from a row to the next one, and from a head's first row to the next
    /// head's.
    pub(crate) x: (View<'a>, [usize; 2]),
    /// [heads, n, k], or `by_columns` [heads, k, n].
    pub(crate) w: View<'a>,
    pub(crate) by_columns: bool,
    pub(crate) rows: usize,
    pub(crate) heads: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// The distance in elements from a row of the result to the next one (at least n), and from a head to the next one.
    pub(crate) out: [usize; 2],
}

/// out (bf16 or f32) = w\[h\] · x for every head, summed in f32. The op has checked dims and dtypes.
pub(crate) fn per_head(cuda: &CudaExec, op: &str, p: &PerHead, mut out: ViewMut) -> Result<()> {
    let rows = small(op, p.rows)?;
    let heads = small(op, p.heads)?;
    let n = small(op, p.n)?;
    let k = small(op, p.k)?;
    let (x, [x_row, x_head]) = p.x;
    let x_row = small(op, x_row)?;
    let out_row = small(op, p.out[0])?;
    let out_type = element_type(out.dtype());
    let x = cuda.read::<c_void>(op, "x", x)?;
    let w = cuda.read::<c_void>(op, "w", p.w)?;
    let out = cuda.write::<c_void>(op, "out", &mut out)?;
    let one = 1f32;
    let zero = 0f32;
    let one = (&raw const one).cast();
    let zero = (&raw const zero).cast();
    let handle = handle(cuda)?;
    let bf16 = sys::cudaDataType::CUDA_R_16BF;
    let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
    let algorithm = sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP;
    let transposed = sys::cublasOperation_t::CUBLAS_OP_T;
    let plain = sys::cublasOperation_t::CUBLAS_OP_N;
    let (w_as, w_row) = if p.by_columns { (plain, n) } else { (transposed, k) };
    let matrix = i64::from(n) * i64::from(k);
    let x_head = x_head as i64;
    let out_head = p.out[1] as i64;
    // As in `product`, for each head outᵀ [n, rows] = w[h] · x[h]ᵀ.
    // SAFETY: the addresses cover the heads' matrices and the rows of all heads on the handle's device, as the caller
    // states.
    unsafe {
        gemm_strided_batched_ex(
            handle, w_as, plain, n, rows, k, one, w, bf16, w_row, matrix, x, bf16, x_row, x_head, zero, out,
            out_type, out_row, out_head, heads, compute, algorithm,
        )
    }
    .w()
}

/// The type of a result.
fn element_type(dtype: DType) -> sys::cudaDataType {
    match dtype {
        DType::F32 => sys::cudaDataType::CUDA_R_32F,
        _ => sys::cudaDataType::CUDA_R_16BF,
    }
}

/// candle's handle of this device, with this crate's workspace.
pub(super) fn handle(cuda: &CudaExec) -> Result<sys::cublasHandle_t> {
    let handle = *cuda.blas.handle();
    cuda.raw()?; // makes the device current
    if cuda.blas_ready.get().is_none() {
        let workspace = cuda.counters("cublas", WORKSPACE_WORDS)?;
        // SAFETY: the workspace lives as long as the context, and the handle is used on its stream alone.
        let status = unsafe { sys::cublasSetWorkspace_v2(handle, workspace, WORKSPACE_WORDS * 4) };
        if status != sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
            bail!("cuBLAS refuses a workspace: {status:?}")
        }
        let _ = cuda.blas_ready.set(());
    }
    Ok(handle)
}
