//! Combine: the weighted sum of a token's expert rows.

use candle_core::{DType, Result};

use crate::arguments::{expect, expect_dims, expect_dtype, expect_rank3};
use crate::cpu::combine::WeightedSum;
use crate::cpu::dispatch;
use crate::cpu::parallel::for_each_item;
use crate::cpu::simd::Lanes;
use crate::exec::Exec;
use crate::view::{View, ViewMut};
use crate::with_float;

/// out\[t\] = Σ_k topk_weights[t, k] · slots[t, k], with k ascending in f32 and one rounding.
/// Slots whose id is [`NO_EXPERT`](crate::NO_EXPERT) are skipped and never read.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `slots` | [T, K, H] f32 |
/// | `topk_ids` | [T, K] u32 |
/// | `topk_weights` | [T, K] f32 |
/// | `out` | [T, H] model dtype (f32, bf16, f16) |
///
/// # Errors
/// A wrong dtype or wrong dims.
pub fn weighted_sum_into(
    slots: View,
    topk_ids: View,
    topk_weights: View,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "weighted_sum";
    let (t, k, h) = expect_rank3(op, "slots", &slots)?;
    expect_dtype(op, "slots", &slots, DType::F32)?;
    expect(op, "topk_ids", &topk_ids, DType::U32, &[t, k])?;
    expect(op, "topk_weights", &topk_weights, DType::F32, &[t, k])?;
    expect_dims(op, "out", &out, &[t, h])?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::weighted_sum(ex.cuda(op)?, op, slots, topk_ids, topk_weights, out);
    }
    with_float!(out.dtype(), op, T => run::<T>(slots, topk_ids, topk_weights, out, ex))
}

fn run<T: Lanes>(slots: View, ids: View, weights: View, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
    let k = slots.dims()[1];
    let h = slots.dims()[2];
    let slots = slots.cpu::<f32>()?;
    let ids = ids.cpu::<u32>()?;
    let weights = weights.cpu::<f32>()?;
    let out = out.cpu_mut::<T>()?;
    if h == 0 {
        return Ok(());
    }
    let tasks = out.chunks_exact_mut(h).enumerate().collect();
    for_each_item(ex, tasks, slots.len(), |(t, out)| {
        let row = t * k..(t + 1) * k;
        let ids = &ids[row.clone()];
        let weights = &weights[row.clone()];
        let slots = &slots[row.start * h..row.end * h];
        dispatch(ex.isa(), WeightedSum { slots, ids, weights, out });
    });
    Ok(())
}
