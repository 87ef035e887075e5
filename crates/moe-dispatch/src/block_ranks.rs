//! What a sparse block knows about its ranks, and the prepare/finalize backends that are built from that.

use candle_core::{Device, Result};
use moe_comm::{ExpertLayout, Geometry, ParallelGroups};

use crate::over_ranks::OverRanks;
use crate::prepare_finalize::{PrepareFinalize, WhoAdds};
use crate::ranks::EpRanks;

/// The ranks of a block, as one of the ranks sees them.
#[derive(Clone, Copy, Debug)]
pub struct BlockRanks<'a> {
    /// This rank's place, with the backend and its mode.
    pub geometry: &'a Geometry,
    /// The communicators of this rank's groups.
    pub groups: &'a ParallelGroups,
    /// Which experts are on which rank.
    pub layout: &'a ExpertLayout,
    /// The device of the rows.
    pub device: &'a Device,
    /// Who weights and adds the experts' results.
    pub who_adds: WhoAdds,
    /// The largest number of tokens in one call of the low-latency form of `deepep` if it adds by slot.
    pub low_latency_tokens: usize,
    /// Whether the router weight multiplies the rows before the experts (`apply_router_weight_on_input`).
    pub router_weight_on_input: bool,
}

/// The prepare/finalize backends of a block.
pub struct BlockBackends {
    /// The backend of all steps, except for those that `decode` takes.
    pub main: Box<dyn PrepareFinalize>,
    /// The backend of steps in which all ranks only decode, as the ranks have agreed, if it differs from `main`.
    pub decode: Option<Box<dyn PrepareFinalize>>,
}

impl BlockRanks<'_> {
    /// The ranks with whole experts, with their tables on the device of the rows.
    pub(crate) fn ranks(&self) -> Result<EpRanks> {
        EpRanks::new(self.layout, self.groups.ep.clone(), self.groups.tp.clone())?.on(self.device)
    }

    pub(crate) fn boxed(&self, backend: OverRanks) -> Box<dyn PrepareFinalize> {
        Box::new(backend.with_router_weight_on_input(self.router_weight_on_input))
    }

    /// The same backend for all steps.
    pub(crate) fn always(&self, backend: OverRanks) -> BlockBackends {
        BlockBackends { main: self.boxed(backend), decode: None }
    }
}
