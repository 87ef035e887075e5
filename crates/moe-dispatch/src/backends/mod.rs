//! The backends of expert parallelism, one file each, and a table of them.
//!
//! | backend | rows to experts | by slot: slot rows back | by rank: sums back |
//! |---|---|---|---|
//! | `disabled` | every rank has them and a part of each expert | segments to the owners | all-reduce |
//! | `local_allreduce` | every rank has them | to the owners | all-reduce |
//! | `allgather_reducescatter` | all-gather | to the owners | reduce-scatter |
//! | `deepep high_throughput` | the needed rows (1) | to the owners | reduce-scatter of the needed rows |
//! | `deepep low_latency` | blocks of equal size (2) | in blocks to the owners | reduce-scatter (3) |
//!
//! (1) By slot this is an all-to-all with exact counts, by rank a gather.
//!
//! (2) By slot this is an all-to-all with batched rows; the size of a block is the largest number of tokens of a rank
//! in the step. By rank rows have the places of a gather, and their slots are listed by expert.
//!
//! (3) Where the communicator sends only needed rows in one launch, only the sums of these return.

mod allgather_reducescatter;
mod deepep;
mod disabled;
mod local_allreduce;

use candle_core::Result;
use moe_comm::EpBackend;

use crate::block_ranks::{BlockBackends, BlockRanks};

/// Builds the prepare/finalize backends of a block, as its geometry asks for them. Every name in
/// [`moe_comm::EP_BACKENDS`] is built here.
///
/// # Errors
/// Ranks that do not fit the backend or the layout.
pub fn build_backends(block: &BlockRanks<'_>) -> Result<BlockBackends> {
    let build = match block.geometry.backend {
        EpBackend::Disabled => disabled::build,
        EpBackend::LocalAllreduce => local_allreduce::build,
        EpBackend::AllgatherReducescatter => allgather_reducescatter::build,
        EpBackend::DeepEp => deepep::build,
    };
    build(block)
}
