//! The memory in which moved experts arrive before they are written to their slots, and how their bytes get there.

use std::ops::Range;

use moe_comm::Communicator;
use moe_experts::ExpertWeights;
use moe_kernels::candle::Result;
use moe_kernels::{Exec, View};

use crate::id_tables::Table;

/// A slot of a rank. `slot` is its number on that rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub rank: usize,
    pub slot: usize,
}

/// Some bytes of an expert that moves from a slot to a slot of another rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub from: Place,
    pub to: Place,
    pub range: Range<usize>,
}

/// Memory in which weights for a rank's slots arrive. The slots keep their weights until `install`.
pub(crate) trait Landing: Send {
    /// Begins a move. No rank needs the data of an earlier move any more.
    fn begin(&mut self, ep: &dyn Communicator, ex: &mut Exec) -> Result<()>;

    /// Sends and receives these parts. All ranks call it with the same parts.
    fn travel(
        &mut self,
        parts: &[Part],
        weights: &ExpertWeights,
        ep: &dyn Communicator,
        ex: &mut Exec,
    ) -> Result<()>;

    /// Whether parts may still be in flight when `travel` returns. Then a step runs at the same time.
    fn is_behind(&self) -> bool;

    /// Copies the experts that move within this rank, given as (from, to), and returns when everything has arrived on
    /// all ranks.
    fn arrive(
        &mut self,
        local: &[(usize, usize)],
        weights: &ExpertWeights,
        ep: &dyn Communicator,
        ex: &mut Exec,
    ) -> Result<()>;

    /// The checksums of the bytes that have arrived for these slots.
    fn checksums(&self, slots: &[usize]) -> Result<Vec<u64>>;

    /// Writes the ids of a new map, [E, W] i32, to a table.
    fn replace_table(&self, ids: View<'_>, table: &mut Table) -> Result<()>;

    /// Writes the bytes that have arrived to these slots. It is the last call of a move.
    fn install(&self, slots: &[usize], weights: &ExpertWeights) -> Result<()>;
}

/// The bytes of a window in which the experts of `slots` slots arrive.
pub(crate) fn landing_bytes(slots: usize, slot_len: usize) -> usize {
    slots * stride(slot_len)
}

/// The distance between slots in a window. It is such that kernels may load vectors at the beginning of each.
pub(crate) fn stride(slot_len: usize) -> usize {
    slot_len.next_multiple_of(256)
}
