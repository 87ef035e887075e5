//! The collective operations that the ranks of a group call together.
//!
//! The names are those of MPI and NCCL. A communicator is shared (`Arc<dyn Communicator>`), so
//! every method takes `&self`; the order of calls is the contract: all ranks of a group call
//! the same collectives in the same order, one at a time per rank.

use std::fmt::{self, Debug};
use std::sync::Arc;

use candle_core::{DType, Result};
use moe_kernels::{Exec, PreNorm, SlotRows, View, ViewMut, add_rms_norm_into};
use serde::{Deserialize, Serialize};

use crate::by_parts::{combine_add_rms_norm, reduce_scatter_rounded, share_add_rms_norm};

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

/// A collective with the arguments of the [`Communicator`]'s method that calls it, as that hands them to
/// [`run`](Communicator::run). Counts are in rows of dimension 0, one for each rank.
#[derive(Debug)]
#[allow(missing_docs)] // The methods say what the arguments are.
pub enum Collective<'a> {
    /// [`Communicator::all_reduce`].
    AllReduce { data: ViewMut<'a>, op: ReduceOp },
    /// [`Communicator::all_gather_v`].
    AllGather { input: View<'a>, counts: &'a [usize], out: ViewMut<'a> },
    /// [`Communicator::reduce_scatter_v`].
    ReduceScatter { input: View<'a>, counts: &'a [usize], out: ViewMut<'a>, op: ReduceOp },
    /// [`Communicator::all_to_all_v`].
    AllToAll { input: View<'a>, send: &'a [usize], out: ViewMut<'a>, recv: &'a [usize] },
    /// [`Communicator::broadcast`].
    Broadcast { data: ViewMut<'a>, root: usize },
    /// [`Communicator::barrier`].
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

/// One rank's handle to its group.
///
/// Conventions of every collective:
/// - Views are of f32, bf16, f16, u8, u32, i32 or i64; all ranks pass the same dtype.
/// - Counts and splits are in rows of dimension 0; the other dimensions ("row dims") are equal on
///   all ranks. Zero rows are legal everywhere.
/// - The calling rank's own rows take part like any other rank's.
/// - Results are bit-identical on every rank, in every run, for every timing.
/// - The forms with counts (`_v`) and without are one collective: the latter have equal counts.
///
/// # Errors
/// Wrong arguments, ranks that disagree about a call, and ranks that panic, leave, stall or
/// abort are errors on every rank of the group, in bounded time, and name the rank. Collectives
/// have no partial failure: the group, every group it was split from and every group split from
/// those stay failed, and `out` is unspecified.
pub trait Communicator: Send + Sync + Debug {
    /// This rank in the group.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn world_size(&self) -> usize;

    /// What carries the collectives, in words for people: host memory, sockets, NCCL, peer memory.
    fn medium(&self) -> String {
        "host memory".to_string()
    }

    /// Runs a collective: what a transport implements. The methods below are its forms for callers.
    fn run(&self, collective: Collective<'_>, ex: &mut Exec) -> Result<()>;

    /// Replaces `data` on every rank by the reduction of all ranks' `data`, element by element.
    /// Any dims, the same on all ranks.
    fn all_reduce(&self, data: ViewMut<'_>, op: ReduceOp, ex: &mut Exec) -> Result<()> {
        self.run(Collective::AllReduce { data, op }, ex)
    }

    /// What follows a row-parallel product in a decoder layer: `residual` += the sum of all ranks' `partial`, then
    /// `out` = RMS norm of `residual`. `partial` is scratch afterwards. A communicator may do it in one launch; then
    /// sums are f32 additions in rank order, as [`ReduceOp::Sum`] adds on the CPU.
    ///
    /// | argument | shape, dtype |
    /// |---|---|
    /// | `partial` | [T, H] model dtype or f32, the same dims on all ranks |
    /// | `weight` | \[H\] model dtype, the same on all ranks |
    /// | `residual` | [T, H] dtype of `partial`, the same on all ranks before and after |
    /// | `out` | [T, H] model dtype |
    fn all_reduce_add_rms_norm(
        &self,
        mut partial: ViewMut<'_>,
        weight: View<'_>,
        eps: f32,
        residual: ViewMut<'_>,
        out: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        self.all_reduce(partial.reborrow(), ReduceOp::Sum, ex)?;
        add_rms_norm_into(partial.as_view(), weight, eps, residual, out, ex)
    }

    /// Whether the ranks better share the residual stream of a step of so many rows of H elements, whose norms have this dtype, by
    /// [`share_add_rms_norm`](Self::share_add_rms_norm), and if not, why: the same answer on all ranks.
    ///
    /// # Errors
    /// The reason, which completes the sentence "no gain: ..".
    fn shares_residual(
        &self,
        rows: usize,
        hidden: usize,
        dtype: DType,
    ) -> std::result::Result<(), &'static str> {
        let _ = (rows, hidden, dtype);
        Err("ranks that share host memory copy rows as fast as they add them")
    }

    /// [`all_reduce_add_rms_norm`](Self::all_reduce_add_rms_norm) where each rank keeps the residual stream of some rows alone:
    /// of those `residual` += the sum of all ranks' `partial`, and every rank gets all rows of `out` = RMS norm of `residual`. That
    /// is a reduce-scatter and an all-gather with the addition and the norm between them, as in sequence parallelism. Which rows a
    /// rank keeps follows from T and H, so a stream that begins whole on all ranks stays right where it is read. `partial` is scratch
    /// afterwards; a communicator may send it rounded to the dtype of `out`.
    ///
    /// | argument | shape, dtype |
    /// |---|---|
    /// | `partial` | [T, H] model dtype or f32, the same dims on all ranks |
    /// | `weight` | \[H\] model dtype, the same on all ranks |
    /// | `residual` | [T, H] dtype of `partial`; rows of other ranks are neither read nor written |
    /// | `out` | [T, H] model dtype, the same bits on all ranks |
    fn share_add_rms_norm(
        &self,
        partial: ViewMut<'_>,
        weight: View<'_>,
        eps: f32,
        residual: ViewMut<'_>,
        out: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        share_add_rms_norm(self, partial, weight, eps, residual, out, ex)
    }

    /// Concatenates `input` [R, ..], of the same R on all ranks, in rank order into `out`
    /// [world_size * R, ..].
    fn all_gather(&self, input: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        self.all_gather_v(input, &vec![input.rows(); self.world_size()], out, ex)
    }

    /// Concatenates `input` [counts\[rank\], ..] in rank order into `out` [sum(counts), ..].
    /// `counts` has one entry per rank and is the same on all ranks.
    fn all_gather_v(&self, input: View<'_>, counts: &[usize], out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        self.run(Collective::AllGather { input, counts, out }, ex)
    }

    /// [`all_gather_v`](Self::all_gather_v) of several arrays, pairs of input and output, with the same counts: one call of a
    /// communicator whose calls cost more than small arrays do.
    fn all_gather_v_each(
        &self,
        arrays: Vec<(View<'_>, ViewMut<'_>)>,
        counts: &[usize],
        ex: &mut Exec,
    ) -> Result<()> {
        arrays.into_iter().try_for_each(|(input, out)| self.all_gather_v(input, counts, out, ex))
    }

    /// [`all_gather_v`](Self::all_gather_v) of rows of which each rank needs some: the other rows of `out` are unspecified, so that a
    /// communicator need not move them.
    fn all_gather_needed(
        &self,
        input: View<'_>,
        counts: &[usize],
        needs: &RowNeeds<'_>,
        out: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        let _ = needs;
        self.all_gather_v(input, counts, out, ex)
    }

    /// The way back: [`reduce_scatter_v`](Self::reduce_scatter_v) of sums of f32, where the rows of a rank that does not need them
    /// are zeros, so that a communicator need not move them.
    fn reduce_scatter_needed(
        &self,
        input: View<'_>,
        counts: &[usize],
        needs: &RowNeeds<'_>,
        out: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        let _ = needs;
        self.reduce_scatter_v(input, counts, out, ReduceOp::Sum, ex)
    }

    /// Whether sums of so many rows of H elements, of all ranks together, better travel rounded to the model's dtype, by
    /// [`reduce_scatter_rounded`](Self::reduce_scatter_rounded): the same answer on all ranks.
    fn rounds_sums(&self, rows: usize, hidden: usize, dtype: DType) -> bool {
        let _ = (rows, hidden, dtype);
        false
    }

    /// [`reduce_scatter_v`](Self::reduce_scatter_v) of sums that each rank has rounded to the dtype of `input`, into `out` f32. With
    /// `needs` as in [`reduce_scatter_needed`](Self::reduce_scatter_needed). A communicator may keep the sum's f32.
    fn reduce_scatter_rounded(
        &self,
        input: View<'_>,
        counts: &[usize],
        needs: Option<&RowNeeds<'_>>,
        out: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        let _ = needs;
        reduce_scatter_rounded(self, input, counts, out, ex)
    }

    /// Whether [`combine_add_rms_norm`](Self::combine_add_rms_norm) adds up K slots of H elements itself, for so many rows of each rank
    /// and norms of this dtype, in the launch that sends the sums: the same answer on all ranks.
    fn combines(&self, counts: &[usize], top_k: usize, hidden: usize, dtype: DType) -> bool {
        let _ = (counts, top_k, hidden, dtype);
        false
    }

    /// What ends a sparse layer whose rows came from all ranks: each rank weights and adds the slots that it computed, k ascending in
    /// f32, `residual` += the ranks' sums of this rank's rows, then `out` = RMS norm of `residual`. Sums are added in rank order.
    ///
    /// | argument | shape, dtype |
    /// |---|---|
    /// | `slots` | of the rows of all ranks, [sum(counts), ..] in rank order |
    /// | `counts` | rows of each rank, the same on all ranks |
    /// | `norm` | its weight \[H\] in the model dtype |
    /// | `residual` | [counts\[rank\], H] f32 |
    /// | `out` | [counts\[rank\], H] model dtype |
    fn combine_add_rms_norm(
        &self,
        slots: &SlotRows<'_>,
        counts: &[usize],
        norm: &PreNorm<'_>,
        residual: ViewMut<'_>,
        out: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        combine_add_rms_norm(self, slots, counts, norm, residual, out, ex)
    }

    /// Reduces all ranks' `input` [world_size * R, ..] and leaves the rank-th R rows of the
    /// result in `out` [R, ..].
    fn reduce_scatter(&self, input: View<'_>, out: ViewMut<'_>, op: ReduceOp, ex: &mut Exec) -> Result<()> {
        let counts = vec![out.rows(); self.world_size()];
        self.reduce_scatter_v(input, &counts, out, op, ex)
    }

    /// Reduces all ranks' `input` [sum(counts), ..] and leaves this rank's rows of the result in
    /// `out` [counts\[rank\], ..]. `counts` has one entry per rank and is the same on all ranks.
    fn reduce_scatter_v(
        &self,
        input: View<'_>,
        counts: &[usize],
        out: ViewMut<'_>,
        op: ReduceOp,
        ex: &mut Exec,
    ) -> Result<()> {
        self.run(Collective::ReduceScatter { input, counts, out, op }, ex)
    }

    /// Sends the s-th R rows of `input` [world_size * R, ..] to rank s, and receives the same
    /// from every rank, in rank order, into `out` [world_size * R, ..].
    fn all_to_all(&self, input: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        let size = self.world_size();
        let counts = vec![input.rows() / size; size];
        self.all_to_all_v(input, &counts, out, &counts, ex)
    }

    /// Sends `send[s]` rows of `input` [sum(send), ..] to each rank s, in rank order, and receives
    /// `recv[s]` rows from each rank s, in rank order, into `out` [sum(recv), ..]. What a rank
    /// sends must be what the other expects.
    fn all_to_all_v(
        &self,
        input: View<'_>,
        send: &[usize],
        out: ViewMut<'_>,
        recv: &[usize],
        ex: &mut Exec,
    ) -> Result<()> {
        self.run(Collective::AllToAll { input, send, out, recv }, ex)
    }

    /// Replaces `data` on every rank by rank `root`'s. Any dims, the same on all ranks.
    fn broadcast(&self, data: ViewMut<'_>, root: usize, ex: &mut Exec) -> Result<()> {
        self.run(Collective::Broadcast { data, root }, ex)
    }

    /// Returns once every rank has called it.
    fn barrier(&self, ex: &mut Exec) -> Result<()> {
        self.run(Collective::Barrier, ex)
    }

    /// Splits the group: the ranks that pass the same `color` form a new group, ordered by
    /// `key`, then by rank in this group. The new group fails when this one fails and the other
    /// way round.
    fn split(&self, color: usize, key: usize, ex: &mut Exec) -> Result<Arc<dyn Communicator>>;

    /// Fails the group on every rank, with `reason` in their errors. It may be called from any
    /// thread at any time, so it takes no [`Exec`]; the first failure of a group stays.
    fn abort(&self, reason: &str);

    /// An error once the group has failed. It does not communicate.
    fn check(&self) -> Result<()>;

    /// Has the group fail if the work that is on `ex`'s stream now has not ended within the group's
    /// time limit. To be called after the replay of a graph with collectives; collectives that are
    /// called are watched without it. Does nothing where calls return when they are done.
    fn watch(&self, _ex: &mut Exec) -> Result<()> {
        self.check()
    }
}
