//! The experts of a layer in their slots: which is where, which copy computes a row, and the weights that can be exchanged.
//!
//! Routing chooses logical experts. [`PlacedExperts::physical`] replaces them by slots, and from there on dispatch and experts know
//! slots alone, which never change their rank. So when experts move only two things change, together and between two steps: the
//! weights in slots, and the table from logical to physical ids, whose size and place in memory stay the same.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use moe_comm::{Communicator, ExpertMap, ReplicaChoice, all_gather_bytes, partition};
use moe_experts::ExpertWeights;
use moe_kernels::candle::{DType, Device, Error, Result, bail};
use moe_kernels::{Buffer, Exec, Scratch, Spread, View, physical_ids_into};

use crate::context::BlockContext;
use crate::moving::LayerMove;
use crate::placement::MoveFault;

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
    pub(crate) fault: Option<MoveFault>,
}

/// Which expert is where, and the same as tables.
struct State {
    map: ExpertMap,
    /// log2phy [E, max copies] i32, for the rows of each rank of `near`; where the experts are.
    tables: Vec<Buffer>,
}

/// What moves need beside the weights.
struct Movable {
    /// The checksum of each logical expert when it was loaded, \[E\].
    checksums: Vec<u64>,
    /// Bytes of a slot, on every rank.
    slot_len: usize,
    /// The move under way.
    current: Mutex<Option<LayerMove>>,
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
        let (geometry, settings) = (&context.geometry, &context.placements);
        let rank = geometry.ep_rank;
        if map.experts(rank).len() != weights.shape().num_local_experts {
            let (expected, got) = (map.experts(rank).len(), weights.shape().num_local_experts);
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
        let tables = tables(&map, &near)?.into_iter().map(|table| on(table, weights.device()));
        let state = RwLock::new(State { tables: tables.collect::<Result<_>>()?, map });
        let fault = settings.fault.filter(|fault| fault.rank == rank);
        Ok(Self { layer, rank, near, spread, state, weights, movable, fault })
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

    /// Bytes of one expert; `None` if experts cannot move.
    pub fn slot_len(&self) -> Option<usize> {
        self.movable.as_ref().map(|movable| movable.slot_len)
    }

    /// The physical ids [T, K] of logical ones [T, K], of the rows of one call of prepare.
    pub(crate) fn physical(&self, topk_ids: View, ex: &mut Exec) -> Result<Scratch> {
        let (state, tokens) = (self.read(), topk_ids.rows());
        let mut physical = ex.scratch(DType::U32, topk_ids.dims())?;
        for (owner, table) in state.tables.iter().enumerate() {
            let rows = partition(tokens, state.tables.len(), owner);
            let ids = topk_ids.narrow(rows.start, rows.len())?;
            let out = physical.view_mut().narrow(rows.start, rows.len())?;
            physical_ids_into(ids, table.view(), self.spread, rows.start, out, ex)?;
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

    /// Puts another map in force, in the memory of the old one.
    pub(crate) fn set_map(&self, map: ExpertMap) -> Result<()> {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let ex = Exec::on(self.weights.device())?;
        for (table, new) in state.tables.iter_mut().zip(tables(&map, &self.near)?) {
            ex.copy_from_host(new.view(), table.view_mut())?;
        }
        state.map = map;
        Ok(())
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, State> {
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

/// A table where the experts are.
fn on(table: Buffer, device: &Device) -> Result<Buffer> {
    if device.is_cpu() {
        return Ok(table);
    }
    let mut copy = Buffer::zeros_on(device, table.dtype(), table.dims())?;
    Exec::on(device)?.copy_from_host(table.view(), copy.view_mut())?;
    Ok(copy)
}

fn tables(map: &ExpertMap, near: &[Option<usize>]) -> Result<Vec<Buffer>> {
    let dims = [map.num_experts(), map.max_copies()];
    near.iter().map(|&near| Buffer::from_vec(map.log2phy(near), &dims)).collect()
}

impl Movable {
    fn new(layer: usize, map: &ExpertMap, weights: &ExpertWeights, ep: &dyn Communicator) -> Result<Self> {
        let failed = |e: Error| e.context(format!("layer {layer}: its experts cannot move"));
        let own_len = weights.slot_len().map_err(failed)?;
        let own = std::iter::once(own_len as u64).chain(weights.checksums()?);
        let own: Vec<u8> = own.flat_map(u64::to_le_bytes).collect();
        let all = all_gather_bytes(ep, &own, &mut Exec::cpu())?;
        let mut checksums = vec![None; map.num_experts()];
        let mut len: Option<(usize, u64)> = None;
        for (rank, words) in all.iter().enumerate() {
            let mut words = words.as_chunks::<8>().0.iter().map(|&word| u64::from_le_bytes(word));
            // A rank without slots has a length of nothing.
            let slot_len = words.next().filter(|_| !map.experts(rank).is_empty());
            match (len, slot_len) {
                (Some((other, a)), Some(b)) if a != b => {
                    bail!("layer {layer}: an expert is {a} bytes on rank {other}, but {b} on rank {rank}")
                }
                (None, Some(slot_len)) => len = Some((rank, slot_len)),
                _ => {}
            }
            for (&expert, sum) in map.experts(rank).iter().zip(words) {
                match checksums[expert as usize].replace((rank, sum)) {
                    Some((other, before)) if before != sum => bail!(
                        "layer {layer}: ranks {other} and {rank} hold different copies of expert {expert} \
                         (checksums {before:016x} and {sum:016x}); do both read the same checkpoint?"
                    ),
                    _ => {}
                }
            }
        }
        let checksums = checksums.into_iter().flatten().map(|(_, sum)| sum).collect();
        let slot_len = len.map_or(own_len, |(_, len)| len as usize);
        Ok(Self { checksums, slot_len, current: Mutex::new(None) })
    }
}
