//! What the ranks of a group do together, as plain data.

use std::fmt;

use candle_core::Result;
use moe_kernels::{PreNorm, SlotRows, View, ViewMut};
use serde::{Deserialize, Serialize};

/// How a reduction combines the ranks' values.
///
/// | dtype | Sum | Max, Min |
/// |---|---|---|
/// | f32, bf16, f16 | in f32, rank 0 first, ascending; one rounding at the end | NaN if any rank has one; of equal values (±0) the lowest rank's |
/// | u8, u32, i32, i64 | wraps around modulo 2^bits | exact |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The largest value.
    Max,
    /// The smallest value.
    Min,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Max => "max",
            Self::Min => "min",
        })
    }
}

/// A collective with the arguments of the method of [`Collectives`](crate::Collectives) that calls it, as that method hands them to
/// [`run`](crate::Communicator::run). Counts are in rows of dimension 0, one for each rank.
#[derive(Debug)]
#[allow(missing_docs)] // The methods say what the arguments are.
pub enum Collective<'a> {
    /// [`all_reduce`](crate::Collectives::all_reduce).
    AllReduce { data: ViewMut<'a>, op: ReduceOp },
    /// [`all_gather_v`](crate::Collectives::all_gather_v).
    AllGather { input: View<'a>, counts: &'a [usize], out: ViewMut<'a> },
    /// [`reduce_scatter_v`](crate::Collectives::reduce_scatter_v).
    ReduceScatter { input: View<'a>, counts: &'a [usize], out: ViewMut<'a>, op: ReduceOp },
    /// [`all_to_all_v`](crate::Collectives::all_to_all_v).
    AllToAll { input: View<'a>, send: &'a [usize], out: ViewMut<'a>, recv: &'a [usize] },
    /// [`broadcast`](crate::Collectives::broadcast).
    Broadcast { data: ViewMut<'a>, root: usize },
    /// [`barrier`](crate::Collectives::barrier).
    Barrier,
}

/// Which ranks need the rows of a gather: those that own an expert of the row's token.
#[derive(Clone, Copy, Debug)]
pub struct RowNeeds<'a> {
    /// Experts of all ranks' tokens, [sum(counts), K] u32, the same on all ranks; ids outside of `owners` are no experts.
    pub ids: View<'a>,
    /// The rank that owns each expert, \[P\] u32.
    pub owners: View<'a>,
}

/// The addition to the residual stream and the norm of the next sub-layer.
#[derive(Debug)]
pub struct AddNorm<'a> {
    /// The residual stream [T, H] f32 (or the dtype of sums that every rank adds up), to which the sums are added.
    pub residual: ViewMut<'a>,
    /// The norm of the next sub-layer, the same on all ranks.
    pub norm: PreNorm<'a>,
    /// Norm of the residual stream, [T, H] model dtype.
    pub out: ViewMut<'a>,
}

impl AddNorm<'_> {
    /// `len` rows of the residual stream and of `out`, from `start` on.
    ///
    /// # Errors
    /// Rows beyond the end.
    pub fn narrow(&mut self, start: usize, len: usize) -> Result<AddNorm<'_>> {
        Ok(AddNorm {
            residual: self.residual.reborrow().narrow(start, len)?,
            norm: self.norm,
            out: self.out.reborrow().narrow(start, len)?,
        })
    }
}

/// A collective with what surrounds it in a decoder layer, or with what the experts of a layer say about its rows.
///
/// Every communicator [runs](Self::run) it: in one launch if its [`FusedCollectives`](crate::FusedCollectives) take it, otherwise by
/// its parts. Counts are in rows, one for each rank, the same on all ranks.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // A call is passed on and never stored.
pub enum FusedCollective<'a> {
    /// What follows a row-parallel product: `residual` += the sum of all ranks' `partial`, then `out` = RMS norm of `residual`. Sums
    /// in one launch are f32 additions in rank order, as [`ReduceOp::Sum`] adds on the CPU.
    AllReduceAddNorm {
        /// [T, H] model dtype or f32, the same dims on all ranks; scratch afterwards.
        partial: ViewMut<'a>,
        /// `residual` has the dtype of `partial`, and is the same on all ranks before and after.
        end: AddNorm<'a>,
    },
    /// [`AllReduceAddNorm`](Self::AllReduceAddNorm) where each rank alone keeps some rows of the residual stream: to these it adds,
    /// and every rank gets all rows of `out`. This is a reduce-scatter and an all-gather with the addition and the norm between
    /// them, as in sequence parallelism. Which rows a rank keeps follows from T and H, so a stream that begins whole on all ranks
    /// stays right where it is read. One launch may send `partial` rounded to the dtype of `out`.
    ShareAddNorm {
        /// [T, H] model dtype or f32, the same dims on all ranks; scratch afterwards.
        partial: ViewMut<'a>,
        /// Rows of `residual` that other ranks keep are neither read nor written; `out` has the same bits on all ranks.
        end: AddNorm<'a>,
    },
    /// [`all_gather_v`](crate::Collectives::all_gather_v) of several arrays.
    Gather {
        /// Pairs of input and output.
        arrays: Vec<(View<'a>, ViewMut<'a>)>,
        /// Rows of each rank, in every array.
        counts: &'a [usize],
        /// With needs, which allow one array, rows of `out` that this rank does not need are unspecified: they need not travel.
        needs: Option<RowNeeds<'a>>,
    },
    /// [`reduce_scatter_v`](crate::Collectives::reduce_scatter_v) of sums, into f32.
    ScatterSums {
        /// [sum(counts), H] f32, or in the model dtype: then each rank has rounded its sums, and the result may be rounded, too.
        sums: View<'a>,
        /// Rows of each rank.
        counts: &'a [usize],
        /// With needs, the rows of a rank that does not need them are zeros: they need not travel.
        needs: Option<RowNeeds<'a>>,
        /// [counts\[rank\], H] f32.
        out: ViewMut<'a>,
    },
    /// What ends a sparse layer whose rows came from all ranks: each rank weights and adds the slots that it computed, k ascending in
    /// f32; `residual` += the ranks' sums of this rank's rows, added in rank order; then `out` = RMS norm of `residual`.
    CombineAddNorm {
        /// Of the rows of all ranks, [sum(counts), ..] in rank order.
        slots: SlotRows<'a>,
        /// Rows of each rank.
        counts: &'a [usize],
        /// `residual` [counts\[rank\], H] f32, and `out` of the same dims.
        end: AddNorm<'a>,
    },
}
