//! Where a block runs: its place among the ranks, how its tokens are cut, and how its source shows its weights.

use std::num::NonZeroUsize;
use std::sync::Arc;

use moe_chunking::ChunkedMoe;
use moe_comm::{Collectives, ExpertLayout, Geometry, ParallelGroups, ReduceOp, RowParallel};
use moe_dispatch::{BlockBackends, BlockRanks, WhoAdds, build_backends};
use moe_kernels::candle::{Device, Result};
use moe_kernels::names::MlpNames;
use moe_kernels::quant::{QuantSource, QuantUse};
use moe_kernels::{CpuIsa, Exec, ViewMut, row_parallel_segments};

use crate::expert_offload::ExpertOffload;
use crate::placement::ExpertPlacements;
use crate::shared_stream::SharedExpertsStream;

/// Tokens that a rank brings to the low-latency form of `deepep` at most; longer steps are cut.
pub const LOW_LATENCY_TOKENS: usize = 128;

/// Where a block runs and where its weights come from. The default is one rank, without chunks, and the usual names.
#[derive(Clone, Debug)]
pub struct BlockContext {
    /// This rank's place.
    pub geometry: Geometry,
    /// The communicators of its groups.
    pub groups: ParallelGroups,
    /// Whether and how tokens are cut into chunks.
    pub chunked_moe: ChunkedMoe,
    /// Tokens of a call of the low-latency form of `deepep` that adds by slot, at most.
    pub low_latency_tokens: usize,
    /// Who weights and adds what ranks compute; `None`: by slot on the CPU, by rank on devices.
    pub who_adds: Option<WhoAdds>,
    /// Whether the weights' source shows this rank's slices instead of whole tensors: rows of gate
    /// and up, columns of down. Experts keep their global ids.
    pub sliced_weights: bool,
    /// Which experts each rank holds, and whether that may change.
    pub placements: ExpertPlacements,
    /// Experts that live in host memory beside a GPU; `None`: all are on the device.
    pub offload: Option<ExpertOffload>,
    /// Where shared experts run on a GPU.
    pub shared_experts_stream: SharedExpertsStream,
    /// Whether a row's bits must not depend on its batch: what the oracle is asked for. The execution context decides
    /// the rest.
    pub batch_invariant: bool,
    /// The path of the CPU for which weights are packed when they are loaded; `None`: they stay in rows.
    pub cpu_isa: Option<CpuIsa>,
    /// What the checkpoint calls the matrices of MLPs and experts.
    pub names: MlpNames,
    /// Where weights are that the checkpoint holds quantised, as this rank sees them; `None`: all are floats.
    pub quant: Option<Arc<dyn QuantSource>>,
}

impl Default for BlockContext {
    fn default() -> Self {
        Self {
            geometry: Geometry::default(),
            groups: ParallelGroups::single(),
            chunked_moe: ChunkedMoe::default(),
            low_latency_tokens: LOW_LATENCY_TOKENS,
            who_adds: None,
            sliced_weights: false,
            placements: ExpertPlacements::default(),
            offload: None,
            shared_experts_stream: SharedExpertsStream::default(),
            batch_invariant: false,
            cpu_isa: None,
            names: MlpNames::USUAL,
            quant: None,
        }
    }
}

impl BlockContext {
    /// The ranks that cut a row-parallel product (o_proj, a dense or shared down_proj) of reduced size
    /// `size`, which `what` names in an error; `None` where one rank holds all of it.
    ///
    /// # Errors
    /// A size that the geometry cannot cut.
    pub fn row_parallel(&self, what: &'static str, size: usize) -> Result<Option<RowParallel>> {
        if self.geometry.tp_size == 1 {
            return Ok(None);
        }
        RowParallel::new(&self.geometry.row_shard(what, size)?, self.groups.tp.clone()).map(Some)
    }

    /// How a quantised weight is packed of which the ranks of a row-parallel product hold `columns` each.
    pub fn row_parallel_use(&self, columns: usize) -> QuantUse {
        let ranks = self.geometry.tp_size.max(1);
        QuantUse::RowParallel { segments: (row_parallel_segments(columns * ranks) / ranks).max(1) }
    }

    /// Whether a layer that is loaded meets the other ranks, so that all must load their layers in one order: to compare experts that
    /// may move, or to agree on the size of chunks.
    pub fn agrees_while_loading(&self) -> bool {
        self.placements.movable || self.chunked_moe.enable_chunked_moe && self.geometry.world_size > 1
    }

    /// The smallest `size` of all ranks. Chunks are rounds of collectives, so that all ranks must cut alike, but where
    /// experts are spread unevenly a memory budget holds fewer tokens on a rank with more of them.
    pub(crate) fn agreed_chunk(&self, size: NonZeroUsize, device: &Device) -> Result<NonZeroUsize> {
        let mut least = [u32::try_from(size.get()).unwrap_or(u32::MAX)];
        self.groups.world.all_reduce(
            ViewMut::new(&mut least, &[1])?,
            ReduceOp::Min,
            &mut Exec::on(device)?,
        )?;
        Ok(NonZeroUsize::new(least[0] as usize).map_or(size, |least| least.min(size)))
    }

    /// The prepare/finalize backends of the geometry.
    pub(crate) fn backends(
        &self,
        layout: &ExpertLayout,
        router_weight_on_input: bool,
        device: &Device,
    ) -> Result<BlockBackends> {
        build_backends(&BlockRanks {
            geometry: &self.geometry,
            groups: &self.groups,
            layout,
            device,
            who_adds: self.who_adds.unwrap_or(WhoAdds::usual(device)),
            low_latency_tokens: self.low_latency_tokens,
            router_weight_on_input,
        })
    }
}

#[cfg(test)]
mod tests {
    use moe_comm::ParallelConfig;

    use super::*;

    #[test]
    fn ranks_that_agree_on_chunks_load_their_layers_in_one_order() {
        let agrees = |tp, enable_chunked_moe| {
            let geometry = ParallelConfig { tp, ..ParallelConfig::default() }.geometry(0).unwrap();
            let chunked_moe = ChunkedMoe { enable_chunked_moe, ..ChunkedMoe::default() };
            BlockContext { geometry, chunked_moe, ..BlockContext::default() }.agrees_while_loading()
        };
        assert_eq!(
            [agrees(1, false), agrees(2, false), agrees(1, true), agrees(2, true)],
            [false, false, false, true]
        );
    }
}
