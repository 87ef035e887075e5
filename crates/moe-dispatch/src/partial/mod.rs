//! The fast mode: ranks weight and add the slots that they compute, and combine adds the ranks' sums.
//!
//! The backends beside this module send every slot row to its token's owner, who adds them in the
//! order of one rank; here a rank sends one row per token, its partial sum. That is a K-th of the bytes, and
//! the transport may add (all-reduce, reduce-scatter), but the order of addition depends on the ranks:
//! results differ from one rank's by the rounding of f32 sums. It is what devices run; experts that
//! weight and reduce by themselves are welcome.
//!
//! | backend | tokens to experts | sums back | sizes depend on data |
//! |---|---|---|---|
//! | [`SumAllReduce`]: `disabled`, `local_allreduce` | every rank has them | all-reduce | no |
//! | [`SumGather`]: `allgather_reducescatter`, `deepep low_latency` | all-gather | reduce-scatter | no |
//! | [`SumAllToAll`]: `deepep high_throughput` | all-to-all of needed rows | all-to-all | yes |
//!
//! Where no size depends on data, nothing is read on the host, so that calls can be captured into a graph.

mod all_reduce;
mod all_to_all;
mod gather;

pub use all_reduce::SumAllReduce;
pub use all_to_all::SumAllToAll;
pub use gather::SumGather;

use candle_core::{DType, Result};
use moe_kernels::door::{expect_dims, expect_dtype};
use moe_kernels::{Dispatched, Exec, Lent, View, WeightAndReduce};

use crate::reduce::{CombineArgs, weight_and_reduce_into};

/// This rank's sums of the rows that arrived, [T', H] f32: the experts' own if they have reduced, else
/// their slot rows weighted and added by `strategy`. `ids` and `weights` [T', K] are the rows' own.
fn partial_sums<'a>(
    name: &str,
    expert_out: View<'a>,
    (ids, weights): (View<'_>, View<'_>),
    dispatched: &Dispatched,
    strategy: WeightAndReduce,
    ex: &mut Exec,
) -> Result<Lent<'a>> {
    expect_dtype(name, "expert_out", &expert_out, DType::F32)?;
    let width = dispatched.rows.view().dims().last().copied().unwrap_or(0);
    let dims = [ids.rows(), width];
    if strategy == WeightAndReduce::NoOp {
        expect_dims(name, "expert_out", &expert_out, &dims)?;
        return Ok(expert_out.into());
    }
    let args = CombineArgs {
        topk_ids: ids,
        topk_weights: weights,
        expert_map: dispatched.expert_map,
        weights_applied: dispatched.weights_applied,
    };
    let mut sums = ex.scratch(DType::F32, &dims)?;
    weight_and_reduce_into(strategy, expert_out, &args, sums.view_mut(), ex)?;
    Ok(sums.into())
}
