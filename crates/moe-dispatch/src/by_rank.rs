//! Combine by rank: each rank weights and adds the slots that it computes, and the ranks' sums are added.
//!
//! A rank sends one row per token instead of one per slot, and the transport may add the rows. The order of addition
//! depends on the ranks, so results differ from the results of one rank by the rounding of f32 sums. Experts that
//! weight and reduce their rows themselves can be used.

use candle_core::{DType, Result};
use moe_kernels::arguments::{expect_dims, expect_dtype};
use moe_kernels::{
    Dispatched, Exec, Lent, SlotRouting, SlotRows, View, WeightAndReduce, add_into, copy_rows_into,
};

use crate::reduce::reduce_into;
use crate::rows::width;

/// This rank's sums of the rows that arrived, [T', H]. If the experts have reduced their rows, these are their sums, in
/// f32 or in the dtype in which sums are sent. Otherwise the f32 slot rows are weighted and added here.
pub(crate) fn partial_sums<'a>(
    op: &str,
    expert_out: View<'a>,
    dispatched: &Dispatched,
    strategy: WeightAndReduce,
    ex: &mut Exec,
) -> Result<Lent<'a>> {
    let ids = dispatched.topk_ids()?;
    let weights = dispatched.topk_weights()?;
    let dims = [ids.rows(), width(dispatched.rows.view())];
    if strategy == WeightAndReduce::NoOp {
        expect_dims(op, "expert_out", &expert_out, &dims)?;
        return Ok(expert_out.into());
    }
    expect_dtype(op, "expert_out", &expert_out, DType::F32)?;
    let mut sums = ex.scratch(DType::F32, &dims)?;
    reduce_into(op, expert_out, dispatched, (ids, weights), strategy, sums.view_mut(), ex)?;
    Ok(sums.into())
}

/// The results of the experts in the form that a fused launch adds up: sums (`NoOp`), or slot rows.
pub(crate) fn slot_rows<'a>(
    expert_out: View<'a>,
    dispatched: &'a Dispatched,
    strategy: WeightAndReduce,
) -> Result<SlotRows<'a>> {
    if strategy == WeightAndReduce::NoOp {
        return Ok(SlotRows { rows: expert_out, routing: None });
    }
    let routing = SlotRouting {
        topk_ids: dispatched.topk_ids()?,
        topk_weights: dispatched.topk_weights()?,
        expert_map: dispatched.expert_map,
    };
    Ok(SlotRows { rows: expert_out.reshape(&dispatched.expert_out_dims()?)?, routing: Some(routing) })
}

/// The complete slot rows [T, K, H] of this rank's part of cut experts. The experts may return segments [S_local, T, K,
/// H], which are added here.
pub(crate) fn whole_rows<'a>(expert_out: View<'a>, ex: &mut Exec) -> Result<Lent<'a>> {
    let &[segments, tokens, top_k, width] = expert_out.dims() else { return Ok(expert_out.into()) };
    let flat = [tokens * top_k, width];
    let mut rows = ex.scratch(DType::F32, &[tokens, top_k, width])?;
    for segment in 0..segments {
        let part = expert_out.narrow(segment, 1)?.reshape(&flat)?;
        let sum = rows.view_mut().reshape(&flat)?;
        match segment {
            0 => copy_rows_into(part, sum, ex)?,
            _ => add_into(part, sum, ex)?,
        }
    }
    Ok(rows.into())
}
