//! The ranks of a group: what a transport implements.
//!
//! A communicator is shared (`Arc<dyn Communicator>`), so every method takes `&self`. The order of calls is the contract: all
//! ranks of a group call the same collectives in the same order, one at a time per rank.

use std::fmt::Debug;
use std::sync::Arc;

use candle_core::{DType, Result};
use moe_kernels::Exec;

use crate::collective::{Collective, FusedCollective};

/// One rank's handle to its group. Callers use the methods of [`Collectives`](crate::Collectives), which every communicator has.
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

    /// Runs a collective.
    fn run(&self, collective: Collective<'_>, ex: &mut Exec) -> Result<()>;

    /// What this communicator does in one launch together with the collective; `None`: nothing, so that
    /// [`FusedCollective::run`] runs every part by itself. The same answer on all ranks.
    fn fused(&self) -> Option<&dyn FusedCollectives> {
        None
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

/// What some communicators offer besides the collectives: launches that communicate and compute. All answers are the same on all
/// ranks.
pub trait FusedCollectives {
    /// Whether it is faster that the ranks share the residual stream of a step of `rows` rows of H elements, with norms of this dtype, by
    /// [`FusedCollective::ShareAddNorm`].
    ///
    /// # Errors
    /// The reason why not, which completes the sentence "no gain: ..".
    fn shares_residual(
        &self,
        rows: usize,
        hidden: usize,
        dtype: DType,
    ) -> std::result::Result<(), &'static str>;

    /// Whether it is faster to send sums of `rows` rows of H elements (of all ranks together) rounded to the model's dtype, in
    /// [`FusedCollective::ScatterSums`].
    fn rounds_sums(&self, rows: usize, hidden: usize, dtype: DType) -> bool;

    /// Whether [`FusedCollective::CombineAddNorm`] is one launch, which also adds up K slots of H elements, for `counts` rows of each
    /// rank and norms of this dtype.
    fn combines(&self, counts: &[usize], top_k: usize, hidden: usize, dtype: DType) -> bool;

    /// Whether [`run_fused`](Self::run_fused) takes a call. The parts of a call that is not taken run one by one.
    fn takes(&self, call: &FusedCollective<'_>) -> bool;

    /// Runs a call, under the conventions of [`Communicator`].
    ///
    /// # Errors
    /// A call that is not [taken](Self::takes), and the errors of [`Communicator`].
    fn run_fused(&self, call: FusedCollective<'_>, ex: &mut Exec) -> Result<()>;
}
