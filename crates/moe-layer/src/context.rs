//! Where a block runs: its place among the ranks, and how its tokens are cut.

use moe_chunking::ChunkedMoe;
use moe_comm::{DeepEpMode, EpBackend, ExpertLayout, Geometry, ParallelGroups, RowParallel};
use moe_dispatch::{
    AllgatherReducescatter, EpRanks, HighThroughput, LocalAllreduce, LowLatency, NoEp, PrepareFinalize,
    TensorParallel,
};
use moe_kernels::candle::Result;

/// Tokens that a rank brings to the low-latency form of `deepep` at most; longer steps are cut.
pub const LOW_LATENCY_TOKENS: usize = 128;

/// Where a block runs. The default is one rank, without chunks.
#[derive(Clone, Debug)]
pub struct BlockContext {
    /// This rank's place.
    pub geometry: Geometry,
    /// The communicators of its groups.
    pub groups: ParallelGroups,
    /// Whether and how tokens are cut into chunks.
    pub chunked_moe: ChunkedMoe,
    /// Tokens of a call of the low-latency form of `deepep`, at most.
    pub low_latency_tokens: usize,
    /// Whether the weights' source shows this rank's slices instead of whole tensors: rows of gate
    /// and up, columns of down. Experts keep their global ids.
    pub sliced_weights: bool,
    /// Whether a row's bits must not depend on its batch: what the oracle is asked for. The execution context decides
    /// the rest.
    pub batch_invariant: bool,
}

impl Default for BlockContext {
    fn default() -> Self {
        Self {
            geometry: Geometry::default(),
            groups: ParallelGroups::single(),
            chunked_moe: ChunkedMoe::default(),
            low_latency_tokens: LOW_LATENCY_TOKENS,
            sliced_weights: false,
            batch_invariant: false,
        }
    }
}

/// The backend of a block, and the one of its decode path.
type Backends = (Box<dyn PrepareFinalize>, Option<Box<dyn PrepareFinalize>>);

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

    /// The prepare/finalize backend of the geometry, and, where the mode of `deepep` is open, the one
    /// for steps that only decode.
    pub(crate) fn backends(&self, layout: &ExpertLayout, on_input: bool) -> Result<Backends> {
        let ranks = || -> Result<EpRanks> {
            let ranks = EpRanks::new(layout, self.groups.ep.clone(), self.groups.tp.clone())?;
            Ok(ranks.with_router_weight_on_input(on_input))
        };
        let low_latency = || -> Result<_> { Ok(LowLatency::new(ranks()?, self.low_latency_tokens)) };
        Ok(match (self.geometry.backend, self.geometry.deepep_mode) {
            (EpBackend::Disabled, _) if self.geometry.moe_tp_size > 1 => {
                let cut = TensorParallel::new(self.groups.tp.clone());
                (Box::new(cut.with_router_weight_on_input(on_input)), None)
            }
            (EpBackend::Disabled, _) => (Box::new(NoEp::new().with_router_weight_on_input(on_input)), None),
            (EpBackend::LocalAllreduce, _) => (Box::new(LocalAllreduce::new(ranks()?)?), None),
            (EpBackend::AllgatherReducescatter, _) => (Box::new(AllgatherReducescatter::new(ranks()?)), None),
            (EpBackend::DeepEp, DeepEpMode::HighThroughput) => {
                (Box::new(HighThroughput::new(ranks()?)), None)
            }
            (EpBackend::DeepEp, DeepEpMode::LowLatency) => (Box::new(low_latency()?), None),
            (EpBackend::DeepEp, DeepEpMode::Auto) => {
                (Box::new(HighThroughput::new(ranks()?)), Some(Box::new(low_latency()?)))
            }
        })
    }
}
