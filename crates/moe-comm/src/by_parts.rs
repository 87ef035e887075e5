//! Runs a fused collective on any communicator: in one launch where the communicator offers one, otherwise part by
//! part.

use candle_core::{DType, Result};
use moe_kernels::arguments::expect_matrix;
use moe_kernels::{
    Exec, SlotRouting, SlotRows, View, ViewMut, add_into, add_rms_norm_into, fill_into, mask_nonlocal_into,
    weighted_sum_into,
};

use crate::collective::{AddNorm, FusedCollective, ReduceOp};
use crate::collectives::Collectives;
use crate::communicator::Communicator;
use crate::placement::partition;
use crate::row_parallel::shares;

impl FusedCollective<'_> {
    /// Runs this collective on the ranks of `comm`.
    ///
    /// # Errors
    /// Wrong dims or dtypes, and the errors of [`Communicator`].
    pub fn run(self, comm: &dyn Communicator, ex: &mut Exec) -> Result<()> {
        match comm.fused() {
            Some(fused) if fused.takes(&self) => fused.run_fused(self, ex),
            _ => self.run_parts(comm, ex),
        }
    }

    fn run_parts(self, comm: &dyn Communicator, ex: &mut Exec) -> Result<()> {
        match self {
            Self::AllReduceAddNorm { mut partial, end } => {
                comm.all_reduce(partial.reborrow(), ReduceOp::Sum, ex)?;
                add_norm(partial.as_view(), end, ex)
            }
            Self::ShareAddNorm { partial, end } => share_add_norm(comm, partial.as_view(), end, ex),
            Self::Gather { arrays, counts, .. } => {
                arrays.into_iter().try_for_each(|(input, out)| comm.all_gather_v(input, counts, out, ex))
            }
            Self::Dispatch { rows, ids, weights, counts, .. } => {
                let arrays = vec![ids, rows, weights];
                Self::Gather { arrays, counts, needs: None }.run(comm, ex)
            }
            Self::ScatterSums { sums, counts, out, .. } if sums.dtype() == DType::F32 => {
                comm.reduce_scatter_v(sums, counts, out, ReduceOp::Sum, ex)
            }
            Self::ScatterSums { sums, counts, out, .. } => scatter_rounded(comm, sums, counts, out, ex),
            Self::CombineAddNorm { slots, counts, end, .. } => {
                combine_add_norm(comm, &slots, counts, end, ex)
            }
        }
    }
}

fn add_norm(sums: View<'_>, end: AddNorm<'_>, ex: &mut Exec) -> Result<()> {
    add_rms_norm_into(sums, end.norm.weight, end.norm.eps, end.residual, end.out, ex)
}

/// Each rank keeps a contiguous part of the rows; the parts differ by at most one row.
fn share_add_norm(comm: &dyn Communicator, partial: View<'_>, end: AddNorm<'_>, ex: &mut Exec) -> Result<()> {
    let (rows, hidden) = expect_matrix("share_add_norm", "partial", &partial)?;
    let own = partition(rows, comm.world_size(), comm.rank());
    let counts = shares(rows, comm.world_size());
    let mut sums = ex.scratch(partial.dtype(), &[own.len(), hidden])?;
    comm.reduce_scatter_v(partial, &counts, sums.view_mut(), ReduceOp::Sum, ex)?;
    let mut normed = ex.scratch(end.out.dtype(), &[own.len(), hidden])?;
    let residual = end.residual.narrow(own.start, own.len())?;
    add_norm(sums.view(), AddNorm { residual, norm: end.norm, out: normed.view_mut() }, ex)?;
    comm.all_gather_v(normed.view(), &counts, end.out, ex)
}

/// Reduces and scatters sums in the dtype in which they are sent, then converts the result to f32.
fn scatter_rounded(
    comm: &dyn Communicator,
    parts: View<'_>,
    counts: &[usize],
    mut out: ViewMut<'_>,
    ex: &mut Exec,
) -> Result<()> {
    let mut sums = ex.scratch(parts.dtype(), out.dims())?;
    comm.reduce_scatter_v(parts, counts, sums.view_mut(), ReduceOp::Sum, ex)?;
    fill_into(0., out.reborrow(), ex)?;
    add_into(sums.view(), out, ex)
}

fn combine_add_norm(
    comm: &dyn Communicator,
    slots: &SlotRows<'_>,
    counts: &[usize],
    end: AddNorm<'_>,
    ex: &mut Exec,
) -> Result<()> {
    let (tokens, _, hidden) = slots.check("combine_add_norm")?;
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
    let mut own = ex.scratch(DType::F32, end.residual.dims())?;
    comm.reduce_scatter_v(added, counts, own.view_mut(), ReduceOp::Sum, ex)?;
    add_norm(own.view(), end, ex)
}
