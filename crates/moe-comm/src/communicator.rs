//! The ranks of a group: what a transport implements.
//!
//! A communicator is shared (`Arc<dyn Communicator>`), so every method takes `&self`. Callers must keep one order: all
//! ranks of a group call the same collectives in the same order, and each rank makes one call at a time.

use std::fmt::Debug;
use std::sync::Arc;

use candle_core::{DType, Result};
use moe_kernels::Exec;

use crate::collective::{Collective, FusedCollective};

/// One rank's handle to its group. Callers use the methods of [`Collectives`](crate::Collectives), which every
/// communicator has.
///
/// Conventions of every collective:
/// - Views are of f32, bf16, f16, u8, u32, i32 or i64; all ranks pass the same dtype.
/// - Counts and splits are in rows of dimension 0; the other dimensions ("row dims") are equal on
///   all ranks. Zero rows are legal everywhere.
/// - The calling rank's own rows take part like any other rank's.
/// - Results are bit-identical on every rank and in every run, whatever the timing.
/// - A collective without counts is the one with counts (`_v`) where all counts are equal.
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

    /// What carries the collectives, as text for messages: host memory, sockets, NCCL or peer memory.
    fn medium(&self) -> String {
        "host memory".to_string()
    }

    /// Runs a collective.
    fn run(&self, collective: Collective<'_>, ex: &mut Exec) -> Result<()>;

    /// The launches that do a collective together with the ops around it; all ranks return the same. With `None`,
    /// [`FusedCollective::run`] runs every part as a separate op.
    fn fused(&self) -> Option<&dyn FusedCollectives> {
        None
    }

    /// Splits the group: the ranks that pass the same `color` form a new group, ordered by
    /// `key`, then by rank in this group. The new group fails when this one fails and the other
    /// way round.
    fn split(&self, color: usize, key: usize, ex: &mut Exec) -> Result<Arc<dyn Communicator>>;

    /// Fails the group on every rank; `reason` is part of each rank's error. Any thread may call it at any time, so it
    /// takes no [`Exec`]. If the group has failed before, the first reason stays.
    fn abort(&self, reason: &str);

    /// Returns an error if the group has failed. It does not communicate.
    fn check(&self) -> Result<()>;

    /// Makes the group fail if the work that is on the stream of `ex` now does not end within the group's time limit.
    /// Call it after the replay of a graph with collectives; collectives that are called directly are watched anyway.
    /// It does nothing for communicators whose calls return only when they are done.
    fn watch(&self, _ex: &mut Exec) -> Result<()> {
        self.check()
    }
}

/// Launches that communicate and compute, which some communicators offer in addition to the collectives. Every method
/// gives the same answer on all ranks.
pub trait FusedCollectives {
    /// Whether a step of `rows` rows of H elements is faster if the ranks share the residual stream
    /// ([`FusedCollective::ShareAddNorm`]). `dtype` is the dtype of the norms.
    ///
    /// # Errors
    /// The reason why it is not faster; it completes the sentence "no gain: ..".
    fn shares_residual(
        &self,
        rows: usize,
        hidden: usize,
        dtype: DType,
    ) -> std::result::Result<(), &'static str>;

    /// Whether [`FusedCollective::ScatterSums`] is faster if its sums are sent rounded to the model's dtype. `rows` is
    /// the number of rows of all ranks together, H the elements of a row.
    fn rounds_sums(&self, rows: usize, hidden: usize, dtype: DType) -> bool;

    /// Whether [`FusedCollective::Dispatch`] is one launch that sends each row only to the ranks that need it. `counts`
    /// are the rows of each rank, with K experts and H elements of `dtype` in device memory.
    fn dispatches(&self, counts: &[usize], top_k: usize, hidden: usize, dtype: DType) -> bool;

    /// Whether [`FusedCollective::CombineAddNorm`] is one launch, which also adds up the slots. `counts` are the rows
    /// of each rank, `top_k` the slots of a row, and `dtype` is the dtype of the norms.
    fn combines(&self, counts: &[usize], top_k: usize, hidden: usize, dtype: DType) -> bool;

    /// Whether [`run_fused`](Self::run_fused) takes this call. If not, the parts of the call run one by one.
    fn takes(&self, call: &FusedCollective<'_>) -> bool;

    /// Runs a call, under the conventions of [`Communicator`].
    ///
    /// # Errors
    /// A call that it does not [take](Self::takes), and the errors of [`Communicator`].
    fn run_fused(&self, call: FusedCollective<'_>, ex: &mut Exec) -> Result<()>;
}
