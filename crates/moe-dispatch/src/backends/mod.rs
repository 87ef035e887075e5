//! The backends of expert parallelism, a file each, and the table of them.
//!
//! | backend | rows to experts | by slot: slot rows back | by rank: sums back |
//! |---|---|---|---|
//! | `disabled` | every rank has them and a part of each expert | segments to the owners | all-reduce |
//! | `local_allreduce` | every rank has them | to the owners | all-reduce |
//! | `allgather_reducescatter` | all-gather | to the owners | reduce-scatter |
//! | `deepep high_throughput` | by slot: all-to-all of the needed rows, exact counts; by rank: gather of the needed rows | to the owners | reduce-scatter of the needed rows |
//! | `deepep low_latency` | by slot: all-to-all in blocks of the step's most tokens, batched; by rank: all-gather, listed | in blocks to the owners | reduce-scatter |

mod allgather_reducescatter;
mod deepep;
mod disabled;
mod local_allreduce;

use candle_core::Result;
use moe_comm::EpBackend;

use crate::block_ranks::{BlockBackends, BlockRanks};

/// The prepare/finalize backends of a block, as its geometry asks for them: what users name in [`moe_comm::EP_BACKENDS`] is built here.
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
