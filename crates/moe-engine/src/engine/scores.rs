//! Log-probabilities of prompts. A step scores the rows whose next token is known. The model passes their logits piece
//! by piece.

use std::collections::HashMap;

#[cfg(feature = "cuda")]
use candle_core::DType;
use candle_core::{Result, bail};
#[cfg(feature = "cuda")]
use model_runtime::Buffer;
#[cfg(feature = "cuda")]
use model_runtime::cuda::{LOGPROB_WORDS, MAX_LOGPROBS, PinnedWords, SampleLogprobs, logprobs_into};
#[cfg(feature = "cuda")]
use model_runtime::sampling::device_logprobs;
use model_runtime::sampling::{SamplingError, TokenLogprobs, token_logprobs};
use model_runtime::{Exec, Scorer, View};
use rayon::prelude::*;

use super::plan::{Key, Plan, PromptLogprobs};
use super::sequence::Sequence;

type Score = std::result::Result<TokenLogprobs, SamplingError>;

/// The scored rows of a step.
#[derive(Default)]
pub(super) struct ScoredRows {
    /// The sequences with scored rows, and the number of rows.
    parts: Vec<(Key, usize)>,
    /// For each row: the next token, and the number of top tokens to list.
    rows: Vec<(u32, usize)>,
}

impl ScoredRows {
    /// The scored rows of a plan.
    pub fn of(plan: &Plan, sequences: &HashMap<Key, &Sequence>) -> Self {
        let mut scored = Self::default();
        for (s, part) in plan.parts.iter().enumerate() {
            let tokens = plan.step.scored_tokens(s);
            let listed = sequences.get(&part.key).and_then(|s| s.request.prompt_logprobs).unwrap_or(0);
            if !tokens.is_empty() {
                scored.parts.push((part.key, tokens.len()));
                scored.rows.extend(tokens.iter().map(|&token| (token, listed)));
            }
        }
        scored
    }

    #[cfg(feature = "cuda")]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Fails unless the model has passed all rows.
    fn check_shown(&self, shown: usize) -> Result<()> {
        match self.rows.len() == shown {
            true => Ok(()),
            false => bail!("the model has shown {shown} of {} scored rows", self.rows.len()),
        }
    }

    /// Distributes the scores of all rows to their sequences, with the first error of a sequence's rows if there is
    /// one.
    fn by_part(&self, scores: Vec<Score>) -> PromptLogprobs {
        let mut scores = scores.into_iter();
        let mut own = |rows: usize| scores.by_ref().take(rows).collect::<Vec<_>>();
        self.parts.iter().map(|&(key, rows)| (key, own(rows).into_iter().collect())).collect()
    }
}

/// Scores rows in host memory.
pub(super) struct HostScorer<'a> {
    rows: &'a ScoredRows,
    found: Vec<Score>,
}

impl<'a> HostScorer<'a> {
    pub fn new(rows: &'a ScoredRows) -> Self {
        Self { rows, found: Vec::with_capacity(rows.rows.len()) }
    }

    /// The log-probabilities.
    ///
    /// # Errors
    /// The model has not passed all rows.
    pub fn finish(self) -> Result<PromptLogprobs> {
        self.rows.check_shown(self.found.len())?;
        Ok(self.rows.by_part(self.found))
    }
}

impl Scorer for HostScorer<'_> {
    fn score(&mut self, first: usize, logits: View, ex: &mut Exec) -> Result<()> {
        if first != self.found.len() {
            bail!("the model passes scored row {first} after {} rows", self.found.len())
        }
        let copied = if logits.is_cuda() { Some(ex.to_host(logits)?) } else { None };
        let logits = copied.as_ref().map_or(logits, |copied| copied.view());
        let vocab = logits.dims()[1];
        let rows = &self.rows.rows[first..];
        let logits = logits.cpu::<f32>()?.par_chunks_exact(vocab);
        let found =
            |(logits, &(token, listed)): (&[f32], &(u32, usize))| token_logprobs(logits, token, listed);
        self.found.extend(ex.install(|| logits.zip(rows).map(found).collect::<Vec<_>>()));
        Ok(())
    }
}

/// Scores rows on a CUDA device. The host reads the results with the step's tokens.
#[cfg(feature = "cuda")]
pub(super) struct DeviceScorer {
    /// For each row the next token, then for each row one plus the number of top tokens to list: [2 T] u32.
    asked: Buffer,
    /// Two buffers, which steps use in turn, like the buffers that are read back.
    pinned: [PinnedWords; 2],
    found: Buffer,
    /// Number of rows of the step that the model has passed.
    shown: usize,
    read_back: [PinnedWords; 2],
}

#[cfg(feature = "cuda")]
impl DeviceScorer {
    /// For steps of at most `rows` rows.
    pub fn new(rows: usize, ex: &Exec) -> Result<Self> {
        let words = rows * LOGPROB_WORDS;
        Ok(Self {
            asked: ex.zeros(DType::U32, &[2 * rows])?,
            pinned: [ex.pinned(2 * rows)?, ex.pinned(2 * rows)?],
            found: ex.zeros(DType::U32, &[rows, LOGPROB_WORDS])?,
            shown: 0,
            read_back: [ex.pinned(words)?, ex.pinned(words)?],
        })
    }

    /// Copies the requests of a step's rows, and returns at once. `turn` is the index of the buffer.
    pub fn begin(&mut self, scored: &ScoredRows, turn: usize, ex: &Exec) -> Result<()> {
        let rows = &scored.rows;
        let most = self.found.dims()[0];
        if rows.len() > most {
            bail!("{} rows to score, and there is room for {most}", rows.len())
        }
        self.shown = 0;
        let pinned = &mut self.pinned[turn];
        let (tokens, listed) = pinned.wait()?.split_at_mut(most);
        for ((token, listed), &row) in tokens.iter_mut().zip(listed).zip(rows) {
            (*token, *listed) = (row.0, row.1.min(MAX_LOGPROBS) as u32 + 1);
        }
        ex.upload(pinned, self.asked.view_mut())
    }

    /// Puts the copy of the results after a step, and returns at once.
    pub fn read_back(&mut self, scored: &ScoredRows, turn: usize, ex: &Exec) -> Result<()> {
        scored.check_shown(self.shown)?;
        ex.download(self.found.view().narrow(0, scored.rows.len())?, &mut self.read_back[turn])
    }

    /// The results that [`read_back`](Self::read_back) copied. It waits for the copy. `vocab` is the number of tokens
    /// in the vocabulary.
    pub fn collect(&mut self, scored: &ScoredRows, turn: usize, vocab: usize) -> Result<PromptLogprobs> {
        let words = self.read_back[turn].wait()?.chunks_exact(LOGPROB_WORDS);
        let read = |(words, &(token, listed)): (&[u32], &(u32, usize))| {
            Ok(device_logprobs(SampleLogprobs::read(words, listed.min(vocab))?, token))
        };
        let found: Result<Vec<Score>> = words.zip(&scored.rows).map(read).collect();
        Ok(scored.by_part(found?))
    }
}

#[cfg(feature = "cuda")]
impl Scorer for DeviceScorer {
    fn score(&mut self, first: usize, logits: View, ex: &mut Exec) -> Result<()> {
        let rows = logits.rows();
        let most = self.found.dims()[0];
        let asked = self.asked.view();
        let tokens = asked.narrow(first, rows)?;
        let listed = asked.narrow(most + first, rows)?;
        self.shown += rows;
        let out = self.found.view_mut().narrow(first, rows)?;
        logprobs_into(logits, listed.reshape(&[rows, 1])?, tokens, out, ex)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_fails_fails_its_sequence_alone() {
        let rows = ScoredRows { parts: vec![((0, 0), 2), ((1, 0), 3)], rows: vec![(0, 1); 5] };
        let mut logits = [[0f32, 1.]; 5];
        logits[0][1] = f32::NAN;
        let mut scorer = HostScorer::new(&rows);
        for (first, piece) in [(0, &logits[..2]), (2, &logits[2..])] {
            let view = View::new(piece.as_flattened(), &[piece.len(), 2]).unwrap();
            scorer.score(first, view, &mut Exec::cpu()).unwrap();
        }
        let found = scorer.finish().unwrap();
        assert!(found[&(0, 0)].is_err());
        assert_eq!(found[&(1, 0)].as_ref().unwrap().len(), 3);
    }

    #[test]
    fn a_model_shows_every_row_in_order() {
        let rows = ScoredRows { parts: vec![((0, 0), 2)], rows: vec![(0, 0); 2] };
        let logits = View::new(&[0f32, 1.], &[1, 2]).unwrap();
        let mut scorer = HostScorer::new(&rows);
        assert!(scorer.score(1, logits, &mut Exec::cpu()).is_err());
        scorer.score(0, logits, &mut Exec::cpu()).unwrap();
        let e = scorer.finish().unwrap_err().to_string();
        assert!(e.contains("has shown 1 of 2 scored rows"), "{e}");
    }
}
