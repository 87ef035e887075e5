//! The experts of a layer in their slots: which is where, which copy computes a row, and the weights that can be exchanged.
//!
//! Routing chooses logical experts. The launch that routes replaces them by slots ([`StepCopies`]), or [`PlacedExperts::physical`] does
//! behind it, and from there on dispatch and experts know slots alone, which never change their rank. So when experts move only two
//! things change, together and between two steps: the weights in slots, and the tables from logical to physical ids, whose size and
//! place in memory stay the same.

use std::sync::{MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use moe_comm::{ExpertMap, ReplicaChoice, partition};
use moe_experts::ExpertWeights;
use moe_kernels::candle::{DType, Device, Error, Result, bail};
use moe_kernels::plan::CopiesForm;
use moe_kernels::{Exec, Log2Phy, PHYSICAL_IDS, Scratch, Spread, View, physical_ids_into};

use crate::context::BlockContext;
use crate::id_tables::{Table, Tables};
use crate::landing::{Landing, landing_bytes};
use crate::layer_move::LayerMove;
use crate::movable::Movable;

/// The placed experts of a layer, as one rank sees them.
pub struct PlacedExperts {
    layer: usize,
    /// This rank among those that share the experts.
    pub(crate) rank: usize,
    /// The ranks for whose rows there is a table each; `None`: one table for all.
    near: Vec<Option<usize>>,
    spread: Spread,
    state: RwLock<State>,
    /// The weights of this rank's slots: those that its experts compute with.
    pub(crate) weights: ExpertWeights,
    /// What moves need; `None`: experts stay where they are.
    movable: Option<Movable>,
}

/// Which expert is where, as a map and as tables.
struct State {
    map: ExpertMap,
    tables: Tables<Table>,
}

impl PlacedExperts {
    /// The experts of a layer that were loaded by `map`. Where they may move it is a collective: the ranks tell each other
    /// the checksums of what they hold.
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
            bail!(
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

    /// Where the experts are.
    pub fn device(&self) -> &Device {
        self.weights.device()
    }

    /// Number of the layer among the model's MoE layers.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// Which expert is in which slot now.
    pub fn map(&self) -> ExpertMap {
        self.read().map.clone()
    }

    /// Logical experts E and slots P.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        let state = self.read();
        (state.map.num_experts(), state.map.num_slots())
    }

    /// Bytes of a [`Window`](moe_comm::Window) in which the experts of this rank's slots can arrive; `None` if experts cannot move.
    pub fn landing_bytes(&self) -> Option<usize> {
        Some(landing_bytes(self.weights.shape().num_local_experts, self.slot_len()?))
    }

    /// Bytes of one expert; `None` if experts cannot move.
    pub fn slot_len(&self) -> Option<usize> {
        self.movable.as_ref().map(|movable| movable.slot_len)
    }

    /// Whether the rows of different ranks go to different copies, so that which copy computes a row is known only where rows are
    /// cut for their ranks.
    pub(crate) fn is_near(&self, form: CopiesForm) -> bool {
        form == CopiesForm::Shared && self.near.len() > 1
    }

    /// The tables of a step.
    pub(crate) fn copies(&self, form: CopiesForm) -> StepCopies<'_> {
        StepCopies { placed: self, state: self.read(), form }
    }

    /// The physical ids [T, K] of logical ones [T, K], of the rows of one call of prepare: each copy has a share.
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

    /// The checksums of all logical experts \[E\] and the move under way.
    ///
    /// # Errors
    /// Experts that stay where they are.
    pub(crate) fn moves(&self) -> Result<(&[u64], MutexGuard<'_, Option<LayerMove>>)> {
        match &self.movable {
            Some(m) => Ok((&m.checksums, m.current.lock().unwrap_or_else(PoisonError::into_inner))),
            None => bail!("layer {}: its experts were not loaded to be moved; add --enable-eplb", self.layer),
        }
    }

    /// Puts another map in force, in the memory of the old one; `sole` is the copy of each expert that computes alone.
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

/// The tables of a step, which nobody replaces while this lives.
pub(crate) struct StepCopies<'a> {
    placed: &'a PlacedExperts,
    state: RwLockReadGuard<'a, State>,
    form: CopiesForm,
}

impl StepCopies<'_> {
    /// For a launch that routes all rows of the step; `None` where the copy of a row depends on its rank.
    pub fn log2phy(&self) -> Option<Log2Phy<'_>> {
        let tables = &self.state.tables;
        let table = match (self.form, &tables.shared[..]) {
            (CopiesForm::Sole, _) => &tables.sole,
            (CopiesForm::Shared, [only]) => only,
            (CopiesForm::Shared, _) => return None,
        };
        Some(Log2Phy { ids: table.ids.view(), spread: self.placed.spread, first_row: 0 })
    }

    /// Where each expert has one copy that computes: this rank's slots by expert, so that experts need no other ids.
    pub fn expert_map(&self) -> Option<View<'_>> {
        (self.form == CopiesForm::Sole).then(|| self.state.tables.sole_here.ids.view())
    }
}
