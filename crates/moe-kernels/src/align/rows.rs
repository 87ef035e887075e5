//! Rows to experts and back: the BatchedExperts layout, and the ops of the tokens' owner.
//!
//! A batched buffer gives every local expert `max_tokens` rows. Row r of expert e belongs to the r-th of the expert's
//! slots in ascending slot order. That order is part of the format, so the ids alone determine how rows return.

use candle_core::{DType, Result};
use rayon::prelude::*;

use super::batches::RowBatches;
use crate::arguments::{expect, expect_dims, expect_dtype, expect_float, expect_matrix, expect_rank3};
use crate::element::Float;
use crate::exec::Exec;
use crate::view::{View, ViewMut};
use crate::with_float;

/// Copies token rows into the BatchedExperts layout. `rows` stays unchanged.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `rows` | [T, H] f32, bf16 or f16 |
/// | `batches` | offsets [E_local + 1], slots \[T*K\] |
/// | `out` | [E_local, max_tokens, H] of the same dtype; unused rows are not written |
/// | `expert_num_tokens` | out: \[E_local\] u32 rows per local expert |
///
/// # Errors
/// Wrong dtypes or dims. On the CPU also an expert with more than `max_tokens` rows, and slots out of range; CUDA
/// leaves these out.
pub fn batch_rows_into(
    rows: View,
    batches: &RowBatches,
    mut out: ViewMut,
    mut expert_num_tokens: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    const OP: &str = "batch_rows";
    let (tokens, hidden) = expect_matrix(OP, "rows", &rows)?;
    let (num_local, max_tokens, _) = expect_rank3(OP, "out", &out)?;
    expect(OP, "out", &out, rows.dtype(), &[num_local, max_tokens, hidden])?;
    batches.check(OP, tokens, num_local)?;
    expect(OP, "expert_num_tokens", &expert_num_tokens, DType::U32, &[num_local])?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::batch_rows(ex.cuda(OP)?, OP, rows, batches, out, expert_num_tokens);
    }
    let groups = batches.groups(OP, num_local, max_tokens)?;
    for (count, group) in expert_num_tokens.cpu_mut::<u32>()?.iter_mut().zip(&groups) {
        *count = group.len() as u32;
    }
    if out.elem_count() == 0 {
        return Ok(());
    }
    with_float!(rows.dtype(), OP, T => {
        let rows = rows.cpu::<T>()?;
        let out = out.cpu_mut::<T>()?;
        ex.install(|| {
            out.par_chunks_mut(max_tokens * hidden).zip(&groups).for_each(|(out, group)| {
                for (to, &slot) in out.chunks_exact_mut(hidden).zip(*group) {
                    let token = slot as usize / batches.top_k;
                    to.copy_from_slice(&rows[token * hidden..][..hidden]);
                }
            })
        });
        Ok(())
    })
}

/// Copies batched rows back to their slots, the inverse of [`batch_rows_into`].
///
/// | argument | shape, dtype |
/// |---|---|
/// | `rows` | [E_local, max_tokens, H] f32, bf16 or f16 |
/// | `batches` | the same as for [`batch_rows_into`] |
/// | `out` | [T, K, H] of the same dtype; rows of slots in no group are not written |
///
/// # Errors
/// The errors of [`batch_rows_into`].
pub fn unbatch_rows_into(rows: View, batches: &RowBatches, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
    const OP: &str = "unbatch_rows";
    let (num_local, max_tokens, hidden) = expect_rank3(OP, "rows", &rows)?;
    let (tokens, _, _) = expect_rank3(OP, "out", &out)?;
    expect(OP, "out", &out, rows.dtype(), &[tokens, batches.top_k, hidden])?;
    batches.check(OP, tokens, num_local)?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::unbatch_rows(ex.cuda(OP)?, OP, rows, batches, out);
    }
    let groups = batches.groups(OP, num_local, max_tokens)?;
    if out.elem_count() == 0 {
        return Ok(());
    }
    // The row of each slot, so that the copy runs over disjoint output rows: 0 = none, else row + 1.
    let mut row_of_slot = ex.scratch(DType::I64, &[tokens * batches.top_k])?;
    let mut row_of_slot = row_of_slot.view_mut();
    let row_of_slot = row_of_slot.cpu_mut::<i64>()?;
    row_of_slot.fill(0);
    for (e, group) in groups.iter().enumerate() {
        for (r, &slot) in group.iter().enumerate() {
            row_of_slot[slot as usize] = (e * max_tokens + r + 1) as i64;
        }
    }
    with_float!(rows.dtype(), OP, T => {
        let rows = rows.cpu::<T>()?;
        let out = out.cpu_mut::<T>()?;
        ex.install(|| {
            out.par_chunks_mut(hidden).zip(&*row_of_slot).filter(|(_, row)| **row != 0).for_each(|(to, &row)| {
                to.copy_from_slice(&rows[(row as usize - 1) * hidden..][..hidden]);
            })
        });
        Ok(())
    })
}

/// Multiplies each row by its own factor: out = round(row * scale), the product in f32. With
/// K = 1 this applies router weights to a copy of the input rows (Llama-4).
///
/// | argument | shape, dtype |
/// |---|---|
/// | `rows` | [T, H] f32, bf16 or f16 |
/// | `scale` | [T, 1] f32 |
/// | `out` | [T, H] of the dtype of `rows` |
///
/// # Errors
/// Wrong dtypes or dims.
pub fn scale_rows_into(rows: View, scale: View, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
    const OP: &str = "scale_rows";
    let (tokens, hidden) = expect_matrix(OP, "rows", &rows)?;
    expect(OP, "scale", &scale, DType::F32, &[tokens, 1])?;
    expect(OP, "out", &out, rows.dtype(), rows.dims())?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::scale_rows(ex.cuda(OP)?, OP, rows, scale, out);
    }
    if out.elem_count() == 0 {
        return Ok(());
    }
    let scale = scale.cpu::<f32>()?;
    with_float!(rows.dtype(), OP, T => {
        let rows = rows.cpu::<T>()?;
        let out = out.cpu_mut::<T>()?;
        ex.install(|| {
            out.par_chunks_mut(hidden).zip(rows.par_chunks(hidden)).zip(scale).for_each(|((to, row), &w)| {
                for (to, &x) in to.iter_mut().zip(row) {
                    *to = T::narrow(x.widen() * w);
                }
            })
        });
        Ok(())
    })
}

/// Copies rows: rounds f32 rows to the dtype of `out`, or widens rows to f32, which is exact.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `rows` | [T, H] f32, bf16 or f16 |
/// | `out` | [T, H] of the dtype of `rows`, or one of the two is f32 |
///
/// # Errors
/// Wrong dtypes or dims.
pub fn copy_rows_into(rows: View, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
    const OP: &str = "copy_rows";
    expect_matrix(OP, "rows", &rows)?;
    expect_float(OP, "rows", &rows)?;
    expect_dims(OP, "out", &out, rows.dims())?;
    if rows.dtype() != out.dtype() && out.dtype() != DType::F32 {
        expect_dtype(OP, "rows", &rows, DType::F32)?;
    }
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::copy(ex.cuda(OP)?, OP, rows, out);
    }
    if rows.dtype() == out.dtype() {
        return with_float!(out.dtype(), OP, T => {
            out.cpu_mut::<T>()?.copy_from_slice(rows.cpu()?);
            Ok(())
        });
    }
    with_float!(rows.dtype(), OP, F => with_float!(out.dtype(), OP, T => {
        let rows = rows.cpu::<F>()?;
        let out = out.cpu_mut::<T>()?;
        ex.install(|| out.par_iter_mut().zip(rows).for_each(|(to, &x)| *to = T::narrow(x.widen())));
        Ok(())
    }))
}

/// Sets every element to `value`. It makes the weights for rows that were already multiplied by theirs.
///
/// # Errors
/// An `out` that is not f32.
pub fn fill_into(value: f32, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
    const OP: &str = "fill";
    expect_dtype(OP, "out", &out, DType::F32)?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::fill(ex.cuda(OP)?, OP, value, out);
    }
    let _ = ex;
    out.cpu_mut::<f32>()?.fill(value);
    Ok(())
}

#[cfg(test)]
#[path = "rows_tests.rs"]
mod tests;
