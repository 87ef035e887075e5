//! Moving experts of a layer to other ranks, between two steps.
//!
//! ```text
//! round, round, ..      some bytes of the new experts travel into memory of their own; the slots compute on
//! last round            each rank compares what has come with the checksums of loading, and all tell each other
//!   all are content     every rank writes its slots and puts the new map in force
//!   one is not          nobody does, and what has come is dropped: the old placement was never left
//! ```
//!
//! How bytes travel and where they arrive is the landing's (`landing`, on GPUs `device_landing`): host memory, or a window over the
//! memory of the GPUs, which fills while the next step runs.
//!
//! Every rank knows the old map and the new one, so all know who sends what to whom and nothing is described. A round is a
//! collective: a rank that dies in one fails the run by name, like in any other.

use std::sync::Arc;
use std::time::Duration;

use moe_comm::{Communicator, ExpertMap, SlotTransfer, Window, all_gather_bytes};
use moe_kernels::Exec;
use moe_kernels::candle::{Error, Result, bail};
use serde::{Deserialize, Serialize};

use crate::landings::landing;
use crate::layer_move::LayerMove;
use crate::placed::PlacedExperts;

/// One round of the move of a layer's experts, as ranks tell it to each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveRound {
    /// MoE layer, from 0.
    pub layer: usize,
    /// The logical expert of each slot after the move, `[P]`.
    pub phy2log: Vec<u32>,
    /// The slot of each expert that computes all of its rows where copies share none, `[E]`; empty: as
    /// [`ExpertMap::sole_copies`] says without loads.
    pub sole: Vec<u32>,
    /// Bytes that travel in this round, all ranks together: about so many, at least one.
    pub bytes: usize,
    /// The time for all rounds of the layer; a move that has taken longer is rolled back. A round itself waits no longer than
    /// any collective.
    pub limit: Duration,
}

/// How a layer's move stands after a round: the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MoveStatus {
    /// More is to travel.
    Underway,
    /// The new placement is in force.
    Moved,
    /// The old placement has stayed in force; what each rank found wrong.
    RolledBack(Vec<String>),
}

/// The slot of one copy of each expert of a map: `asked`, unless that is empty.
fn sole_copies(map: &ExpertMap, asked: &[u32]) -> Result<Vec<u32>> {
    if asked.is_empty() {
        return map.sole_copies(&[]).map_err(Error::wrap);
    }
    if asked.len() != map.num_experts() {
        bail!("expected a slot for each of {} experts, got {}", map.num_experts(), asked.len())
    }
    for (expert, &slot) in asked.iter().enumerate() {
        let holds = map.phy2log().get(slot as usize);
        if holds != Some(&(expert as u32)) {
            bail!("slot {slot} is to compute expert {expert}, but holds {holds:?}")
        }
    }
    Ok(asked.to_vec())
}

impl PlacedExperts {
    /// One round of the move to `round.phy2log`: a collective over the ranks that share the experts, between two steps. The
    /// first one begins the move; one to another placement drops what has come for the placement before. `ep` are these ranks as
    /// their hosts talk to each other, `window` the memory of their GPUs, where the experts are on some. One layer moves at a time.
    ///
    /// # Errors
    /// A placement that these slots cannot have; experts that were not loaded to be moved; a window that is missing or too small; a
    /// rank that died.
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

    /// Everything has been sent: puts the new placement in force if every rank is content, and on none if one is not.
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

    /// What is wrong with what has arrived here.
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
