//! The memory in which moved experts arrive on the host. The hosts exchange the bytes.

use std::collections::BTreeMap;

use moe_comm::{Collectives, Communicator};
use moe_experts::ExpertWeights;
use moe_kernels::candle::{Result, bail};
use moe_kernels::{Exec, View, ViewMut, checksum};

use crate::id_tables::Table;
use crate::landing::{Landing, Part};

/// The bytes that have arrived for the slots of a rank.
pub(crate) struct HostLanding {
    rank: usize,
    /// The bytes by slot.
    arrived: BTreeMap<usize, Vec<u8>>,
}

impl HostLanding {
    pub fn new(rank: usize) -> Self {
        Self { rank, arrived: BTreeMap::new() }
    }

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
        let send = send.concat();
        let mut arrived = vec![0u8; receive.iter().sum()];
        let dims = ([send.len()], [arrived.len()]);
        let to = ViewMut::new(&mut arrived, &dims.1)?;
        ep.all_to_all_v(View::new(&send, &dims.0)?, &sizes, to, &receive, ex)?;
        // The bytes of each rank arrive in the order of its parts.
        let mut first = 0;
        let begin = |len: &usize| {
            let at = first;
            first += len;
            at
        };
        let mut next: Vec<usize> = receive.iter().map(begin).collect();
        for part in parts.iter().filter(|part| part.to.rank == self.rank) {
            let at = &mut next[part.from.rank];
            let len = part.range.len();
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
