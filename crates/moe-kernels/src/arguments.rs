//! Argument checks: each public op verifies dtype and dims once, and its kernels then rely on them.
//!
//! A call on tensors checks before it makes views of them. A tensor that no view can have, because of its dims or its
//! dtype, would be an error that knows no name.

use candle_core::{DType, Error, Result, Tensor};

use crate::error::ArgumentError;
use crate::view::{View, ViewMut};

/// What the checks need to know about a view, read-only or writable.
pub trait Shaped {
    /// The dimensions.
    fn dims(&self) -> &[usize];
    /// The dtype.
    fn dtype(&self) -> DType;
}

impl Shaped for View<'_> {
    fn dims(&self) -> &[usize] {
        View::dims(self)
    }
    fn dtype(&self) -> DType {
        View::dtype(self)
    }
}

impl Shaped for ViewMut<'_> {
    fn dims(&self) -> &[usize] {
        ViewMut::dims(self)
    }
    fn dtype(&self) -> DType {
        ViewMut::dtype(self)
    }
}

impl Shaped for Tensor {
    fn dims(&self) -> &[usize] {
        Tensor::dims(self)
    }
    fn dtype(&self) -> DType {
        Tensor::dtype(self)
    }
}

/// Fails unless `rows` are [.., `width`] of this dtype. A call on tensors checks this first, so that its error names
/// the argument of the caller and not a weight.
pub fn expect_rows(op: &str, name: &str, rows: &impl Shaped, width: usize, dtype: DType) -> Result<()> {
    if rows.dims().last() != Some(&width) {
        return Err(wrong_dims(op, name, rows, format!("dims [.., {width}]")));
    }
    expect_dtype(op, name, rows, dtype)
}

/// Fails unless `v` has this dtype and exactly these dims.
pub fn expect(op: &str, name: &str, v: &impl Shaped, dtype: DType, dims: &[usize]) -> Result<()> {
    expect_dims(op, name, v, dims)?;
    expect_dtype(op, name, v, dtype)
}

/// [`expect`] of a view that may be absent.
pub fn expect_optional(
    op: &str,
    name: &str,
    v: Option<&impl Shaped>,
    dtype: DType,
    dims: &[usize],
) -> Result<()> {
    v.map_or(Ok(()), |v| expect(op, name, v, dtype, dims))
}

/// Fails unless `v` has exactly these dims.
pub fn expect_dims(op: &str, name: &str, v: &impl Shaped, dims: &[usize]) -> Result<()> {
    if v.dims() != dims {
        return Err(wrong_dims(op, name, v, format!("dims {dims:?}")));
    }
    Ok(())
}

/// Fails unless `v` has this dtype.
pub fn expect_dtype(op: &str, name: &str, v: &impl Shaped, dtype: DType) -> Result<()> {
    if v.dtype() != dtype {
        return Err(wrong_dtype(op, name, v, dtype.as_str().to_string()));
    }
    Ok(())
}

/// Fails unless `v` has a dtype that a model may have: f32, bf16 or f16.
pub fn expect_float(op: &str, name: &str, v: &impl Shaped) -> Result<()> {
    match v.dtype() {
        DType::F32 | DType::BF16 | DType::F16 => Ok(()),
        _ => Err(wrong_dtype(op, name, v, "f32, bf16 or f16".to_string())),
    }
}

/// Fails unless `v` has the model dtype or is f32, which results have that are not rounded before they are added to the
/// residual stream.
pub fn expect_stream(op: &str, name: &str, v: &impl Shaped, model: DType) -> Result<()> {
    if model == DType::F32 {
        return expect_dtype(op, name, v, model);
    }
    if v.dtype() != model && v.dtype() != DType::F32 {
        return Err(wrong_dtype(op, name, v, format!("{} or f32", model.as_str())));
    }
    Ok(())
}

/// The two dims of a matrix; fails for another rank.
pub fn expect_matrix(op: &str, name: &str, v: &impl Shaped) -> Result<(usize, usize)> {
    match v.dims() {
        &[rows, columns] => Ok((rows, columns)),
        _ => Err(wrong_dims(op, name, v, "2 dimensions".to_string())),
    }
}

/// The three dims of a rank-3 view; fails for another rank.
pub fn expect_rank3(op: &str, name: &str, v: &impl Shaped) -> Result<(usize, usize, usize)> {
    match v.dims() {
        &[a, b, c] => Ok((a, b, c)),
        _ => Err(wrong_dims(op, name, v, "3 dimensions".to_string())),
    }
}

/// Number of slots of a cache [num_blocks, Hkv, block_size, D]; fails for other dims.
pub(crate) fn expect_cache(op: &str, name: &str, cache: &impl Shaped, hkv: usize, d: usize) -> Result<usize> {
    match cache.dims() {
        &[blocks, heads, block_size, size] if heads == hkv && size == d && block_size > 0 => {
            Ok(blocks * block_size)
        }
        _ => {
            let expected = format!("dims [num_blocks, {hkv}, block_size > 0, {d}]");
            Err(wrong_dims(op, name, cache, expected))
        }
    }
}

fn wrong_dims(op: &str, name: &str, v: &impl Shaped, expected: String) -> Error {
    let got = v.dims().to_vec();
    ArgumentError::Dims { op: op.to_string(), name: name.to_string(), expected, got }.into()
}

fn wrong_dtype(op: &str, name: &str, v: &impl Shaped, expected: String) -> Error {
    let got = v.dtype();
    ArgumentError::Dtype { op: op.to_string(), name: name.to_string(), expected, got }.into()
}
