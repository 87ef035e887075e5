//! Moves experts of a layer to other ranks, between two steps.
//!
//! ```text
//! round, round, ..      some bytes of the new experts are sent to separate memory; the slots compute as before
//! last round            each rank compares what has come with the checksums of loading, and tells the others
//!   all are equal       every rank writes its slots and uses the new map from now on
//!   one differs         no rank does, and what has come is dropped: the old placement is still in use
//! ```
//!
//! The landing determines how bytes are sent and where they arrive (`landing`, on GPUs `device_landing`): in host
//! memory, or in a window over the memory of the GPUs that is filled while the next step runs.
//!
//! Every rank knows the old and the new map, so all know which rank sends which bytes to which other rank, and no
//! description is sent. A round is a collective. If a rank dies in it, the run fails and the error names the rank, as
//! in any other collective.

use std::sync::Arc;
use std::time::Duration;

use moe_comm::{Communicator, ExpertMap, SlotTransfer, Window, all_gather_bytes};
use moe_kernels::Exec;
use moe_kernels::candle::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::error::refuse;
use crate::landings::landing;
use crate::layer_move::LayerMove;
use crate::placed::PlacedExperts;

/// One round of the move of a layer's experts, in the form in which ranks send it to each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveRound {
    /// MoE layer, from 0.
    pub layer: usize,
    /// The logical expert of each slot after the move, `[P]`.
    pub phy2log: Vec<u32>,
    /// The slot of each expert that computes all of its rows if copies share none, `[E]`; empty: the slots that
    /// [`ExpertMap::sole_copies`] chooses without loads.
    pub sole: Vec<u32>,
    /// The approximate number of bytes that are sent in this round by all ranks together; at least one.
    pub bytes: usize,
    /// The time limit for all rounds of the layer. A move that takes longer is rolled back. A single round has the same
    /// time limit as any other collective.
    pub limit: Duration,
}

/// The state of a layer's move after a round, which is the same on all ranks.
// This enum is exhaustive: a server must treat each end of a round as the other ranks do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MoveStatus {
    /// There are more bytes to send.
    Underway,
    /// The new placement is in use.
    Moved,
    /// The old placement is still in use. The texts say what each rank found wrong.
    RolledBack(Vec<String>),
}

/// Returns the slot of one copy of each expert of a map. It is `asked`, unless `asked` is empty.
fn sole_copies(map: &ExpertMap, asked: &[u32]) -> Result<Vec<u32>> {
    if asked.is_empty() {
        return map.sole_copies(&[]).map_err(Error::wrap);
    }
    if asked.len() != map.num_experts() {
        refuse!(Placement, "expected a slot for each of {} experts, got {}", map.num_experts(), asked.len())
    }
    for (expert, &slot) in asked.iter().enumerate() {
        let holds = map.phy2log().get(slot as usize);
        if holds != Some(&(expert as u32)) {
            refuse!(Placement, "slot {slot} is to compute expert {expert}, but holds {holds:?}")
        }
    }
    Ok(asked.to_vec())
}

impl PlacedExperts {
    /// Runs one round of the move to `round.phy2log`. It is a collective of the ranks that share the experts, between
    /// two steps. The first round begins the move. A round with another placement drops the data that has arrived for
    /// the earlier placement. `ep` connects the hosts of these ranks; `window` is the memory of their GPUs, if the
    /// experts are on GPUs. Only one layer can move at a time.
    ///
    /// # Errors
    /// A placement that is impossible with these slots; experts that were not loaded to be moved; a window that is
    /// missing or too small; a rank that died.
    pub fn move_round(
        &self,
        round: &MoveRound,
        ep: &dyn Communicator,
        window: Option<&Arc<dyn Window>>,
        ex: &mut Exec,
    ) -> Result<MoveStatus> {
        let (checksums, mut current) = self.moves()?;
        let slot_len = self.slot_len().unwrap_or(0);
        let same = |moving: &LayerMove| moving.target.phy2log() == round.phy2log;
        let mut moving = match current.take().filter(same) {
            Some(moving) => moving,
            None => self.begin(round, slot_len, (ep, window), ex)?,
        };
        let all = moving.remote.len() * slot_len;
        if moving.travelled < all {
            let parts = moving.next_parts(slot_len, round.bytes);
            moving.landing.travel(&parts, &self.weights, ep, ex)?;
            if moving.travelled < all || moving.landing.is_behind() {
                *current = Some(moving);
                return Ok(MoveStatus::Underway);
            }
        }
        self.settle(moving, checksums, round.limit, ep, ex)
    }

    fn begin(
        &self,
        round: &MoveRound,
        slot_len: usize,
        (ep, window): (&dyn Communicator, Option<&Arc<dyn Window>>),
        ex: &mut Exec,
    ) -> Result<LayerMove> {
        let map = self.map();
        let layer = self.layer();
        let target = map.with_phy2log(round.phy2log.clone());
        let target = target.map_err(|e| Error::msg(format!("layer {layer}: {e}")))?;
        let sole = sole_copies(&target, &round.sole).map_err(|e| e.context(format!("layer {layer}")))?;
        let mut landing = landing(self.rank, slot_len, &self.weights, window)?;
        landing.begin(ep, ex)?;
        LayerMove::new(&map, (target, sole), self.rank, landing)
    }

    /// Ends a move whose bytes have all been sent: all ranks use the new placement if no rank found a fault, and
    /// otherwise none does.
    fn settle(
        &self,
        mut moving: LayerMove,
        checksums: &[u64],
        limit: Duration,
        ep: &dyn Communicator,
        ex: &mut Exec,
    ) -> Result<MoveStatus> {
        let local = moving.local.iter().map(|t| (moving.place(t.from).slot, moving.place(t.to).slot));
        let local: Vec<(usize, usize)> = local.collect();
        moving.landing.arrive(&local, &self.weights, ep, ex)?;
        let faults = self.faults(&moving, checksums, limit)?;
        let all = all_gather_bytes(ep, faults.join("\n").as_bytes(), ex)?.join(&b'\n');
        let all = String::from_utf8_lossy(&all);
        let said = all.lines().filter(|line| !line.is_empty());
        let said: Vec<String> = said.map(str::to_string).collect();
        if !said.is_empty() {
            return Ok(MoveStatus::RolledBack(said));
        }
        let slots: Vec<usize> = moving.incoming(self.rank).map(|t| moving.place(t.to).slot).collect();
        let LayerMove { target, sole, landing, .. } = moving;
        self.set_map(target, &sole, landing.as_ref())?;
        landing.install(&slots, &self.weights)?;
        Ok(MoveStatus::Moved)
    }

    /// Returns the faults of the data that has arrived on this rank.
    fn faults(&self, moving: &LayerMove, checksums: &[u64], limit: Duration) -> Result<Vec<String>> {
        let mut faults = Vec::new();
        let slots: Vec<usize> = moving.incoming(self.rank).map(|t| moving.place(t.to).slot).collect();
        let arrived = moving.landing.checksums(&slots)?;
        for (SlotTransfer { expert, from, to }, got) in moving.incoming(self.rank).zip(arrived) {
            let expected = checksums.get(*expert as usize).copied().unwrap_or(0);
            if expected != got {
                let from = moving.place(*from).rank;
                let rank = self.rank;
                faults.push(format!(
                    "layer {}: expert {expert} arrived at slot {to} of rank {rank} from rank {from} with the checksum \
                     {got:016x}; it was loaded with {expected:016x}",
                    self.layer()
                ));
            }
        }
        let took = moving.started.elapsed();
        if took > limit {
            faults.push(format!(
                "layer {}: rank {} has waited {took:?} for its experts, longer than {limit:?}",
                self.layer(),
                self.rank
            ));
        }
        Ok(faults)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_that_are_to_compute_alone_must_hold_their_experts() {
        let map = ExpertMap::new(3, &[vec![0, 2], vec![1, 0]]).unwrap();
        assert_eq!(sole_copies(&map, &[3, 2, 1]).unwrap(), [3, 2, 1]);
        assert_eq!(sole_copies(&map, &[]).unwrap(), map.sole_copies(&[]).unwrap());
        let refused = |asked: &[u32]| sole_copies(&map, asked).unwrap_err().to_string();
        assert!(refused(&[3, 2]).contains("a slot for each of 3 experts, got 2"));
        assert!(refused(&[3, 2, 0]).contains("slot 0 is to compute expert 2, but holds Some(0)"));
        assert!(refused(&[9, 2, 1]).contains("slot 9 is to compute expert 0, but holds None"));
    }
}
