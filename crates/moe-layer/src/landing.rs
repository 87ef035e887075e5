//! Where experts arrive before they come to their slots, and how they get there.

use std::ops::Range;

use moe_comm::Communicator;
use moe_experts::ExpertWeights;
use moe_kernels::candle::Result;
use moe_kernels::{Exec, View};

use crate::id_tables::Table;

/// A slot of a rank: `slot` is its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub rank: usize,
    pub slot: usize,
}

/// Some bytes of an expert that goes from a slot to one of another rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub from: Place,
    pub to: Place,
    pub range: Range<usize>,
}

/// Memory beside a rank's slots for what comes to them. The slots keep what they hold until `install`.
pub(crate) trait Landing: Send {
    /// Begins a move: nothing of an earlier one is needed any more, on any rank.
    fn begin(&mut self, ep: &dyn Communicator, ex: &mut Exec) -> Result<()>;

    /// Sends and receives these parts; all ranks call it with the same.
    fn travel(
        &mut self,
        parts: &[Part],
        weights: &ExpertWeights,
        ep: &dyn Communicator,
        ex: &mut Exec,
    ) -> Result<()>;

    /// Whether parts may still be on their way when `travel` returns. Then a step runs meanwhile.
    fn is_behind(&self) -> bool;

    /// Takes the experts of these slots of this rank, (from, to), and returns when everything has arrived, on all ranks.
    fn arrive(
        &mut self,
        local: &[(usize, usize)],
        weights: &ExpertWeights,
        ep: &dyn Communicator,
        ex: &mut Exec,
    ) -> Result<()>;

    /// The checksums of what has arrived for these slots.
    fn checksums(&self, slots: &[usize]) -> Result<Vec<u64>>;

    /// Puts the ids of a new map, [E, W] i32, into a table.
    fn replace_table(&self, ids: View<'_>, table: &mut Table) -> Result<()>;

    /// Puts what has arrived into these slots; the last call of a move.
    fn install(&self, slots: &[usize], weights: &ExpertWeights) -> Result<()>;
}

/// Bytes of a window in which the experts of so many slots arrive.
pub(crate) fn landing_bytes(slots: usize, slot_len: usize) -> usize {
    slots * stride(slot_len)
}

/// From slot to slot in a window: each begins where kernels may load vectors.
pub(crate) fn stride(slot_len: usize) -> usize {
    slot_len.next_multiple_of(256)
}
