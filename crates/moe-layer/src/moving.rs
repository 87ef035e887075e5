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
    /// Between ranks, in the order of travel, and within this rank.
    remote: Vec<SlotTransfer>,
    local: Vec<SlotTransfer>,
    /// Bytes of `remote` that have travelled.
    travelled: usize,
    /// What has come for this rank's transfers of `remote`.
    arrived: Vec<(SlotTransfer, Vec<u8>)>,
    started: Instant,
}

/// Who sends and who receives.
type Ends = (usize, usize);

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

    /// Bytes `range` of each transfer that travels in the next `bytes` bytes.
    fn next_parts(&self, slot_len: usize, bytes: usize) -> Vec<(SlotTransfer, std::ops::Range<usize>)> {
        let (start, end) = (self.travelled, self.travelled.saturating_add(bytes.max(1)));
        let part = |(index, transfer): (usize, &SlotTransfer)| {
            let first = index * slot_len;
            let range = start.max(first)..end.min(first + slot_len);
            (!range.is_empty()).then(|| (*transfer, range.start - first..range.end - first))
        };
        self.remote.iter().enumerate().filter_map(part).collect()
    }
}

impl PlacedExperts {
    /// One round of the move to `round.phy2log`. A collective over the ranks that
    /// share the experts, between two steps. The first one begins the move; one to another placement drops what has come for the
    /// placement before.
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
        let (map, ranks) = (self.map(), ep.world_size());
        let parts = moving.next_parts(slot_len, bytes);
        let mut send = vec![Vec::new(); ranks];
        let mut receive = vec![0; ranks];
        for (transfer, range) in &parts {
            let (from, to) = moving.ends(transfer);
            if from == self.rank {
                let own = self.weights.slot_bytes(transfer.from - map.slots(from).start)?;
                send[to].extend_from_slice(&own[range.clone()]);
            }
            if to == self.rank {
                receive[from] += range.len();
            }
        }
        let sizes: Vec<usize> = send.iter().map(Vec::len).collect();
        let (out, mut arrived) = (send.concat(), vec![0u8; receive.iter().sum()]);
        let dims = ([out.len()], [arrived.len()]);
        let to = ViewMut::new(&mut arrived, &dims.1)?;
        ep.all_to_all_v(View::new(&out, &dims.0)?, &sizes, to, &receive, ex)?;
        if let (Some(FaultKind::Corrupt), Some(byte)) = (self.fault_kind(), arrived.first_mut()) {
            *byte ^= 0x10;
        }
        let mut from_rank: Vec<&[u8]> = Vec::with_capacity(ranks);
        let mut rest = &arrived[..];
        for &len in &receive {
            let (own, tail) = rest.split_at(len);
            from_rank.push(own);
            rest = tail;
        }
        for (transfer, range) in parts {
            moving.travelled += range.len();
            let (from, to) = moving.ends(&transfer);
            if to != self.rank {
                continue;
            }
            let (own, tail) = from_rank[from].split_at(range.len());
            from_rank[from] = tail;
            if range.start == 0 {
                moving.arrived.push((transfer, Vec::with_capacity(slot_len)));
            }
            if let Some((_, bytes)) = moving.arrived.last_mut() {
                bytes.extend_from_slice(own);
            }
        }
        Ok(())
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
        let all = all_gather_bytes(ep, faults.join("\n").as_bytes(), ex)?;
        let said = all
            .iter()
            .flat_map(|said| String::from_utf8_lossy(said).lines().map(str::to_string).collect::<Vec<_>>());
        let said: Vec<String> = said.collect();
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
