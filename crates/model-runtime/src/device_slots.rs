//! The data about the earlier tokens of sequences that sampling needs, kept on a CUDA device so that it samples without
//! the host. A slot has the number of uses of every token, for the penalties, and edits of single logits.
//!
//! A slot takes 4 V + 8,192 bytes. All slots are allocated at once and do not move, so that captured graphs may use
//! their addresses. The sampling kernel itself counts the tokens that it samples.

use candle_core::{DType, Result};

use moe_kernels::cuda::{MAX_EDITS, PinnedWords, SampleSlots, SlotReset, reset_slots_into};
use moe_kernels::{Buffer, Exec};

/// The slots, and the words that update them. Two page-locked arrays take turns, as in
/// [`DeviceStep`](crate::device_step::DeviceStep).
pub struct DeviceSlots {
    uses: Buffer,
    edits: Buffer,
    words: Buffer,
    pinned: [PinnedWords; 2],
    turn: usize,
}

impl DeviceSlots {
    /// Allocates slots for sequences of up to `max_len` tokens.
    ///
    /// # Errors
    /// A CPU context; a device without room for them.
    pub fn new(slots: usize, vocab_size: usize, max_len: usize, ex: &Exec) -> Result<Self> {
        let longest =
            SlotReset { slot: 0, prompt: &[], output: &[], edits: &[] }.words() + 2 * MAX_EDITS + max_len;
        let words = longest.next_multiple_of(4);
        Ok(Self {
            uses: ex.zeros(DType::U32, &[slots, vocab_size])?,
            edits: ex.zeros(DType::U32, &[slots, MAX_EDITS, 2])?,
            words: ex.zeros(DType::U32, &[words])?,
            pinned: [ex.pinned(words)?, ex.pinned(words)?],
            turn: 0,
        })
    }

    /// Bytes of the slots.
    pub fn bytes(&self) -> usize {
        4 * (self.uses.view().elem_count() + self.edits.view().elem_count())
    }

    /// The slots in the form that kernels take.
    pub fn views(&mut self) -> SampleSlots<'_> {
        SampleSlots { uses: self.uses.view_mut(), edits: self.edits.view_mut() }
    }

    /// Rebuilds slots, all different, after the steps launched before. Each transfer rebuilds as many slots as it has
    /// room for.
    pub fn reset(&mut self, mut resets: &[SlotReset], ex: &Exec) -> Result<()> {
        let room = self.words.view().elem_count();
        while !resets.is_empty() {
            let mut used = 0;
            let fitting = resets.iter().take_while(|reset| {
                used += reset.words();
                used <= room
            });
            // `write` refuses a reset that is too long by itself.
            let (now, later) = resets.split_at(fitting.count().max(1));
            resets = later;
            self.turn = 1 - self.turn;
            let pinned = &mut self.pinned[self.turn];
            let len = SlotReset::write(now, pinned.wait()?)?;
            ex.upload(pinned, self.words.view_mut().narrow(0, len)?)?;
            let slots = SampleSlots { uses: self.uses.view_mut(), edits: self.edits.view_mut() };
            reset_slots_into(self.words.view(), now.len(), slots, ex)?;
        }
        Ok(())
    }
}
