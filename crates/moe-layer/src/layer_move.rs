//! The running move of a layer's experts: which bytes are sent from which slot to which.

use std::time::Instant;

use moe_comm::{ExpertMap, SlotTransfer};
use moe_kernels::candle::{Error, Result};

use crate::landing::{Landing, Part, Place};

/// A running move.
pub(crate) struct LayerMove {
    pub target: ExpertMap,
    /// The slot of each expert that computes alone, if copies share no rows.
    pub sole: Vec<u32>,
    /// Transfers between ranks, in the order in which they are sent.
    pub remote: Vec<SlotTransfer>,
    /// Transfers within this rank.
    pub local: Vec<SlotTransfer>,
    /// Bytes of `remote` that have been sent.
    pub travelled: usize,
    /// The place where this rank's experts arrive.
    pub landing: Box<dyn Landing>,
    pub started: Instant,
}

impl LayerMove {
    pub fn new(
        map: &ExpertMap,
        (target, sole): (ExpertMap, Vec<u32>),
        rank: usize,
        landing: Box<dyn Landing>,
    ) -> Result<Self> {
        let transfers = map.transfers(&target).map_err(Error::wrap)?;
        let (mut local, remote): (Vec<_>, _) =
            transfers.into_iter().partition(|t| map.rank_of(t.from) == map.rank_of(t.to));
        local.retain(|t| map.rank_of(t.to) == Some(rank));
        Ok(Self { target, sole, remote, local, travelled: 0, landing, started: Instant::now() })
    }

    /// A slot by its rank and its number there.
    pub fn place(&self, slot: usize) -> Place {
        let rank = self.target.rank_of(slot).unwrap_or(0);
        Place { rank, slot: slot - self.target.slots(rank).start }
    }

    /// The transfers from other ranks to `rank`, then the transfers within it.
    pub fn incoming(&self, rank: usize) -> impl Iterator<Item = &SlotTransfer> {
        let remote = self.remote.iter().filter(move |t| self.place(t.to).rank == rank);
        remote.chain(&self.local)
    }

    /// The parts to send next: about `bytes` bytes, because no value is cut.
    pub fn next_parts(&mut self, slot_len: usize, bytes: usize) -> Vec<Part> {
        /// Bytes of a whole number of values of any dtype.
        const WHOLE: usize = 16;
        let bytes = bytes.clamp(1, usize::MAX / 2).next_multiple_of(WHOLE);
        let start = self.travelled;
        let end = self.travelled.saturating_add(bytes);
        let part = |(index, transfer): (usize, &SlotTransfer)| {
            let first = index * slot_len;
            let range = start.max(first)..end.min(first + slot_len);
            let from = self.place(transfer.from);
            let to = self.place(transfer.to);
            (!range.is_empty()).then(|| Part { from, to, range: range.start - first..range.end - first })
        };
        let parts: Vec<Part> = self.remote.iter().enumerate().filter_map(part).collect();
        self.travelled += parts.iter().map(|part| part.range.len()).sum::<usize>();
        parts
    }
}
