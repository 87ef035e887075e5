//! The landing of experts on a GPU: a window over the memory of all ranks' GPUs, in which the expert of slot s arrives at byte
//! s x stride.

use std::ops::Range;
use std::sync::Arc;

use moe_comm::{Communicator, Window};
use moe_experts::ExpertWeights;
use moe_kernels::candle::{DType, Result, bail};
use moe_kernels::{Exec, View, checksum_of_sum, word_sum_into};

use crate::landing::{Landing, Part, Place, stride};
use crate::placed::Table;

/// Ranks put their parts on the window's stream, beside the steps, and settle by words of the hosts: a rank that has waited for its
/// copies says so in a barrier, and who has passed that reads what came. Slots are written by the stream of the steps, so a step that
/// is on its way computes with what it began with.
pub(crate) struct DeviceLanding {
    rank: usize,
    slot_len: usize,
    window: Arc<dyn Window>,
    /// The stream of the steps.
    main: Exec,
}

impl DeviceLanding {
    /// Of a rank whose window is large enough.
    pub fn new(
        rank: usize,
        slot_len: usize,
        weights: &ExpertWeights,
        window: Arc<dyn Window>,
    ) -> Result<Self> {
        Ok(Self { rank, slot_len, window, main: Exec::on(weights.device())? })
    }

    fn put(&self, from: usize, range: Range<usize>, to: Place, weights: &ExpertWeights) -> Result<()> {
        let first = to.slot * stride(self.slot_len);
        weights.see_slot(from, range, |at, bytes| self.window.put(bytes, to.rank, first + at))
    }

    fn of(&self, slot: usize) -> Result<View<'_>> {
        self.window.own(slot * stride(self.slot_len), self.slot_len)
    }
}

impl Landing for DeviceLanding {
    fn begin(&mut self, ep: &dyn Communicator, ex: &mut Exec) -> Result<()> {
        // What an earlier move has written is in the slots, and its copies are out of the window.
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
        let mut own = parts.iter().filter(|part| part.from.rank == self.rank);
        own.try_for_each(|part| self.put(part.from.slot, part.range.clone(), part.to, weights))
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
            self.put(from, 0..self.slot_len, Place { rank: self.rank, slot }, weights)?;
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
        // Waits for this small copy alone, not for the step that runs.
        self.window.context().copy_from_host(ids, staged.view_mut())?;
        self.main.copy(staged.view(), table.ids.view_mut())
    }

    fn install(&self, slots: &[usize], weights: &ExpertWeights) -> Result<()> {
        slots.iter().try_for_each(|&slot| weights.replace_slot(slot, self.of(slot)?, &self.main))?;
        self.window.used_by(&self.main)
    }
}
