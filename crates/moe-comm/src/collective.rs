//! The collectives and fused collectives as plain data.

use std::fmt;

use candle_core::Result;
use moe_kernels::{PreNorm, SlotRows, View, ViewMut};
use serde::{Deserialize, Serialize};

/// How a reduction combines the ranks' values.
///
/// | dtype | Sum | Max, Min |
/// |---|---|---|
/// | f32, bf16, f16 | in f32, rank 0 first, ascending; one rounding at the end | NaN if any rank has NaN |
/// | u8, u32, i32, i64 | wraps around modulo 2^bits | exact |
///
/// Of equal floats (±0), `Max` and `Min` give the value of the lowest rank.
// This enum is exhaustive: every transport must compute each reduction.
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

/// A collective with the arguments of the method of [`Collectives`](crate::Collectives) of the same name, which passes
/// it to [`run`](crate::Communicator::run). Counts are in rows of dimension 0, one for each rank.
// This enum is exhaustive: every transport must run each collective.
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

/// Which ranks need which rows of a gather: a rank needs a row if it holds an expert that the row's token uses.
#[derive(Clone, Copy, Debug)]
pub struct RowNeeds<'a> {
    /// Experts of all ranks' tokens, [sum(counts), K] u32, the same on all ranks. Ids that are not below P name no
    /// expert.
    pub ids: View<'a>,
    /// The rank that owns each expert, \[P\] u32.
    pub owners: View<'a>,
}

/// The addition to the residual stream and the norm of the next sub-layer.
#[derive(Debug)]
pub struct AddNorm<'a> {
    /// The residual stream [T, H], to which the sums are added: f32, or the dtype of the sums if every rank adds all of
    /// them.
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

/// A collective together with the ops before and after it in a decoder layer, or with what is known about the experts
/// of its rows.
///
/// Every communicator can [run](Self::run) it: in one launch if its [`FusedCollectives`](crate::FusedCollectives) take
/// it, otherwise part by part. Counts are in rows, one for each rank, the same on all ranks.
// This enum is exhaustive: a transport must say of each call whether it takes it.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // A call is passed on and never stored.
pub enum FusedCollective<'a> {
    /// The end of a row-parallel product: `residual` += the sum of all ranks' `partial`, then `out` = RMS norm of
    /// `residual`. A fused launch adds in f32 in rank order, as [`ReduceOp::Sum`] does on the CPU.
    AllReduceAddNorm {
        /// [T, H] model dtype or f32, the same dims on all ranks; scratch afterwards.
        partial: ViewMut<'a>,
        /// `residual` has the dtype of `partial`, and is the same on all ranks before and after.
        end: AddNorm<'a>,
    },
    /// [`AllReduceAddNorm`](Self::AllReduceAddNorm) with the residual stream shared by the ranks: each rank keeps some
    /// rows and adds the sums to them, and every rank gets all rows of `out`. This is a reduce-scatter and an
    /// all-gather with the addition and the norm between them, as in sequence parallelism. T and H decide which rows a
    /// rank keeps. So each rank keeps the same rows in every layer, and a stream that starts whole on all ranks stays
    /// right on the rows that a rank reads. A fused launch may send `partial` rounded to the dtype of `out`.
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
        /// If `needs` is given, there is one array, and rows of `out` that this rank does not need are unspecified:
        /// they may be left out of the transfer.
        needs: Option<RowNeeds<'a>>,
    },
    /// The tokens of a sparse layer to the ranks of their experts. It is a gather of rows, ids and weights in which
    /// only this rank's ids have to be known: the others arrive with the rows, and the owner of each expert is known.
    Dispatch {
        /// [counts\[rank\], H] and [sum(counts), H]. Rows of other ranks that have no expert of this rank are
        /// unspecified: they may be left out of the transfer.
        rows: (View<'a>, ViewMut<'a>),
        /// u32 [counts\[rank\], K] and [sum(counts), K].
        ids: (View<'a>, ViewMut<'a>),
        /// f32 [counts\[rank\], K] and [sum(counts), K].
        weights: (View<'a>, ViewMut<'a>),
        /// Rows of each rank.
        counts: &'a [usize],
        /// The rank that owns each expert, \[P\] u32, the same on all ranks. Ids that are not below P name no expert.
        owners: View<'a>,
    },
    /// [`reduce_scatter_v`](crate::Collectives::reduce_scatter_v) of sums, into f32.
    ScatterSums {
        /// [sum(counts), H], f32 or the model dtype. In the model dtype each rank has rounded its sums, and the result
        /// may be rounded, too.
        sums: View<'a>,
        /// Rows of each rank.
        counts: &'a [usize],
        /// If `needs` is given, the rows of a rank that does not need them are zeros: they may be left out of the
        /// transfer.
        needs: Option<RowNeeds<'a>>,
        /// [counts\[rank\], H] f32.
        out: ViewMut<'a>,
    },
    /// The end of a sparse layer whose rows came from all ranks. Each rank weights and adds the slots that it computed,
    /// in ascending k and in f32. `residual` += the ranks' sums for this rank's rows, added in rank order; then `out` =
    /// RMS norm of `residual`.
    CombineAddNorm {
        /// The slots of all ranks' rows, [sum(counts), ..] in rank order.
        slots: SlotRows<'a>,
        /// Rows of each rank.
        counts: &'a [usize],
        /// If `needs` is given, the sums of a rank for rows that it does not need are zeros: they may be left out of
        /// the transfer.
        needs: Option<RowNeeds<'a>>,
        /// `residual` [counts\[rank\], H] f32, and `out` of the same dims.
        end: AddNorm<'a>,
    },
}
