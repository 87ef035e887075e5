//! The placement of experts on ranks, other than in consecutive runs: its settings, and the resulting map of a layer.

use std::sync::Arc;

use moe_comm::{ExpertMap, Geometry, ReplicaChoice};
use moe_kernels::candle::{Error, Result};

use crate::error::refuse;

/// How experts are placed on the ranks of expert parallelism. By default there is one copy of each, placed by
/// [`Geometry::placement`], which never moves.
#[derive(Clone, Debug, Default)]
pub struct ExpertPlacements {
    /// The logical experts of each slot, `[MoE layers][ranks][slots]`. `None` means all experts in order, followed by
    /// copies of the first ones.
    pub table: Option<Arc<[Vec<Vec<u32>>]>>,
    /// The number of slots beyond one per expert, for all ranks together, if there is no table.
    pub num_redundant_experts: usize,
    /// Which copy computes a row.
    pub replicas: ReplicaChoice,
    /// Whether experts may move while the model runs. Then their checksums are computed when they are loaded.
    pub movable: bool,
}

impl ExpertPlacements {
    /// Whether there is no map, so that physical experts are the logical ones in the order of the geometry.
    pub fn is_off(&self) -> bool {
        self.table.is_none() && self.num_redundant_experts == 0 && !self.movable
    }

    /// Checks that a model with `layers` MoE layers and `experts` experts can have these placements, before anything is
    /// loaded.
    ///
    /// # Errors
    /// A dense model; a single rank; a table that does not fit. The error names the layer, rank, slot and expert.
    pub fn check(&self, layers: usize, experts: usize, geometry: &Geometry) -> Result<()> {
        if self.is_off() {
            return Ok(());
        }
        if layers == 0 {
            refuse!(Placement, "placements of experts: the model has no routed experts")
        }
        if geometry.ep_size < 2 {
            refuse!(
                Placement,
                "placements of experts need expert parallelism over at least two ranks, got {}; add `enable_expert_parallel` \
                 with `tp` or `dp`",
                geometry.ep_size
            )
        }
        if let Some(table) = self.table.as_ref().filter(|table| table.len() != layers) {
            refuse!(
                Placement,
                "expert map: it has {} layers, but the model has {layers} with routed experts",
                table.len()
            )
        }
        (0..layers).try_for_each(|layer| self.map(layer, experts, geometry.ep_size).map(drop))
    }

    /// Returns the map of a layer of `experts` experts over `ranks` ranks; `None` if there is no map.
    ///
    /// # Errors
    /// A table that does not fit, with layer, rank, slot and expert; too many redundant experts.
    pub(crate) fn map(&self, layer: usize, experts: usize, ranks: usize) -> Result<Option<ExpertMap>> {
        if self.is_off() {
            return Ok(None);
        }
        let Some(table) = &self.table else {
            let map = ExpertMap::initial(experts, self.num_redundant_experts, ranks);
            return map.map(Some).map_err(Error::wrap);
        };
        let Some(rows) = table.get(layer) else {
            refuse!(Placement, "expert map: it has {} layers, so none for MoE layer {layer}", table.len())
        };
        if rows.len() != ranks {
            refuse!(
                Placement,
                "expert map, layer {layer}: it is for {} ranks, but {ranks} share the experts",
                rows.len()
            )
        }
        let map = ExpertMap::new(experts, rows);
        map.map(Some).map_err(|e| Error::msg(format!("expert map, layer {layer}: {e}")))
    }
}
