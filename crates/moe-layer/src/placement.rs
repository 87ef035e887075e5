//! Which experts each rank holds, where that is not simply a run of them: settings, and the map of a layer that they mean.

use std::sync::Arc;

use moe_comm::{ExpertMap, Geometry, ReplicaChoice};
use moe_kernels::candle::{Device, Error, Result, bail};

/// How experts are placed on the ranks of expert parallelism. The default is one copy of each, as
/// [`Geometry::placement`] says, for ever.
#[derive(Clone, Debug, Default)]
pub struct ExpertPlacements {
    /// The logical experts of each slot, `[MoE layers][ranks][slots]`; `None`: all experts in order, then copies of the first.
    pub table: Option<Arc<[Vec<Vec<u32>>]>>,
    /// Slots beyond one per expert, all ranks together, where there is no table.
    pub num_redundant_experts: usize,
    /// Which copy computes a row.
    pub replicas: ReplicaChoice,
    /// Whether experts may move while the model runs. Then their checksums are taken when they are loaded.
    pub movable: bool,
    /// What a test breaks.
    pub fault: Option<MoveFault>,
}

/// A fault that a test injects into moves of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoveFault {
    /// The rank that has it.
    pub rank: usize,
    /// What happens.
    pub kind: FaultKind,
}

/// What a [`MoveFault`] does, in every move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// A bit of what the rank receives is flipped.
    Corrupt,
    /// The rank panics before it sends.
    DieSending,
    /// The rank panics before it says whether all has arrived.
    DieVoting,
    /// The rank panics before it writes what all have agreed on.
    DieWriting,
}

impl ExpertPlacements {
    /// Whether there is no map: physical experts are the logical ones, as the geometry places them.
    pub fn is_off(&self) -> bool {
        self.table.is_none() && self.num_redundant_experts == 0 && !self.movable
    }

    /// Fails where a model of so many MoE layers and experts cannot have these placements, before anything is loaded.
    ///
    /// # Errors
    /// A dense model; one rank; moves on a device other than the CPU; a table that does not fit, by layer, rank, slot and expert.
    pub fn check(&self, layers: usize, experts: usize, geometry: &Geometry, device: &Device) -> Result<()> {
        if self.is_off() {
            return Ok(());
        }
        if layers == 0 {
            bail!("placements of experts: the model has no routed experts")
        }
        if geometry.ep_size < 2 {
            bail!(
                "placements of experts need expert parallelism over at least two ranks, got {}; add --enable-expert-parallel \
                 with --tp or --dp",
                geometry.ep_size
            )
        }
        if self.movable && !device.is_cpu() {
            bail!(
                "load balancing of experts runs on the CPU only; on GPUs an expert map or redundant experts stay as they are"
            )
        }
        if let Some(table) = self.table.as_ref().filter(|table| table.len() != layers) {
            bail!("expert map: it has {} layers, but the model has {layers} with routed experts", table.len())
        }
        (0..layers).try_for_each(|layer| self.map(layer, experts, geometry.ep_size).map(drop))
    }

    /// The map of a layer of `experts` experts over `ranks` ranks; `None` if there is none.
    ///
    /// # Errors
    /// A table that does not fit, by layer, rank, slot and expert; too many redundant experts.
    pub(crate) fn map(&self, layer: usize, experts: usize, ranks: usize) -> Result<Option<ExpertMap>> {
        if self.is_off() {
            return Ok(None);
        }
        let Some(table) = &self.table else {
            let map = ExpertMap::initial(experts, self.num_redundant_experts, ranks);
            return map.map(Some).map_err(Error::wrap);
        };
        let Some(rows) = table.get(layer) else {
            bail!("expert map: it has {} layers, so none for MoE layer {layer}", table.len())
        };
        if rows.len() != ranks {
            bail!("expert map, layer {layer}: it is for {} ranks, but {ranks} share the experts", rows.len())
        }
        let map = ExpertMap::new(experts, rows);
        map.map(Some).map_err(|e| Error::msg(format!("expert map, layer {layer}: {e}")))
    }
}
