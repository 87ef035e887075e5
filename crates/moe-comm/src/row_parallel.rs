//! Row-parallel products over the ranks of a tensor-parallel group.
//!
//! The sums of all S segments of K are added in ascending order. One rank computes each segment, so the result has the
//! same bits as on one rank. Each rank adds up a share of the rows, and then all ranks gather the shares. A large
//! all-reduce is also a reduce-scatter and an all-gather, but here the order of addition does not depend on the number
//! of ranks.
//!
//! On CUDA each rank computes one product over all of its columns, and an all-reduce adds the products. This is faster,
//! but the bits depend on the number of ranks.

use std::sync::Arc;

use candle_core::{DType, Result, bail};
use moe_kernels::arguments::{expect_dims, expect_dtype, expect_matrix, expect_rank3};
use moe_kernels::plan::{Form, LinearForm, Stage};
use moe_kernels::{
    Exec, RowsView, Segment, View, ViewMut, WeightView, add_into, copy_rows_into, linear_into,
    linear_row_parallel_into, linear_segment_into,
};

use crate::collective::ReduceOp;
use crate::collectives::Collectives;
use crate::communicator::Communicator;
use crate::placement::partition;
use crate::shard::RowShard;

/// The name of the sum over the ranks' products in a plan.
const SUM: &str = "all-reduce";

/// How many of `rows` rows each of `ranks` ranks adds up.
pub fn shares(rows: usize, ranks: usize) -> Vec<usize> {
    (0..ranks).map(|rank| partition(rows, ranks, rank).len()).collect()
}

/// Adds the segments of all ranks in ascending order and writes this rank's share of the rows.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `partials` | [S_local, T, W] f32: this rank's segments; rank r holds segments r * S_local .. |
/// | `shares` | rows of T that each rank takes, one entry per rank |
/// | `out` | [shares\[rank\], W] f32 |
///
/// # Errors
/// Wrong dims or dtypes; ranks that disagree, or died.
pub fn reduce_segments_into(
    comm: &dyn Communicator,
    partials: View<'_>,
    shares: &[usize],
    mut out: ViewMut<'_>,
    ex: &mut Exec,
) -> Result<()> {
    let op = "reduce_segments";
    let (segments, rows, width) = expect_rank3(op, "partials", &partials)?;
    expect_dtype(op, "partials", &partials, DType::F32)?;
    let Some(&mine) = shares.get(comm.rank()) else {
        bail!("{op}: expected a share for each of {} ranks, got {shares:?}", comm.world_size())
    };
    expect_dims(op, "out", &out, &[mine, width])?;
    let ranks = comm.world_size();
    let mut arrived = ex.scratch(DType::F32, &[segments, ranks * mine, width])?;
    for s in 0..segments {
        let part = partials.narrow(s, 1)?.reshape(&[rows, width])?;
        let to = arrived.view_mut().narrow(s, 1)?.reshape(&[ranks * mine, width])?;
        comm.all_to_all_v(part, shares, to, &vec![mine; ranks], ex)?;
    }
    for (i, (rank, s)) in (0..ranks).flat_map(|rank| (0..segments).map(move |s| (rank, s))).enumerate() {
        let part = arrived.view().narrow(s, 1)?.reshape(&[ranks * mine, width])?.narrow(rank * mine, mine)?;
        match i {
            0 => copy_rows_into(part, out.reborrow(), ex)?,
            _ => add_into(part, out.reborrow(), ex)?,
        }
    }
    Ok(())
}

/// The ranks among which a row-parallel product is cut, and this rank's part of it.
#[derive(Clone, Debug)]
pub struct RowParallel {
    comm: Arc<dyn Communicator>,
    /// Segments on this rank.
    segments: usize,
    /// On CUDA: whether the caller computes the sum over the ranks.
    deferred: bool,
}

impl RowParallel {
    /// Makes the row-parallel product of a weight of which this rank holds the columns of `shard`.
    ///
    /// # Errors
    /// A shard for another number of ranks than the communicator has, or for another rank.
    pub fn new(shard: &RowShard, comm: Arc<dyn Communicator>) -> Result<Self> {
        let segments = shard.local_segments.len();
        let rank = comm.rank();
        let ranks = comm.world_size();
        if segments * ranks != shard.segments || shard.local_segments.start != rank * segments {
            bail!(
                "row-parallel product: segments {:?} of {} are not the part of rank {rank} of {ranks}",
                shard.local_segments,
                shard.segments
            )
        }
        Ok(Self { comm, segments, deferred: false })
    }

    /// On CUDA, products now return each rank's part, and the caller adds the parts, for example with
    /// [`AllReduceAddNorm`](crate::FusedCollective::AllReduceAddNorm).
    pub fn defer_sum(&mut self) {
        self.deferred = true;
    }

    /// The sum that follows the product in [`linear_into`](Self::linear_into), for plans. `None` if the caller adds the
    /// parts or no other rank has a part.
    pub fn sum_stage(&self) -> Option<Stage> {
        let adds = !self.deferred && self.comm.world_size() > 1;
        adds.then(|| Stage::new(&["sum over ranks"], SUM))
    }

    /// The first half of [`linear_into`](Self::linear_into) on CUDA: the product over this rank's columns.
    ///
    /// # Errors
    /// Wrong dims or dtypes.
    pub fn part_into<'x, 'w>(
        &self,
        x: impl Into<RowsView<'x>>,
        w: impl Into<WeightView<'w>>,
        bias: Option<View<'_>>,
        out: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        linear_into(x, w, bias.filter(|_| self.comm.rank() == 0), out, ex)
    }

    /// The second half of [`linear_into`](Self::linear_into): the sum of the ranks' products, in place, unless the
    /// caller adds them. It is a collective.
    ///
    /// # Errors
    /// Ranks that disagree or have died.
    pub fn add_parts(&self, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        match self.deferred || self.comm.world_size() == 1 {
            true => Ok(()),
            false => {
                let _sum = ex.launched_as_one(|| SUM);
                self.comm.all_reduce(out, ReduceOp::Sum, ex)
            }
        }
    }

    /// `out` [T, N] = x · wᵀ + bias, over the columns of all ranks.
    ///
    /// The CPU rounds once and gives the same bits as one rank. On CUDA each rank's product is rounded to the dtype of
    /// `out`, and [`all_reduce`](Collectives::all_reduce) adds the products; nothing waits for the device.
    ///
    /// | argument | shape, dtype |
    /// |---|---|
    /// | `x` | [T, K_local] model dtype, or made for this product |
    /// | `w` | [N, K_local] same dtype, in rows or panels |
    /// | `bias` | \[N\] same dtype, the same on all ranks |
    /// | `out` | [T, N] same dtype or f32 |
    ///
    /// # Errors
    /// Wrong dims or dtypes; ranks that disagree or have died.
    pub fn linear_into<'x, 'w>(
        &self,
        x: impl Into<RowsView<'x>>,
        w: impl Into<WeightView<'w>>,
        bias: Option<View<'_>>,
        mut out: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        let ranks = self.comm.world_size();
        let rank = self.comm.rank();
        let x = x.into();
        let w = w.into();
        if ranks == 1 {
            return linear_row_parallel_into(x, w, bias, out, ex);
        }
        if ex.is_cuda() {
            self.part_into(x, w, bias, out.reborrow(), ex)?;
            return self.add_parts(out, ex);
        }
        let x = x.floats("row_parallel")?;
        let t = x.rows();
        let n = expect_matrix("row_parallel", "w", &w)?.0;
        ex.launched(|| LinearForm::Cpu.name());
        let mut partials = ex.scratch(DType::F32, &[self.segments, t, n])?;
        for index in 0..self.segments {
            let to = partials.view_mut().narrow(index, 1)?.reshape(&[t, n])?;
            linear_segment_into(x, w, Segment { index, of: self.segments }, to, ex)?;
        }
        let _sum = ex.launched_as_one(|| SUM);
        let shares = shares(t, ranks);
        let mut sums = ex.scratch(DType::F32, &[partition(t, ranks, rank).len(), n])?;
        reduce_segments_into(self.comm.as_ref(), partials.view(), &shares, sums.view_mut(), ex)?;
        drop(partials);
        if let Some(bias) = bias {
            let bias = bias.reshape(&[1, n])?;
            for row in 0..sums.dims().first().copied().unwrap_or(0) {
                add_into(bias, sums.view_mut().narrow(row, 1)?, ex)?;
            }
        }
        if out.dtype() == DType::F32 {
            return self.comm.all_gather_v(sums.view(), &shares, out, ex);
        }
        let mut rounded = ex.scratch(out.dtype(), sums.dims())?;
        copy_rows_into(sums.view(), rounded.view_mut(), ex)?;
        self.comm.all_gather_v(rounded.view(), &shares, out, ex)
    }
}
