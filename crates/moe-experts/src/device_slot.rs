//! Access to the weights of a slot on a device without copying them to the host: reading them in pieces, replacing
//! them, and computing their checksums.

use std::ops::Range;

use candle_core::{DType, Result, bail};
use moe_kernels::{Exec, View, checksum_of_sum, word_sum_into};

use crate::weights::ExpertWeights;

impl ExpertWeights {
    /// Passes the bytes `range` of a slot on a device to `see`, in the order of [`slot_bytes`](Self::slot_bytes). They
    /// arrive as pieces \[n\] u8, each with its place among the slot's bytes.
    ///
    /// # Errors
    /// The errors of [`slot_len`](Self::slot_len); weights on the CPU; a slot that does not exist; any error of `see`.
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

    /// Replaces the expert in a slot on a device, for all clones, in the order of the context's stream. `bytes` is
    /// \[[`slot_len`](Self::slot_len)\] u8 on that device.
    ///
    /// # Errors
    /// The errors of [`see_slot`](Self::see_slot); another number of bytes. Nothing is changed then.
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

    /// The device computes the checksum of every slot. Each slot is first copied into one contiguous array.
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
