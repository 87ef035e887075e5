//! The context of a block: its place among the ranks, how its tokens are cut, and the source of its weights.

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

/// The largest number of tokens that a rank sends in one call of the low-latency form of `deepep`. Longer steps are
/// cut.
pub const LOW_LATENCY_TOKENS: usize = 128;

/// The environment in which a block runs and from which it is loaded. The default is one rank, no chunks, weights
/// packed for this machine, and the usual names.
#[derive(Clone, Debug)]
pub struct BlockContext {
    /// The place of this rank.
    pub geometry: Geometry,
    /// The communicators of this rank's groups.
    pub groups: ParallelGroups,
    /// Whether and how tokens are cut into chunks.
    pub chunked_moe: ChunkedMoe,
    /// The largest number of tokens of a call of the low-latency form of `deepep` that adds by slot.
    pub low_latency_tokens: usize,
    /// The rank that weights and adds results of several ranks; `None` means by slot on the CPU, and by rank on
    /// devices.
    pub who_adds: Option<WhoAdds>,
    /// Whether the source of weights has only this rank's slices, and not whole tensors: rows of gate and up, columns
    /// of down. Experts keep their global ids.
    pub sliced_weights: bool,
    /// Which experts each rank holds, and whether that may change.
    pub placements: ExpertPlacements,
    /// How many experts of each layer are in host memory, for a GPU; `None` means that all are on the device.
    pub offload: Option<ExpertOffload>,
    /// Where shared experts run on a GPU.
    pub shared_experts_stream: SharedExpertsStream,
    /// Whether a row's bits must be independent of the other rows of its batch. The oracle uses it; the execution
    /// context decides the rest.
    pub batch_invariant: bool,
    /// The instruction set of the CPU for which weights are packed when they are loaded, by default this machine's
    /// best; `None` leaves them in rows. Results have the same bits in both cases. With few tokens, products of packed
    /// weights are faster. Weights on a device are never packed.
    pub cpu_isa: Option<CpuIsa>,
    /// The names of the matrices of MLPs and experts in the checkpoint.
    pub names: MlpNames,
    /// The source of quantised weights, with this rank's parts; `None` means that all weights are floats.
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
            cpu_isa: Some(CpuIsa::detect()),
            names: MlpNames::USUAL,
            quant: None,
        }
    }
}

impl BlockContext {
    /// Returns the ranks that cut a row-parallel product (o_proj, or a dense or shared down_proj) whose reduced size is
    /// `size`. `what` is the name of the size in errors. `None` means that one rank holds all of it.
    ///
    /// # Errors
    /// A size that the geometry cannot divide.
    pub fn row_parallel(&self, what: &'static str, size: usize) -> Result<Option<RowParallel>> {
        if self.geometry.tp_size == 1 {
            return Ok(None);
        }
        RowParallel::new(&self.geometry.row_shard(what, size)?, self.groups.tp.clone()).map(Some)
    }

    /// Returns how a quantised weight is packed if each rank of a row-parallel product holds `columns` of its columns.
    pub fn row_parallel_use(&self, columns: usize) -> QuantUse {
        let ranks = self.geometry.tp_size.max(1);
        QuantUse::RowParallel { segments: (row_parallel_segments(columns * ranks) / ranks).max(1) }
    }

    /// Whether ranks communicate while they load a layer, so that all of them must load their layers in the same order.
    /// They compare experts that may move, or agree on the size of chunks.
    pub fn agrees_while_loading(&self) -> bool {
        self.placements.movable || self.chunked_moe.enable_chunked_moe && self.geometry.world_size > 1
    }

    /// Returns the smallest `size` of all ranks. Chunks are rounds of collectives, so all ranks must cut in the same
    /// way. If experts are spread unevenly, a memory budget has room for fewer tokens on a rank with more experts.
    pub(crate) fn agreed_chunk(&self, size: NonZeroUsize, device: &Device) -> Result<NonZeroUsize> {
        let mut least = [u32::try_from(size.get()).unwrap_or(u32::MAX)];
        self.groups.world.all_reduce(
            ViewMut::new(&mut least, &[1])?,
            ReduceOp::Min,
            &mut Exec::on(device)?,
        )?;
        Ok(NonZeroUsize::new(least[0] as usize).map_or(size, |least| least.min(size)))
    }

    /// Returns the prepare/finalize backends of the geometry.
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
