//! The experts of a layer in their slots: which expert is in which slot, which copy computes a row, and the weights
//! that can be exchanged.
//!
//! Routing chooses logical experts. The launch that routes replaces them by slots ([`StepCopies`]), or
//! [`PlacedExperts::physical`] does so afterwards. Dispatch and experts use only slots, which never change their rank.
//! So when experts move, only two things change, together and between two steps: the weights in slots, and the tables
//! from logical to physical ids. The size and the address of the tables stay the same.

use std::sync::{MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use moe_comm::{ExpertMap, ReplicaChoice, partition};
use moe_experts::ExpertWeights;
use moe_kernels::candle::{DType, Device, Error, Result};
use moe_kernels::plan::CopiesForm;
use moe_kernels::{Exec, Log2Phy, PHYSICAL_IDS, Scratch, Spread, View, physical_ids_into};

use crate::context::BlockContext;
use crate::error::refuse;
use crate::id_tables::{Table, Tables};
use crate::landing::{Landing, landing_bytes};
use crate::layer_move::LayerMove;
use crate::movable::Movable;

/// The placed experts of a layer, from the point of view of one rank.
pub struct PlacedExperts {
    layer: usize,
    /// This rank among those that share the experts.
    pub(crate) rank: usize,
    /// The ranks whose rows have a table of their own; `None` is one table for all ranks.
    near: Vec<Option<usize>>,
    spread: Spread,
    state: RwLock<State>,
    /// The weights of this rank's slots, which its experts use.
    pub(crate) weights: ExpertWeights,
    /// The data that moves need; `None` if experts never move.
    movable: Option<Movable>,
}

/// Which expert is where, as a map and as tables.
struct State {
    map: ExpertMap,
    tables: Tables<Table>,
}

impl PlacedExperts {
    /// Makes the experts of a layer that were loaded by `map`. If they may move, this is a collective: the ranks
    /// exchange the checksums of their experts.
    ///
    /// # Errors
    /// Weights that cannot move; ranks that hold different copies of an expert.
    pub(crate) fn new(
        layer: usize,
        map: ExpertMap,
        weights: ExpertWeights,
        context: &BlockContext,
    ) -> Result<Self> {
        let geometry = &context.geometry;
        let settings = &context.placements;
        let rank = geometry.ep_rank;
        if map.experts(rank).len() != weights.shape().num_local_experts {
            let expected = map.experts(rank).len();
            let got = weights.shape().num_local_experts;
            refuse!(
                Placement,
                "placed experts, layer {layer}: rank {rank} has {expected} slots, but weights of {got} experts"
            )
        }
        let near = match settings.replicas {
            ReplicaChoice::LocalFirst => {
                let first = rank - geometry.tp_rank;
                (first..first + geometry.tp_size).map(Some).collect()
            }
            _ => vec![None],
        };
        let spread = match settings.replicas {
            ReplicaChoice::Hash => Spread::Hashed,
            ReplicaChoice::RoundRobin | ReplicaChoice::LocalFirst => Spread::InTurns,
        };
        let movable = match settings.movable {
            true => Some(Movable::new(layer, &map, &weights, context.groups.ep.as_ref())?),
            false => None,
        };
        let sole = map.sole_copies(&[]).map_err(Error::wrap)?;
        let tables = Tables::of(&map, &sole, &near, rank)?.on(weights.device())?;
        let state = RwLock::new(State { tables, map });
        Ok(Self { layer, rank, near, spread, state, weights, movable })
    }

    /// The device of the experts.
    pub fn device(&self) -> &Device {
        self.weights.device()
    }

    /// The number of the layer among the model's MoE layers.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// The map from slots to experts as it is now.
    pub fn map(&self) -> ExpertMap {
        self.read().map.clone()
    }

    /// The numbers of logical experts E and of slots P.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        let state = self.read();
        (state.map.num_experts(), state.map.num_slots())
    }

    /// Bytes of a [`Window`](moe_comm::Window) in which the experts of this rank's slots can arrive; `None` if experts
    /// cannot move.
    pub fn landing_bytes(&self) -> Option<usize> {
        Some(landing_bytes(self.weights.shape().num_local_experts, self.slot_len()?))
    }

    /// Bytes of one expert; `None` if experts cannot move.
    pub fn slot_len(&self) -> Option<usize> {
        self.movable.as_ref().map(|movable| movable.slot_len)
    }

    /// Whether rows of different ranks use different copies. Then the copy of a row is known only after the rows have
    /// been divided among their ranks.
    pub(crate) fn is_near(&self, form: CopiesForm) -> bool {
        form == CopiesForm::Shared && self.near.len() > 1
    }

    /// The tables of a step.
    pub(crate) fn copies(&self, form: CopiesForm) -> StepCopies<'_> {
        StepCopies { placed: self, state: self.read(), form }
    }

    /// Converts logical ids [T, K] to physical ids [T, K], for the rows of one call of prepare. Each copy gets a share
    /// of the rows.
    pub(crate) fn physical(&self, topk_ids: View, ex: &mut Exec) -> Result<Scratch> {
        let state = self.read();
        let tokens = topk_ids.rows();
        let mut physical = ex.scratch(DType::U32, topk_ids.dims())?;
        let tables = &state.tables.shared;
        let _ids = ex.launched_as_one(|| PHYSICAL_IDS);
        for (owner, table) in tables.iter().enumerate() {
            let rows = partition(tokens, tables.len(), owner);
            let ids = topk_ids.narrow(rows.start, rows.len())?;
            let out = physical.view_mut().narrow(rows.start, rows.len())?;
            let log2phy = Log2Phy { ids: table.ids.view(), spread: self.spread, first_row: rows.start };
            physical_ids_into(ids, &log2phy, out, ex)?;
        }
        Ok(physical)
    }

    /// Returns the checksums of all logical experts \[E\] and the running move.
    ///
    /// # Errors
    /// Experts that cannot move.
    pub(crate) fn moves(&self) -> Result<(&[u64], MutexGuard<'_, Option<LayerMove>>)> {
        match &self.movable {
            Some(m) => Ok((&m.checksums, m.current.lock().unwrap_or_else(PoisonError::into_inner))),
            None => refuse!(
                Placement,
                "layer {}: its experts were not loaded to be moved; add `eplb`",
                self.layer
            ),
        }
    }

    /// Replaces the map, in the memory of the old one. `sole` is the copy of each expert that computes all of its rows.
    pub(crate) fn set_map(&self, map: ExpertMap, sole: &[u32], landing: &dyn Landing) -> Result<()> {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let new = Tables::of(&map, sole, &self.near, self.rank)?;
        for (table, ids) in state.tables.each_mut().zip(new.each()) {
            landing.replace_table(ids.view(), table)?;
        }
        state.map = map;
        Ok(())
    }

    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for PlacedExperts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("PlacedExperts");
        out.field("layer", &self.layer)
            .field("rank", &self.rank)
            .field("map", &self.map())
            .finish_non_exhaustive()
    }
}

/// The tables of a step. They cannot be replaced while this value exists.
pub(crate) struct StepCopies<'a> {
    placed: &'a PlacedExperts,
    state: RwLockReadGuard<'a, State>,
    form: CopiesForm,
}

impl StepCopies<'_> {
    /// The table for a launch that routes all rows of the step; `None` if the copy of a row depends on the row's rank.
    pub fn log2phy(&self) -> Option<Log2Phy<'_>> {
        let tables = &self.state.tables;
        let table = match (self.form, &tables.shared[..]) {
            (CopiesForm::Sole, _) => &tables.sole,
            (CopiesForm::Shared, [only]) => only,
            (CopiesForm::Shared, _) => return None,
        };
        Some(Log2Phy { ids: table.ids.view(), spread: self.placed.spread, first_row: 0 })
    }

    /// If one copy computes all rows of each expert: this rank's slots by expert. The experts then need no other ids.
    pub fn expert_map(&self) -> Option<View<'_>> {
        (self.form == CopiesForm::Sole).then(|| self.state.tables.sole_here.ids.view())
    }
}
