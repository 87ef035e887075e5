//! The rows of an embedding.

use candle_core::{DType, Result, bail};
use rayon::prelude::*;

use crate::arguments::{expect, expect_dims, expect_matrix, expect_stream};
use crate::cpu::parallel::INLINE_WORK;
use crate::cpu::simd::Lanes;
use crate::exec::Exec;
use crate::quant::QuantStack;
use crate::view::{View, ViewMut};
use crate::weight::{WeightOrder, WeightView, panel_row};
use crate::with_float;

/// out\[t\] = table[ids\[t\]]. Rows of a quantised table are the floats that its codes stand for, rounded to its dtype.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `table` | [V, H] model dtype (f32, bf16, f16), in rows or panels; on the CPU also quantised |
/// | `ids` | \[T\] u32 |
/// | `out` | [T, H] dtype of the table, or f32 |
///
/// # Errors
/// A wrong dtype or wrong dims; an id that is not below V; a quantised table on a device.
pub fn embedding_into<'w>(
    table: impl Into<WeightView<'w>>,
    ids: View,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    lookup(table.into(), ids, out, ex)
}

fn lookup(table: WeightView, ids: View, out: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "embedding";
    let (v, h) = expect_matrix(op, "table", &table)?;
    expect(op, "ids", &ids, DType::U32, &[ids.elem_count()])?;
    expect_dims(op, "out", &out, &[ids.elem_count(), h])?;
    expect_stream(op, "out", &out, table.dtype())?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::rows::embedding(table.rows(op)?, ids, out, ex);
    }
    let ids = ids.cpu::<u32>()?;
    if let Some((t, id)) = ids.iter().enumerate().find(|(_, id)| **id as usize >= v) {
        bail!("{op}: id {id} at position {t} is out of range; expected 0..{v}")
    }
    with_float!(table.dtype(), op, T => match (table, out.dtype()) {
        (WeightView::Quantised(table), DType::F32) => dequantised::<T, f32>(table.matrix(op)?, ids, out, ex),
        (WeightView::Quantised(table), _) => dequantised::<T, T>(table.matrix(op)?, ids, out, ex),
        (table, DType::F32) => copied::<T, f32>(table, ids, out),
        (table, _) => copied::<T, T>(table, ids, out),
    })
}

fn copied<T: Lanes, S: Lanes>(table: WeightView, ids: &[u32], mut out: ViewMut) -> Result<()> {
    let (table, order) = table.values("embedding")?;
    let h = table.dims()[1];
    let mut unpacked = vec![T::default(); if order == WeightOrder::Panels { h } else { 0 }];
    let table = table.cpu::<T>()?;
    let out = out.cpu_mut::<S>()?;
    if h > 0 {
        for (out, id) in out.chunks_exact_mut(h).zip(ids) {
            let row = match order {
                WeightOrder::Rows => &table[*id as usize * h..][..h],
                WeightOrder::Panels => {
                    panel_row(table, h, *id as usize, &mut unpacked);
                    &unpacked
                }
            };
            for (out, x) in out.iter_mut().zip(row) {
                *out = S::narrow(x.widen());
            }
        }
    }
    Ok(())
}

/// Rows of a table of the dtype T, of which only codes and scales are in memory.
fn dequantised<T: Lanes, S: Lanes>(
    table: &QuantStack,
    ids: &[u32],
    mut out: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let [_, _, h] = table.dims();
    let write = |wide: &mut Vec<f32>, (out, id): (&mut [S], &u32)| -> Result<()> {
        table.dequantise_into(0, *id as usize, wide)?;
        out.iter_mut().zip(wide).for_each(|(out, x)| *out = S::narrow(T::narrow(*x).widen()));
        Ok(())
    };
    let out = out.cpu_mut::<S>()?;
    let row = || vec![0.0; h];
    if out.len() < INLINE_WORK {
        let mut wide = row();
        return out.chunks_exact_mut(h.max(1)).zip(ids).try_for_each(|pair| write(&mut wide, pair));
    }
    ex.install(|| out.par_chunks_exact_mut(h.max(1)).zip(ids).try_for_each_init(row, write))
}
