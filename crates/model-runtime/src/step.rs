//! The step: which rows a model executes, as plain data.
//!
//! A step is one forward pass over the new tokens of several sequences: whole prompts, chunks of
//! prompts and single decoded tokens, mixed. Scheduling ends where a step begins: executing it
//! needs nothing else, so that the same step runs eagerly on a CPU or is replayed as a captured
//! graph over device copies of the same arrays.
//!
//! | field | shape | meaning |
//! |---|---|---|
//! | `token_ids` | `[T]` | ids of the new tokens, sequence after sequence |
//! | `positions` | `[T]` | position of each in its sequence |
//! | `slot_mapping` | `[T]` | KV slot of each: `block * block_size + offset`; u32::MAX = write nothing |
//! | `rope_len` | `[T]` | length that the rotary frequencies are for (see [`crate::rope`]) |
//! | `query_start_loc` | [S+1] | rows of sequence s are `query_start_loc[s]..query_start_loc[s+1]` |
//! | `block_tables` | [S, max_blocks] | KV blocks of each sequence, padded with 0 |
//! | `states` | `[S]` | number of each sequence's recurrent state, where layers keep any |
//! | `restores` | | saved states that sequences begin with, copied before the layers run |
//! | `saves` | | states that are saved after the layers have run |
//! | `logits_rows` | `[R]` | the rows whose logits are wanted, ascending |
//! | `logits_start_loc` | [S+1] | logits of sequence s are `logits_start_loc[s]..logits_start_loc[s+1]` |
//! | `scored_rows` | `[P]` | the rows whose next token is known and scored ([`crate::Scorer`]), ascending |
//! | `scored_tokens` | `[P]` | these tokens |
//! | `scored_start_loc` | [S+1] | scored rows of sequence s are `scored_start_loc[s]..scored_start_loc[s+1]` |

mod check;
mod states;
mod views;

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use moe_kernels::View;

use crate::kv_cache::StateCopy;
pub use views::StepViews;

/// Which rows of a sequence need logits.
// This enum is exhaustive: a runner must know which rows need logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsRows {
    /// None: a chunk of a prompt that goes on.
    None,
    /// The last one, to sample the next token.
    Last,
    /// All: teacher forcing.
    All,
}

/// The new tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct SequenceStep<'a> {
    /// Ids of the new tokens; at least one.
    pub token_ids: &'a [u32],
    /// Position of the first: how many tokens of the sequence are in the KV cache.
    pub start: usize,
    /// Length of the prompt.
    pub prompt_len: usize,
    /// KV blocks of the sequence, enough for all tokens including the new ones.
    pub blocks: &'a [u32],
    /// Which rows need logits.
    pub logits: LogitsRows,
    /// The tokens that follow the first rows, if their log-probabilities are wanted: row i predicts `scored[i]`. At
    /// most one for each row.
    pub scored: &'a [u32],
}

/// One forward pass over the new tokens of several sequences, as host data.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    token_ids: Vec<u32>,
    positions: Vec<u32>,
    slot_mapping: Vec<u32>,
    rope_len: Vec<u32>,
    query_start_loc: Vec<u32>,
    block_tables: Vec<u32>,
    max_blocks: usize,
    states: Vec<u32>,
    restores: Vec<StateCopy>,
    saves: Vec<StateCopy>,
    logits_rows: Vec<u32>,
    logits_start_loc: Vec<u32>,
    scored_rows: Vec<u32>,
    scored_tokens: Vec<u32>,
    scored_start_loc: Vec<u32>,
}

impl Step {
    /// Assembles the step of some sequences; each has rows of its own, in the given order, and the state of its first
    /// block's number ([`Self::with_states`] says otherwise).
    pub fn new<'a>(sequences: impl IntoIterator<Item = SequenceStep<'a>>, block_size: usize) -> Result<Self> {
        let sequences: Vec<SequenceStep> = sequences.into_iter().collect();
        let mut step = Self {
            query_start_loc: vec![0],
            logits_start_loc: vec![0],
            scored_start_loc: vec![0],
            ..Self::default()
        };
        step.max_blocks = sequences.iter().map(|s| s.blocks.len()).max().unwrap_or(0);
        for (s, sequence) in sequences.iter().enumerate() {
            if let Err(e) = step.push(sequence, block_size) {
                bail!("step: sequence {s}: {e}")
            }
        }
        Ok(step)
    }

    fn push(&mut self, seq: &SequenceStep, block_size: usize) -> Result<()> {
        check(seq, block_size)?;
        for (i, &id) in seq.token_ids.iter().enumerate() {
            let position = seq.start + i;
            let slot = seq.blocks[position / block_size] as usize * block_size + position % block_size;
            match u32::try_from(slot) {
                Ok(slot) if slot != u32::MAX => self.slot_mapping.push(slot),
                _ => bail!("KV slot {slot} does not fit 32 bits; use fewer KV blocks"),
            }
            self.token_ids.push(id);
            self.positions.push(position as u32);
            self.rope_len.push(seq.prompt_len.max(position + 1) as u32);
        }
        let rows = self.token_ids.len();
        if rows > u32::MAX as usize {
            bail!("{rows} rows do not fit 32 bits")
        }
        self.query_start_loc.push(rows as u32);
        self.block_tables.extend_from_slice(seq.blocks);
        self.block_tables.resize(self.block_tables.len() + self.max_blocks - seq.blocks.len(), 0);
        self.states.push(seq.blocks[0]);
        let first = rows - seq.token_ids.len();
        let wanted = match seq.logits {
            LogitsRows::None => rows,
            LogitsRows::Last => rows - 1,
            LogitsRows::All => first,
        };
        self.logits_rows.extend(wanted as u32..rows as u32);
        self.logits_start_loc.push(self.logits_rows.len() as u32);
        self.scored_rows.extend(first as u32..(first + seq.scored.len()) as u32);
        self.scored_tokens.extend_from_slice(seq.scored);
        self.scored_start_loc.push(self.scored_rows.len() as u32);
        Ok(())
    }

    /// Sets the token of a row, if it was not known when the step was assembled. Nothing happens for a row outside of
    /// the step.
    pub fn set_token(&mut self, row: usize, token_id: u32) {
        if let Some(id) = self.token_ids.get_mut(row) {
            *id = token_id;
        }
    }

    /// Number of rows T.
    pub fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// Number of sequences S.
    pub fn num_sequences(&self) -> usize {
        self.query_start_loc.len().saturating_sub(1)
    }

    /// Number of rows R whose logits are wanted.
    pub fn num_logits(&self) -> usize {
        self.logits_rows.len()
    }

    /// Ids of the new tokens, `[T]`.
    pub fn token_ids(&self) -> &[u32] {
        &self.token_ids
    }

    /// Positions, `[T]`.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// KV slots, `[T]`.
    pub fn slot_mapping(&self) -> &[u32] {
        &self.slot_mapping
    }

    /// Lengths for the rotary frequencies, `[T]`.
    pub fn rope_len(&self) -> &[u32] {
        &self.rope_len
    }

    /// Numbers of the sequences' recurrent states, `[S]`.
    pub fn states(&self) -> &[u32] {
        &self.states
    }

    /// Row ranges of the sequences, [S+1].
    pub fn query_start_loc(&self) -> &[u32] {
        &self.query_start_loc
    }

    /// KV blocks of the sequences, [S, max_blocks].
    pub fn block_tables(&self) -> &[u32] {
        &self.block_tables
    }

    /// Columns of `block_tables`.
    pub fn max_blocks(&self) -> usize {
        self.max_blocks
    }

    /// Whether each sequence has one row, as in pure decoding.
    pub fn one_row_each(&self) -> bool {
        self.num_tokens() == self.num_sequences()
    }

    /// The number of positions that the rows of the sequences after the [decoding](Self::decode_rows) ones see, added
    /// up over these sequences: for each sequence the position of its last row, plus one.
    pub fn prompt_positions(&self) -> usize {
        let sequences = self.query_start_loc.windows(2).skip(self.decode_rows());
        sequences
            .filter(|rows| rows[0] < rows[1])
            .map(|rows| self.positions[rows[1] as usize - 1] as usize + 1)
            .sum()
    }

    /// The numbers of (row, position) pairs that attention computes: for the [decoding](Self::decode_rows) rows, and
    /// for the rows after them. Both are zero if a step has rows of only one kind, whose launches do not depend on
    /// them.
    pub fn attention_scores(&self) -> [usize; 2] {
        let decoding = self.decode_rows();
        if decoding == 0 || decoding == self.num_tokens() {
            return [0; 2];
        }
        let (decode, prompts) = self.positions.split_at(decoding);
        [decode, prompts].map(|rows| rows.iter().map(|&position| position as usize + 1).sum())
    }

    /// The number of rows at the beginning that are the one new row of their sequence: row i of sequence i. A step that
    /// has its decoding sequences first is computed faster on a GPU.
    pub fn decode_rows(&self) -> usize {
        let ends = self.query_start_loc.iter().skip(1);
        ends.zip(1..).take_while(|&(&end, row)| end == row).count()
    }

    /// Rows whose logits are wanted, `[R]`.
    pub fn logits_rows(&self) -> &[u32] {
        &self.logits_rows
    }

    /// Which rows of the logits belong to sequence `s`; empty for an unknown one.
    pub fn logits_range(&self, s: usize) -> std::ops::Range<usize> {
        range(&self.logits_start_loc, s)
    }

    /// Number of rows P that are scored.
    pub fn num_scored(&self) -> usize {
        self.scored_rows.len()
    }

    /// Rows that are scored, `[P]`.
    pub fn scored_rows(&self) -> &[u32] {
        &self.scored_rows
    }

    /// The tokens that follow the scored rows of sequence `s`; none for an unknown sequence.
    pub fn scored_tokens(&self, s: usize) -> &[u32] {
        &self.scored_tokens[range(&self.scored_start_loc, s)]
    }

    /// Fails for a token id that the vocabulary lacks.
    pub fn check_vocab(&self, vocab_size: usize) -> Result<()> {
        for (name, ids) in [("row", &self.token_ids), ("scored row", &self.scored_tokens)] {
            if let Some(at) = ids.iter().position(|&id| id as usize >= vocab_size) {
                bail!("step: {name} {at}: token id {} is outside of the vocabulary of {vocab_size}", ids[at])
            }
        }
        Ok(())
    }

    /// The arrays in host memory.
    pub fn views(&self) -> Result<StepViews<'_>> {
        Ok(StepViews {
            token_ids: vector(&self.token_ids)?,
            positions: vector(&self.positions)?,
            slot_mapping: vector(&self.slot_mapping)?,
            rope_len: vector(&self.rope_len)?,
            query_start_loc: vector(&self.query_start_loc)?,
            block_tables: View::new(&self.block_tables, &[self.num_sequences(), self.max_blocks])?,
            states: vector(&self.states)?,
            logits_rows: vector(&self.logits_rows)?,
            scored_rows: vector(&self.scored_rows)?,
            decode_rows: self.decode_rows(),
            prompt_positions: self.prompt_positions(),
            attention_scores: self.attention_scores(),
        })
    }
}

/// The range of the entries of sequence `s`, from the places where the entries of each sequence begin.
fn range(start_loc: &[u32], s: usize) -> std::ops::Range<usize> {
    match start_loc.get(s..s.saturating_add(2)) {
        Some(&[from, to]) => from as usize..to as usize,
        _ => 0..0,
    }
}

fn vector(data: &[u32]) -> Result<View<'_>> {
    View::new(data, &[data.len()])
}

/// Checks one sequence, so that none of its positions overflows or is outside of its blocks.
fn check(seq: &SequenceStep, block_size: usize) -> Result<()> {
    if seq.token_ids.is_empty() {
        bail!("expected at least one new token")
    }
    if seq.scored.len() > seq.token_ids.len() {
        bail!("{} scored rows of {} new tokens", seq.scored.len(), seq.token_ids.len())
    }
    if seq.prompt_len == 0 {
        bail!("expected a prompt of at least one token")
    }
    let Some(capacity) = seq.blocks.len().checked_mul(block_size) else {
        bail!("{} KV blocks of {block_size} slots overflow", seq.blocks.len())
    };
    match seq.start.checked_add(seq.token_ids.len()) {
        Some(end) if end.max(seq.prompt_len) > u32::MAX as usize => {
            bail!("position {end} or a prompt of {} tokens does not fit 32 bits", seq.prompt_len)
        }
        Some(end) if end <= capacity => Ok(()),
        _ => bail!(
            "{} new tokens from position {} need more KV slots than the {capacity} of its {} blocks",
            seq.token_ids.len(),
            seq.start,
            seq.blocks.len()
        ),
    }
}
