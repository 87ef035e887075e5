//! The weights of a slot on a device, without the host: shown piece by piece, replaced, and their checksums.

use std::ops::Range;

use candle_core::{DType, Result, bail};
use moe_kernels::{Exec, View, checksum_of_sum, word_sum_into};

use crate::weights::ExpertWeights;

impl ExpertWeights {
    /// Shows the bytes `range` of a slot on a device, in the order that [`slot_bytes`](Self::slot_bytes) has on the CPU: pieces [n]
    /// u8, each with its place among the slot's bytes.
    ///
    /// # Errors
    /// As [`slot_len`](Self::slot_len); weights on the CPU; a slot that there is not; any error of `see`.
    pub fn see_slot(
        &self,
        slot: usize,
        range: Range<usize>,
        mut see: impl FnMut(usize, View<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut first = 0;
        for pack in self.packs()? {
            pack.see_expert(slot, |place, bytes| {
                let own = first + place.start..first + place.end;
                let part = range.start.max(own.start)..range.end.min(own.end);
                match part.is_empty() {
                    true => Ok(()),
                    false => see(part.start, bytes.narrow(part.start - own.start, part.len())?),
                }
            })?;
            first += pack.expert_len()?;
        }
        Ok(())
    }

    /// Puts another expert into a slot on a device, of all clones at once and in the order of the context's stream: `bytes`
    /// \[[`slot_len`](Self::slot_len)\] u8 on that device.
    ///
    /// # Errors
    /// As [`see_slot`](Self::see_slot); another number of bytes, with nothing changed.
    pub fn replace_slot(&self, slot: usize, bytes: View<'_>, ex: &Exec) -> Result<()> {
        let len = self.slot_len()?;
        if bytes.elem_count() != len {
            bail!("expert weights: expected {len} bytes for a slot, got {}", bytes.elem_count())
        }
        let mut first = 0;
        for pack in self.packs()? {
            let len = pack.expert_len()?;
            pack.replace_expert(slot, bytes.narrow(first, len)?, ex)?;
            first += len;
        }
        Ok(())
    }

    /// The checksum of every slot, by the device: each is copied into one piece first.
    pub(crate) fn device_checksums(&self) -> Result<Vec<u64>> {
        let slots = self.shape().num_local_experts;
        let len = self.slot_len()?;
        let ex = Exec::on(self.device())?;
        let mut piece = ex.zeros(DType::U8, &[len])?;
        let mut sums = ex.zeros(DType::I64, &[slots])?;
        for slot in 0..slots {
            self.see_slot(slot, 0..len, |at, bytes| {
                ex.copy(bytes, piece.view_mut().narrow(at, bytes.elem_count())?)
            })?;
            word_sum_into(piece.view(), sums.view_mut().narrow(slot, 1)?, &ex)?;
        }
        let sums = ex.to_host(sums.view())?;
        Ok(sums.view().cpu::<i64>()?.iter().map(|&sum| checksum_of_sum(len, sum)).collect())
    }
}
