//! Where experts arrive before they come to their slots, and how they get there: over the hosts, or from GPU to GPU.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use moe_comm::{Collectives, Communicator, Window};
use moe_experts::ExpertWeights;
use moe_kernels::candle::{Result, bail};
use moe_kernels::{Exec, View, ViewMut, checksum};

#[cfg(feature = "cuda")]
use crate::device_landing::DeviceLanding;
use crate::placed::Table;

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

/// The landing of the weights of a rank.
///
/// # Errors
/// Weights on a device without a window, or with one that is too small.
pub(crate) fn landing(
    rank: usize,
    slot_len: usize,
    weights: &ExpertWeights,
    window: Option<&Arc<dyn Window>>,
) -> Result<Box<dyn Landing>> {
    if weights.device().is_cpu() {
        return Ok(Box::new(HostLanding { rank, arrived: BTreeMap::new() }));
    }
    let needed = landing_bytes(weights.shape().num_local_experts, slot_len);
    let Some(window) = window.filter(|window| window.bytes() >= needed) else {
        let got = window.map_or("none".to_string(), |window| format!("{window:?}"));
        bail!("experts that move between GPUs: expected a window of at least {needed} bytes, got {got}")
    };
    device_landing(rank, slot_len, weights, window)
}

#[cfg(feature = "cuda")]
fn device_landing(
    rank: usize,
    slot_len: usize,
    weights: &ExpertWeights,
    window: &Arc<dyn Window>,
) -> Result<Box<dyn Landing>> {
    Ok(Box::new(DeviceLanding::new(rank, slot_len, weights, window.clone())?))
}

#[cfg(not(feature = "cuda"))]
fn device_landing(
    rank: usize,
    _: usize,
    _: &ExpertWeights,
    window: &Arc<dyn Window>,
) -> Result<Box<dyn Landing>> {
    bail!("experts that move to rank {rank} through {window:?}: this program has no CUDA")
}

/// Bytes of a window in which the experts of so many slots arrive.
pub(crate) fn landing_bytes(slots: usize, slot_len: usize) -> usize {
    slots * stride(slot_len)
}

/// From slot to slot in a window: each begins where kernels may load vectors.
pub(crate) fn stride(slot_len: usize) -> usize {
    slot_len.next_multiple_of(256)
}

/// In host memory, by exchanges of the hosts.
struct HostLanding {
    rank: usize,
    /// By slot.
    arrived: BTreeMap<usize, Vec<u8>>,
}

impl HostLanding {
    fn of(&self, slot: usize) -> Result<&[u8]> {
        match self.arrived.get(&slot) {
            Some(bytes) => Ok(bytes),
            None => bail!("nothing has arrived for slot {slot} of rank {}", self.rank),
        }
    }
}

impl Landing for HostLanding {
    fn begin(&mut self, _: &dyn Communicator, _: &mut Exec) -> Result<()> {
        Ok(())
    }

    fn travel(
        &mut self,
        parts: &[Part],
        weights: &ExpertWeights,
        ep: &dyn Communicator,
        ex: &mut Exec,
    ) -> Result<()> {
        let mut send = vec![Vec::new(); ep.world_size()];
        for part in parts.iter().filter(|part| part.from.rank == self.rank) {
            let own = weights.slot_bytes(part.from.slot)?;
            send[part.to.rank].extend_from_slice(&own[part.range.clone()]);
        }
        let mut receive = vec![0; ep.world_size()];
        for part in parts.iter().filter(|part| part.to.rank == self.rank) {
            receive[part.from.rank] += part.range.len();
        }
        let sizes: Vec<usize> = send.iter().map(Vec::len).collect();
        let (send, mut arrived) = (send.concat(), vec![0u8; receive.iter().sum()]);
        let dims = ([send.len()], [arrived.len()]);
        let to = ViewMut::new(&mut arrived, &dims.1)?;
        ep.all_to_all_v(View::new(&send, &dims.0)?, &sizes, to, &receive, ex)?;
        // What a rank has sent comes in the order of the parts.
        let mut first = 0;
        let begin = |len: &usize| {
            let at = first;
            first += len;
            at
        };
        let mut next: Vec<usize> = receive.iter().map(begin).collect();
        for part in parts.iter().filter(|part| part.to.rank == self.rank) {
            let (at, len) = (&mut next[part.from.rank], part.range.len());
            let slot = self.arrived.entry(part.to.slot).or_default();
            slot.truncate(part.range.start);
            slot.extend_from_slice(&arrived[*at..*at + len]);
            *at += len;
        }
        Ok(())
    }

    fn is_behind(&self) -> bool {
        false
    }

    fn arrive(
        &mut self,
        local: &[(usize, usize)],
        weights: &ExpertWeights,
        _: &dyn Communicator,
        _: &mut Exec,
    ) -> Result<()> {
        for &(from, to) in local {
            self.arrived.insert(to, weights.slot_bytes(from)?);
        }
        Ok(())
    }

    fn checksums(&self, slots: &[usize]) -> Result<Vec<u64>> {
        slots.iter().map(|&slot| Ok(checksum(self.of(slot)?))).collect()
    }

    fn replace_table(&self, ids: View<'_>, table: &mut Table) -> Result<()> {
        table.ids.view_mut().copy_from(ids)
    }

    fn install(&self, slots: &[usize], weights: &ExpertWeights) -> Result<()> {
        slots.iter().try_for_each(|&slot| weights.write_slot(slot, self.of(slot)?))
    }
}
