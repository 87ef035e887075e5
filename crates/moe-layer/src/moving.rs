//! Moving experts of a layer to other ranks, between two steps.
//!
//! ```text
//! round, round, ..      some bytes of the new experts travel into memory of their own; the slots compute on
//! last round            each rank compares what has come with the checksums of loading, and all tell each other
//!   all are content     every rank writes its slots and puts the new map in force
//!   one is not          nobody does, and what has come is dropped: the old placement was never left
//! ```
//!
//! Every rank knows the old map and the new one, so all know who sends what to whom and nothing is described. A round is a
//! collective: a rank that dies in one fails the run by name, like in any other.

use std::ops::Range;
use std::time::{Duration, Instant};

use moe_comm::{Communicator, ExpertMap, SlotTransfer, all_gather_bytes};
use moe_experts::checksum;
use moe_kernels::candle::{Error, Result};
use moe_kernels::{Exec, View, ViewMut};
use serde::{Deserialize, Serialize};

use crate::placed::PlacedExperts;
use crate::placement::FaultKind;

/// Within which time a move must have arrived. A round waits no longer than any collective; this bounds all rounds of a layer.
const LIMIT: Duration = Duration::from_secs(600);

/// One round of the move of a layer's experts, as ranks tell it to each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveRound {
    /// MoE layer, from 0.
    pub layer: usize,
    /// The logical expert of each slot after the move, `[P]`.
    pub phy2log: Vec<u32>,
    /// Bytes that travel in this round, all ranks together: about so many, at least one.
    pub bytes: usize,
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

/// A move under way.
pub(crate) struct LayerMove {
    target: ExpertMap,
    /// Transfers between ranks, in the order of travel.
    remote: Vec<SlotTransfer>,
    /// Those within a rank.
    local: Vec<SlotTransfer>,
    /// Bytes of `remote` that have travelled.
    travelled: usize,
    /// What has come to this rank, transfer by transfer.
    arrived: Vec<(SlotTransfer, Vec<u8>)>,
    started: Instant,
}

/// Who sends and who receives.
type Ends = (usize, usize);

/// Some bytes of a transfer.
type Part = (SlotTransfer, Range<usize>);

impl LayerMove {
    fn new(map: &ExpertMap, target: ExpertMap) -> Result<Self> {
        let transfers = map.transfers(&target).map_err(Error::wrap)?;
        let (local, remote) = transfers.into_iter().partition(|t| map.rank_of(t.from) == map.rank_of(t.to));
        Ok(Self { target, remote, local, travelled: 0, arrived: Vec::new(), started: Instant::now() })
    }

    fn ends(&self, transfer: &SlotTransfer) -> Ends {
        let rank = |slot| self.target.rank_of(slot).unwrap_or(0);
        (rank(transfer.from), rank(transfer.to))
    }

    /// What travels in the next `bytes` bytes.
    fn next_parts(&self, slot_len: usize, bytes: usize) -> Vec<Part> {
        let (start, end) = (self.travelled, self.travelled.saturating_add(bytes.max(1)));
        let part = |(index, transfer): (usize, &SlotTransfer)| {
            let first = index * slot_len;
            let range = start.max(first)..end.min(first + slot_len);
            (!range.is_empty()).then(|| (*transfer, range.start - first..range.end - first))
        };
        self.remote.iter().enumerate().filter_map(part).collect()
    }

    /// Takes in what has come to `rank` of these parts: `arrived` holds `receive[r]` bytes of each rank r, in the order of the
    /// parts.
    fn accept(&mut self, rank: usize, parts: &[Part], arrived: &[u8], receive: &[usize]) {
        let mut rest = arrived;
        let split = |&len: &usize| {
            let (own, tail) = rest.split_at(len);
            rest = tail;
            own
        };
        let mut of_rank: Vec<&[u8]> = receive.iter().map(split).collect();
        for (transfer, range) in parts {
            self.travelled += range.len();
            let (from, to) = self.ends(transfer);
            if to != rank {
                continue;
            }
            let (own, tail) = of_rank[from].split_at(range.len());
            of_rank[from] = tail;
            if range.start == 0 {
                self.arrived.push((*transfer, Vec::new()));
            }
            // Transfers travel one after the other, so what goes on is the last one.
            if let Some((_, bytes)) = self.arrived.last_mut() {
                bytes.extend_from_slice(own);
            }
        }
    }
}

impl PlacedExperts {
    /// One round of the move to `round.phy2log`: a collective over the ranks that share the experts, between two steps. The
    /// first one begins the move; one to another placement drops what has come for the placement before.
    ///
    /// # Errors
    /// A placement that these slots cannot have; experts that were not loaded to be moved; a rank that died.
    pub fn move_round(&self, round: &MoveRound, ep: &dyn Communicator, ex: &mut Exec) -> Result<MoveStatus> {
        let (layer, (checksums, mut current)) = (self.layer(), self.moves()?);
        let same = |moving: &LayerMove| moving.target.phy2log() == round.phy2log;
        let mut moving = match current.take().filter(same) {
            Some(moving) => moving,
            None => {
                let map = self.map();
                let target = map.with_phy2log(round.phy2log.clone());
                LayerMove::new(&map, target.map_err(|e| Error::msg(format!("layer {layer}: {e}")))?)?
            }
        };
        let slot_len = self.slot_len().unwrap_or(0);
        self.travel(&mut moving, slot_len, round.bytes, ep, ex)?;
        if moving.travelled < moving.remote.len() * slot_len {
            *current = Some(moving);
            return Ok(MoveStatus::Underway);
        }
        self.settle(moving, checksums, ep, ex)
    }

    /// Sends and receives the next bytes.
    fn travel(
        &self,
        moving: &mut LayerMove,
        slot_len: usize,
        bytes: usize,
        ep: &dyn Communicator,
        ex: &mut Exec,
    ) -> Result<()> {
        self.die_at(FaultKind::DieSending);
        let parts = moving.next_parts(slot_len, bytes);
        let send = self.outgoing(moving, &parts, ep.world_size())?;
        let mut receive = vec![0; ep.world_size()];
        for (transfer, range) in &parts {
            let (from, to) = moving.ends(transfer);
            receive[from] += if to == self.rank { range.len() } else { 0 };
        }
        let sizes: Vec<usize> = send.iter().map(Vec::len).collect();
        let (send, mut arrived) = (send.concat(), vec![0u8; receive.iter().sum()]);
        let dims = ([send.len()], [arrived.len()]);
        let to = ViewMut::new(&mut arrived, &dims.1)?;
        ep.all_to_all_v(View::new(&send, &dims.0)?, &sizes, to, &receive, ex)?;
        if let (Some(FaultKind::Corrupt), Some(byte)) = (self.fault_kind(), arrived.first_mut()) {
            *byte ^= 0x10;
        }
        moving.accept(self.rank, &parts, &arrived, &receive);
        Ok(())
    }

    /// This rank's bytes of these parts, by the rank that they go to.
    fn outgoing(&self, moving: &LayerMove, parts: &[Part], ranks: usize) -> Result<Vec<Vec<u8>>> {
        let first = moving.target.slots(self.rank).start;
        let mut send = vec![Vec::new(); ranks];
        for (transfer, range) in parts {
            let (from, to) = moving.ends(transfer);
            if from == self.rank {
                let own = self.weights.slot_bytes(transfer.from - first)?;
                send[to].extend_from_slice(&own[range.clone()]);
            }
        }
        Ok(send)
    }

    /// Everything has travelled: puts the new placement in force if every rank is content, and on none if one is not.
    fn settle(
        &self,
        mut moving: LayerMove,
        checksums: &[u64],
        ep: &dyn Communicator,
        ex: &mut Exec,
    ) -> Result<MoveStatus> {
        self.die_at(FaultKind::DieVoting);
        let first = self.map().slots(self.rank).start;
        let own = moving.local.iter().filter(|t| moving.ends(t).1 == self.rank);
        let own =
            own.map(|t| Ok((*t, self.weights.slot_bytes(t.from - first)?))).collect::<Result<Vec<_>>>()?;
        moving.arrived.extend(own);
        let faults = self.faults(&moving, checksums);
        let all = all_gather_bytes(ep, faults.join("\n").as_bytes(), ex)?.join(&b'\n');
        let all = String::from_utf8_lossy(&all);
        let said = all.lines().filter(|line| !line.is_empty());
        let said: Vec<String> = said.map(str::to_string).collect();
        if !said.is_empty() {
            return Ok(MoveStatus::RolledBack(said));
        }
        self.die_at(FaultKind::DieWriting);
        for (transfer, bytes) in &moving.arrived {
            self.weights.write_slot(transfer.to - first, bytes)?;
        }
        self.set_map(moving.target)?;
        Ok(MoveStatus::Moved)
    }

    /// What is wrong with what has arrived here.
    fn faults(&self, moving: &LayerMove, checksums: &[u64]) -> Vec<String> {
        let mut faults = Vec::new();
        for (transfer, bytes) in &moving.arrived {
            let SlotTransfer { expert, to, .. } = transfer;
            let (expected, got) = (checksums.get(*expert as usize).copied().unwrap_or(0), checksum(bytes));
            if expected != got {
                let (from, rank) = moving.ends(transfer);
                faults.push(format!(
                    "layer {}: expert {expert} arrived at slot {to} of rank {rank} from rank {from} with the checksum \
                     {got:016x}; it was loaded with {expected:016x}",
                    self.layer()
                ));
            }
        }
        let took = moving.started.elapsed();
        if took > LIMIT {
            faults.push(format!(
                "layer {}: rank {} has waited {took:?} for its experts, longer than {LIMIT:?}",
                self.layer(),
                self.rank
            ));
        }
        faults
    }

    fn fault_kind(&self) -> Option<FaultKind> {
        self.fault.map(|fault| fault.kind)
    }

    /// A fault of a test.
    fn die_at(&self, kind: FaultKind) {
        assert!(self.fault_kind() != Some(kind), "a test lets rank {} die: {kind:?}", self.rank);
    }
}
