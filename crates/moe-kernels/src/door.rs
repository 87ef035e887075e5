//! Checks at the door: each public op verifies dtype and dims once, then trusts its inputs.

use candle_core::{DType, Result, bail};

use crate::view::{View, ViewMut};

/// What the checks need of a view, read-only or writable.
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
        bail!("{op}: expected {name} with dims {dims:?}, got {:?}", v.dims())
    }
    Ok(())
}

/// Fails unless `v` has this dtype.
pub fn expect_dtype(op: &str, name: &str, v: &impl Shaped, dtype: DType) -> Result<()> {
    if v.dtype() != dtype {
        bail!("{op}: expected {name} of dtype {}, got {}", dtype.as_str(), v.dtype().as_str())
    }
    Ok(())
}

/// Fails unless `v` has the model dtype or is f32: results that are not rounded on the way to the
/// residual stream.
pub fn expect_stream(op: &str, name: &str, v: &impl Shaped, model: DType) -> Result<()> {
    if model == DType::F32 {
        return expect_dtype(op, name, v, model);
    }
    if v.dtype() != model && v.dtype() != DType::F32 {
        bail!("{op}: expected {name} of dtype {} or f32, got {}", model.as_str(), v.dtype().as_str())
    }
    Ok(())
}

/// The two dims of a matrix; fails for another rank.
pub fn expect_matrix(op: &str, name: &str, v: &impl Shaped) -> Result<(usize, usize)> {
    match v.dims() {
        &[rows, columns] => Ok((rows, columns)),
        dims => bail!("{op}: expected {name} with 2 dimensions, got dims {dims:?}"),
    }
}

/// The three dims of a rank-3 view; fails for another rank.
pub fn expect_rank3(op: &str, name: &str, v: &impl Shaped) -> Result<(usize, usize, usize)> {
    match v.dims() {
        &[a, b, c] => Ok((a, b, c)),
        dims => bail!("{op}: expected {name} with 3 dimensions, got dims {dims:?}"),
    }
}

/// Number of slots of a cache [num_blocks, Hkv, block_size, D]; fails for other dims.
pub(crate) fn expect_cache(op: &str, name: &str, cache: &impl Shaped, hkv: usize, d: usize) -> Result<usize> {
    match cache.dims() {
        &[blocks, heads, block_size, size] if heads == hkv && size == d && block_size > 0 => {
            Ok(blocks * block_size)
        }
        dims => {
            bail!("{op}: expected {name} with dims [num_blocks, {hkv}, block_size > 0, {d}], got {dims:?}")
        }
    }
}
