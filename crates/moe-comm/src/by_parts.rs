//! What a communicator does in one launch where it can, by its parts.

use candle_core::{DType, Result};
use moe_kernels::door::expect_matrix;
use moe_kernels::{
    Exec, PreNorm, SlotRouting, SlotRows, View, ViewMut, add_into, add_rms_norm_into, fill_into,
    mask_nonlocal_into, weighted_sum_into,
};

use crate::communicator::{Communicator, ReduceOp};
use crate::placement::partition;
use crate::row_parallel::shares;

/// [`Communicator::reduce_scatter_rounded`] by a sum in the dtype that travels.
pub(crate) fn reduce_scatter_rounded<C: Communicator + ?Sized>(
    comm: &C,
    input: View<'_>,
    counts: &[usize],
    mut out: ViewMut<'_>,
    ex: &mut Exec,
) -> Result<()> {
    let mut sums = ex.scratch(input.dtype(), out.dims())?;
    comm.reduce_scatter_v(input, counts, sums.view_mut(), ReduceOp::Sum, ex)?;
    fill_into(0., out.reborrow(), ex)?;
    add_into(sums.view(), out, ex)
}

/// [`Communicator::combine_add_rms_norm`] by its three parts.
pub(crate) fn combine_add_rms_norm<C: Communicator + ?Sized>(
    comm: &C,
    slots: &SlotRows<'_>,
    counts: &[usize],
    norm: &PreNorm<'_>,
    residual: ViewMut<'_>,
    out: ViewMut<'_>,
    ex: &mut Exec,
) -> Result<()> {
    let (tokens, _, hidden) = slots.check("combine_add_rms_norm")?;
    let mut sums = ex.scratch(DType::F32, &[tokens, hidden])?;
    let mut here;
    let added = match &slots.routing {
        None => slots.rows,
        Some(SlotRouting { topk_ids, topk_weights, expert_map }) => {
            let mut ids = *topk_ids;
            if let Some(map) = expert_map {
                here = ex.scratch(DType::U32, topk_ids.dims())?;
                mask_nonlocal_into(*topk_ids, *map, here.view_mut(), ex)?;
                ids = here.view();
            }
            weighted_sum_into(slots.rows, ids, *topk_weights, sums.view_mut(), ex)?;
            sums.view()
        }
    };
    let mut own = ex.scratch(DType::F32, residual.dims())?;
    comm.reduce_scatter_v(added, counts, own.view_mut(), ReduceOp::Sum, ex)?;
    add_rms_norm_into(own.view(), norm.weight, norm.eps, residual, out, ex)
}

/// [`Communicator::share_add_rms_norm`] by its three parts. Each rank keeps an even run of the rows.
pub(crate) fn share_add_rms_norm<C: Communicator + ?Sized>(
    comm: &C,
    partial: ViewMut<'_>,
    weight: View<'_>,
    eps: f32,
    residual: ViewMut<'_>,
    out: ViewMut<'_>,
    ex: &mut Exec,
) -> Result<()> {
    let (rows, hidden) = expect_matrix("share_add_rms_norm", "partial", &partial)?;
    let own = partition(rows, comm.world_size(), comm.rank());
    let counts = shares(rows, comm.world_size());
    let mut sums = ex.scratch(partial.dtype(), &[own.len(), hidden])?;
    comm.reduce_scatter_v(partial.as_view(), &counts, sums.view_mut(), ReduceOp::Sum, ex)?;
    let mut normed = ex.scratch(out.dtype(), &[own.len(), hidden])?;
    let kept = residual.narrow(own.start, own.len())?;
    add_rms_norm_into(sums.view(), weight, eps, kept, normed.view_mut(), ex)?;
    comm.all_gather_v(normed.view(), &counts, out, ex)
}
