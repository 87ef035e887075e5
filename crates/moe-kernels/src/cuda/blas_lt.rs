//! Products of FP8 rows by cuBLASLt. x has a scale for each row and 128 columns, w for each block of 128 x 128.

use std::ffi::c_void;

use candle_core::cuda_backend::cudarc::cublas::sys::cublasOperation_t;
use candle_core::cuda_backend::cudarc::cublaslt::{result, sys};
use candle_core::{DType, Result, bail};

use super::args::{In, Output};
use super::{CudaExec, blas, small};
use crate::view::ViewMut;

/// Rows and columns of w that share a scale.
pub(super) const FP8_BLOCK: usize = 128;

/// Rows of E4M3 and their scales.
pub(super) struct Fp8Operand {
    /// [rows, k] bytes.
    pub q: In,
    /// f32: of x [k / 128, rows], of w [rows / 128, k / 128 rounded up to 4].
    pub scales: In,
    pub rows: usize,
}

/// out [M, N] = x [M, K] · w [N, K]ᵀ, summed in f32. The result is stored (bf16 or f32) or, depending on `output`,
/// added to the existing f32 values. M is a multiple of [`BLAS_FP8_ROWS`], N and K are multiples of 128.
///
/// [`BLAS_FP8_ROWS`]: crate::plan::BLAS_FP8_ROWS
pub(super) fn fp8_product(
    cuda: &CudaExec,
    op: &str,
    x: &Fp8Operand,
    w: &Fp8Operand,
    k: usize,
    (mut out, output): (ViewMut, Output),
) -> Result<()> {
    // A cuBLAS handle can be used as a cuBLASLt handle.
    let handle: sys::cublasLtHandle_t = blas::handle(cuda)?.cast();
    let workspace = cuda.counters("cublas", blas::WORKSPACE_WORDS)?;
    let m = small(op, x.rows)? as u64;
    let n = small(op, w.rows)? as u64;
    let k = small(op, k)? as u64;
    let out_type = match out.dtype() {
        DType::F32 => sys::cudaDataType::CUDA_R_32F,
        _ => sys::cudaDataType::CUDA_R_16BF,
    };
    let out = cuda.write::<c_void>(op, "out", &mut out)?;
    let e4m3 = sys::cudaDataType::CUDA_R_8F_E4M3;
    // Row-major arrays are column-major ones transposed: outᵀ [N, M] = w · xᵀ.
    let w_layout = Layout::new(e4m3, k, n)?;
    let x_layout = Layout::new(e4m3, k, m)?;
    let out_layout = Layout::new(out_type, n, m)?;
    let product = Product::new(w.scales, x.scales)?;
    let preference = Preference::new(blas::WORKSPACE_WORDS * 4)?;
    let one = 1f32;
    let kept = output.kept();
    // SAFETY: the descriptors live until the end of this function, the addresses cover [N, K], [M, K] and [M, N]
    // elements and the scales that the descriptor names, on the handle's device; the workspace is used on its stream
    // alone.
    unsafe {
        let found = done(result::get_matmul_algo_heuristic(
            handle,
            product.0,
            w_layout.0,
            x_layout.0,
            out_layout.0,
            out_layout.0,
            preference.0,
        ))?;
        done(result::matmul(
            handle,
            product.0,
            (&raw const one).cast(),
            (&raw const kept).cast(),
            w.q.cast(),
            w_layout.0,
            x.q.cast(),
            x_layout.0,
            out.cast_const(),
            out_layout.0,
            out,
            out_layout.0,
            &raw const found.algo,
            workspace,
            blas::WORKSPACE_WORDS * 4,
            cuda.raw()?.cast(),
        ))
    }
}

/// Converts a status of cuBLASLt into an error.
fn done<T>(given: std::result::Result<T, result::CublasError>) -> Result<T> {
    match given {
        Ok(given) => Ok(given),
        Err(status) => bail!("a product of FP8 rows by cuBLASLt: {status}"),
    }
}

/// A column-major matrix without gaps.
struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(dtype: sys::cudaDataType, rows: u64, columns: u64) -> Result<Self> {
        done(result::create_matrix_layout(dtype, rows, columns, rows as i64)).map(Self)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made by `new`, dropped once. What it says of the layout changes nothing here.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// The description of a product, with the addresses of its scales.
struct Product(sys::cublasLtMatmulDesc_t);

impl Product {
    fn new(w_scales: In, x_scales: In) -> Result<Self> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        use sys::cublasLtMatmulMatrixScale_t as Scale;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let scale = sys::cudaDataType::CUDA_R_32F;
        let product = Self(done(result::create_matmul_desc(compute, scale))?);
        product.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, cublasOperation_t::CUBLAS_OP_T)?;
        let modes = [
            Scale::CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
            Scale::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
        ];
        product.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, modes[0])?;
        product.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, modes[1])?;
        product.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, w_scales)?;
        product.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, x_scales)?;
        Ok(product)
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: T) -> Result<()> {
        // SAFETY: the attribute is of T's size, and its value is copied.
        done(unsafe {
            result::set_matmul_desc_attribute(self.0, attribute, (&raw const value).cast(), size_of::<T>())
        })
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        // SAFETY: as for a layout.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

/// The algorithms that are considered: those with enough workspace.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(workspace: usize) -> Result<Self> {
        let preference = Self(done(result::create_matmul_pref())?);
        let attribute = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let from = (&raw const workspace).cast();
        // SAFETY: the attribute is a usize, which is copied.
        done(unsafe {
            result::set_matmul_pref_attribute(preference.0, attribute, from, size_of::<usize>())
        })?;
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: as for a layout.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
