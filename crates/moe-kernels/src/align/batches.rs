//! Which slots the rows of a batched buffer belong to.

use candle_core::{DType, Result, bail};

use crate::arguments::{expect, expect_dims, expect_dtype};
use crate::view::View;

/// Which slots the rows of a batched buffer belong to: the outputs of
/// [`group_slots_into`](super::group_slots_into).
#[derive(Clone, Copy, Debug)]
pub struct RowBatches<'a> {
    /// [E_local + 1] u32: the range of `slots` of each local expert.
    pub offsets: View<'a>,
    /// \[T*K\] u32 slot numbers t*K + k, grouped by local expert.
    pub slots: View<'a>,
    /// Slots per token K.
    pub top_k: usize,
}

impl<'a> RowBatches<'a> {
    /// Checks dims and dtypes for T tokens and E_local experts.
    pub(super) fn check(&self, op: &str, tokens: usize, num_local: usize) -> Result<()> {
        expect(op, "offsets", &self.offsets, DType::U32, &[num_local + 1])?;
        expect_dtype(op, "slots", &self.slots, DType::U32)?;
        match tokens.checked_mul(self.top_k) {
            Some(len) => expect_dims(op, "slots", &self.slots, &[len]),
            None => bail!("{op}: {tokens} tokens of {} slots overflow", self.top_k),
        }
    }

    /// The slots of each expert, checked against a buffer of E_local experts with `max_tokens`
    /// rows each.
    pub(super) fn groups(&self, op: &str, num_local: usize, max_tokens: usize) -> Result<Vec<&'a [u32]>> {
        let offsets = self.offsets.cpu::<u32>()?;
        let slots = self.slots.cpu::<u32>()?;
        let mut groups = Vec::with_capacity(num_local);
        for (e, range) in offsets.windows(2).enumerate() {
            let Some(group) = slots.get(range[0] as usize..range[1] as usize) else {
                bail!("{op}: offsets {}..{} leave the {} slots", range[0], range[1], slots.len())
            };
            if group.len() > max_tokens {
                bail!(
                    "{op}: local expert {e} got {} rows, expected at most max_num_tokens = {max_tokens}; \
                     raise max_num_tokens or split the tokens into chunks",
                    group.len()
                )
            }
            if let Some(slot) = group.iter().find(|&&slot| slot as usize >= slots.len()) {
                bail!("{op}: slot {slot} is out of range; expected 0..{}", slots.len())
            }
            groups.push(group);
        }
        Ok(groups)
    }
}
