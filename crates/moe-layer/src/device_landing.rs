//! The memory in which moved experts arrive on a GPU: a window over the memory of all ranks' GPUs. The expert of slot s
//! arrives at byte s x stride.

use std::sync::Arc;

use moe_comm::{Collectives, Communicator, Transfer, Window};
use moe_experts::ExpertWeights;
use moe_kernels::candle::{DType, Result, bail};
use moe_kernels::{Exec, View, checksum_of_sum, word_sum_into};

use crate::id_tables::Table;
use crate::landing::{Landing, Part, stride};

/// The window copies parts without the hosts, and if it can, while steps run. The hosts then enter a barrier, each
/// after its own copies have ended. After the barrier every rank may read what has arrived. The slots are written in
/// the order of the steps' stream, so a running step keeps the weights with which it began.
pub(crate) struct DeviceLanding {
    rank: usize,
    slot_len: usize,
    window: Arc<dyn Window>,
    /// The stream on which steps run.
    main: Exec,
}

impl DeviceLanding {
    /// Makes the landing of a rank whose window is large enough.
    pub fn new(
        rank: usize,
        slot_len: usize,
        weights: &ExpertWeights,
        window: Arc<dyn Window>,
    ) -> Result<Self> {
        Ok(Self { rank, slot_len, window, main: Exec::on(weights.device())? })
    }

    fn of(&self, slot: usize) -> Result<View<'_>> {
        self.window.own(slot * stride(self.slot_len), self.slot_len)
    }
}

impl Landing for DeviceLanding {
    fn begin(&mut self, ep: &dyn Communicator, ex: &mut Exec) -> Result<()> {
        // The slots contain everything that an earlier move has written, and its copies no longer use the window.
        self.window.wait_unused()?;
        ep.barrier(ex)
    }

    fn travel(
        &mut self,
        parts: &[Part],
        weights: &ExpertWeights,
        _: &dyn Communicator,
        _: &mut Exec,
    ) -> Result<()> {
        let transfer = |part: &Part| Transfer {
            from: part.from.rank,
            to: part.to.rank,
            at: part.to.slot * stride(self.slot_len) + part.range.start,
            len: part.range.len(),
        };
        let transfers: Vec<Transfer> = parts.iter().map(transfer).collect();
        self.window.carry(&transfers, &|number, range, show| {
            let part: &Part = &parts[number];
            let first = part.range.start;
            let range = first + range.start..first + range.end;
            weights.see_slot(part.from.slot, range, |at, bytes| show(at - first, bytes))
        })
    }

    fn is_behind(&self) -> bool {
        true
    }

    fn arrive(
        &mut self,
        local: &[(usize, usize)],
        weights: &ExpertWeights,
        ep: &dyn Communicator,
        ex: &mut Exec,
    ) -> Result<()> {
        for &(from, slot) in local {
            let first = slot * stride(self.slot_len);
            weights.see_slot(from, 0..self.slot_len, |at, bytes| {
                self.window.put(bytes, self.rank, first + at)
            })?;
        }
        self.window.context().synchronize()?;
        ep.barrier(ex)
    }

    fn checksums(&self, slots: &[usize]) -> Result<Vec<u64>> {
        if slots.is_empty() {
            return Ok(Vec::new());
        }
        let ex = self.window.context();
        let mut sums = ex.scratch(DType::I64, &[slots.len()])?;
        for (i, &slot) in slots.iter().enumerate() {
            word_sum_into(self.of(slot)?, sums.view_mut().narrow(i, 1)?, ex)?;
        }
        let sums = ex.to_host(sums.view())?;
        Ok(sums.view().cpu::<i64>()?.iter().map(|&sum| checksum_of_sum(self.slot_len, sum)).collect())
    }

    fn replace_table(&self, ids: View<'_>, table: &mut Table) -> Result<()> {
        let Some(staged) = &mut table.staged else {
            bail!("a table on a device without a copy for its next ids")
        };
        // This waits only for this small copy, not for the step that is running.
        self.window.context().copy_from_host(ids, staged.view_mut())?;
        self.main.copy(staged.view(), table.ids.view_mut())
    }

    fn install(&self, slots: &[usize], weights: &ExpertWeights) -> Result<()> {
        slots.iter().try_for_each(|&slot| weights.replace_slot(slot, self.of(slot)?, &self.main))?;
        self.window.used_by(&self.main)
    }
}
