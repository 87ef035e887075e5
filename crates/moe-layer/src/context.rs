//! Where a block runs: its place among the ranks, and how its tokens are cut.

use moe_chunking::ChunkedMoe;
use moe_comm::{DeepEpMode, EpBackend, ExpertLayout, Geometry, ParallelGroups, RowParallel};
use moe_dispatch::{
    AllgatherReducescatter, EpRanks, HighThroughput, LocalAllreduce, LocalExperts, LowLatency, NoEp,
    PrepareFinalize, SumAllReduce, SumAllToAll, SumGather, TensorParallel,
};
use moe_kernels::candle::{Device, Result, bail};

/// Tokens that a rank brings to the low-latency form of `deepep` at most; longer steps are cut.
pub const LOW_LATENCY_TOKENS: usize = 128;

/// The same on a device, where an expert's block holds numbers instead of rows: those of the largest graph.
const LISTED_TOKENS: usize = 1024;

/// Where a block runs. The default is one rank, without chunks.
#[derive(Clone, Debug)]
pub struct BlockContext {
    /// This rank's place.
    pub geometry: Geometry,
    /// The communicators of its groups.
    pub groups: ParallelGroups,
    /// Whether and how tokens are cut into chunks.
    pub chunked_moe: ChunkedMoe,
    /// Tokens of a call of the low-latency form of `deepep` on the CPU, at most.
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
    /// for steps that only decode. On the CPU those with the bits of one rank, on a `device` those that add
    /// the ranks' sums.
    pub(crate) fn backends(
        &self,
        layout: &ExpertLayout,
        on_input: bool,
        device: &Device,
    ) -> Result<Backends> {
        if !device.is_cpu() {
            return self.sums(layout, on_input, device);
        }
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

    /// The backends of the fast mode.
    fn sums(&self, layout: &ExpertLayout, on_input: bool, device: &Device) -> Result<Backends> {
        let ranks = || -> Result<EpRanks> {
            let ranks = EpRanks::new(layout, self.groups.ep.clone(), self.groups.tp.clone())?.on(device)?;
            Ok(ranks.with_router_weight_on_input(on_input))
        };
        let low_latency = || -> Result<_> { Ok(SumGather::batched(ranks()?, LISTED_TOKENS)) };
        Ok(match (self.geometry.backend, self.geometry.deepep_mode) {
            (EpBackend::Disabled, _) if self.geometry.moe_tp_size > 1 => {
                let cut = SumAllReduce::of_cut_experts(self.groups.tp.clone());
                (Box::new(cut.with_router_weight_on_input(on_input)), None)
            }
            (EpBackend::Disabled, _) => (Box::new(NoEp::new().with_router_weight_on_input(on_input)), None),
            (EpBackend::LocalAllreduce, _) => {
                if self.geometry.dp_size > 1 {
                    bail!(
                        "local_allreduce: ranks bring tokens of their own; use allgather_reducescatter or deepep"
                    )
                }
                let experts = match &layout.expert_map {
                    Some(map) => LocalExperts::from_map(map, layout.num_local_experts())?.on(device)?,
                    None => LocalExperts::all(layout.num_experts()),
                };
                let whole = SumAllReduce::of_whole_experts(experts, self.groups.ep.clone());
                (Box::new(whole.with_router_weight_on_input(on_input)), None)
            }
            (EpBackend::AllgatherReducescatter, _) => (Box::new(SumGather::standard(ranks()?)), None),
            (EpBackend::DeepEp, DeepEpMode::HighThroughput) => (Box::new(SumAllToAll::new(ranks()?)), None),
            (EpBackend::DeepEp, DeepEpMode::LowLatency) => (Box::new(low_latency()?), None),
            (EpBackend::DeepEp, DeepEpMode::Auto) => {
                (Box::new(SumAllToAll::new(ranks()?)), Some(Box::new(low_latency()?)))
            }
        })
    }
}
