//! Masks over the vocabulary for texts that a grammar or bad words restrict, and their memory on a CUDA device.

use std::borrow::Cow;
use std::collections::HashMap;

use candle_core::Result;
#[cfg(feature = "cuda")]
use candle_core::{DType, bail};
use model_runtime::Exec;
#[cfg(feature = "cuda")]
use model_runtime::cuda::PinnedWords;
#[cfg(feature = "cuda")]
use model_runtime::{Buffer, View};
use rayon::prelude::*;
use tracing::trace_span;

use super::plan::{Key, Part, StepResult};
use super::sequence::Sequence;
use crate::structured::Mask;

/// The tokens that may come next; `None` allows all. The error says why no token is allowed.
pub(super) type MaskResult = std::result::Result<Option<Mask>, String>;

/// A token that a step will sample.
pub(super) struct Next<'a> {
    pub sequence: &'a Sequence,
    /// Its output position.
    pub position: usize,
    /// The tokens that were generated before it.
    pub output: Cow<'a, [u32]>,
}

/// The tokens that the parts of a step will sample, in the order of its rows of logits. `before` has the tokens that
/// are not collected yet.
pub(super) fn next_tokens<'a>(
    parts: &[Part],
    sequences: &HashMap<Key, &'a Sequence>,
    before: Option<&StepResult>,
) -> Result<Vec<Next<'a>>> {
    let sampled = parts.iter().filter_map(|part| Some((*sequences.get(&part.key)?, part.samples?)));
    let next = |(sequence, position): (&'a Sequence, usize)| {
        Ok(Next { sequence, position, output: sequence.output(position, before)? })
    };
    sampled.map(next).collect()
}

/// The mask of each token, computed in parallel; `None` without structured output and bad words.
pub(super) fn masks(tokens: &[Next], ex: &Exec) -> Vec<MaskResult> {
    if tokens.iter().all(|next| !next.sequence.has_mask()) {
        return tokens.iter().map(|_| Ok(None)).collect();
    }
    let _span = trace_span!("mask", rows = tokens.len()).entered();
    ex.install(|| tokens.par_iter().map(|next| next.sequence.mask(&next.output)).collect())
}

/// Masks over a vocabulary of `vocab_size` tokens, one after the other, [R, ceil(V / 32)] u32. A row without a mask
/// allows every token.
#[cfg(feature = "cuda")]
pub(super) fn pack(masks: &[MaskResult], vocab_size: usize, ex: &Exec) -> Vec<u32> {
    let words = vocab_size.div_ceil(u32::BITS as usize).max(1);
    let mut packed = vec![0; masks.len() * words];
    let fill = |(row, mask): (&mut [u32], &MaskResult)| match mask {
        Ok(Some(mask)) => row.iter_mut().zip(mask.words()).for_each(|(word, &bits)| *word = bits),
        _ => row.fill(u32::MAX),
    };
    ex.install(|| packed.par_chunks_exact_mut(words).zip(masks).for_each(fill));
    packed
}

/// The masks of a step's rows on a device.
#[cfg(feature = "cuda")]
pub(super) struct DeviceMasks {
    /// [rows, ceil(V / 32)] u32.
    bits: Buffer,
    /// Words of a mask.
    words: usize,
    /// Two buffers, which steps use in turn.
    pinned: [PinnedWords; 2],
    turn: usize,
}

#[cfg(feature = "cuda")]
impl DeviceMasks {
    /// Makes masks for steps of at most `rows` sampled rows.
    pub fn new(rows: usize, vocab_size: usize, ex: &Exec) -> Result<Self> {
        let words = vocab_size.div_ceil(u32::BITS as usize);
        let pinned = || ex.pinned(rows * words);
        let bits = ex.zeros(DType::U32, &[rows, words])?;
        let pinned = [pinned()?, pinned()?];
        Ok(Self { bits, words, pinned, turn: 0 })
    }

    /// Copies the masks of a step's rows, one after the other, and returns at once.
    pub fn upload(&mut self, masks: &[u32], ex: &Exec) -> Result<()> {
        let rows = masks.len() / self.words.max(1);
        let most = self.bits.dims()[0];
        if rows > most || rows * self.words != masks.len() {
            bail!("masks of {} words, expected {} for each of at most {most} rows", masks.len(), self.words)
        }
        self.turn = 1 - self.turn;
        let pinned = &mut self.pinned[self.turn];
        pinned.wait()?[..masks.len()].copy_from_slice(masks);
        ex.upload(pinned, self.bits.view_mut().narrow(0, rows)?)
    }

    /// The masks of the first `rows` rows.
    pub fn view(&self, rows: usize) -> Result<View<'_>> {
        self.bits.view().narrow(0, rows)
    }
}
