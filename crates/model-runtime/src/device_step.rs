//! A step's arrays on a CUDA device: one block of words, copied with one launch.
//!
//! ```text
//! valid_rows, number of the step | token_ids | positions | slot_mapping | rope_len | token_source | query_start_loc
//!            | block_tables | states | logits_rows | scored_rows | sampling parameters
//! ```
//!
//! Each array begins at a multiple of four words. Its place depends on the [`Shape`] alone, so that a captured graph of
//! a shape serves every step that is padded to it.

use candle_core::{DType, Result, bail};

use moe_kernels::cuda::{LastStep, PinnedWords, SAMPLE_WORDS, SampleParams, StepTokens, upload_step_into};
use moe_kernels::{Buffer, Exec, View};

use crate::step::{Step, StepViews};
use crate::step_ranks::DeviceSampling;

// `step_ranks` checks parameters without a device, so it has its own constant.
const _: () = assert!(SAMPLE_WORDS == crate::step_ranks::PARAM_WORDS);

/// Sizes of a step's arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows T.
    pub rows: usize,
    /// Sequences S.
    pub sequences: usize,
    /// Columns of the block tables.
    pub max_blocks: usize,
    /// Rows R whose logits are wanted.
    pub logits: usize,
    /// Rows P that are scored.
    pub scored: usize,
    /// Rows at the beginning that decode ([`Step::decode_rows`]).
    pub decode_rows: usize,
    /// Positions that the sequences of the other rows see ([`Step::prompt_positions`]).
    pub prompt_positions: usize,
    /// See [`Step::attention_scores`].
    pub attention_scores: [usize; 2],
}

impl DeviceSampling {
    /// Sampling with a row of parameters for each wanted row of logits.
    pub fn new(token_source: Vec<u32>, rows: &[SampleParams]) -> Self {
        Self { token_source, params: rows.iter().flat_map(SampleParams::words).collect(), masked: false }
    }

    /// The parameters, row by row.
    pub fn rows(&self) -> impl Iterator<Item = SampleParams> {
        self.params.as_chunks::<SAMPLE_WORDS>().0.iter().map(|words| SampleParams::from_words(*words))
    }
}

/// The arrays in device memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceViews<'a> {
    /// What the model reads.
    pub step: StepViews<'a>,
    /// Number of rows that are not padding, [1] u32.
    pub valid_rows: View<'a>,
    /// Number of the step, modulo 2^32, [1] u32.
    pub number: View<'a>,
    /// [`DeviceSampling::params`], [R, 16] u32.
    pub sampling: View<'a>,
}

/// Number of arrays.
const ARRAYS: usize = 12;
/// The numbers of the arrays, in the order above.
const HEAD: usize = 0;
const TOKEN_IDS: usize = 1;
const POSITIONS: usize = 2;
const SLOT_MAPPING: usize = 3;
const ROPE_LEN: usize = 4;
const TOKEN_SOURCE: usize = 5;
const QUERY_START_LOC: usize = 6;
const BLOCK_TABLES: usize = 7;
const STATES: usize = 8;
const LOGITS_ROWS: usize = 9;
const SCORED_ROWS: usize = 10;
const SAMPLING: usize = 11;

impl Shape {
    /// The shape of a step without padding.
    pub fn of(step: &Step) -> Self {
        Self {
            rows: step.num_tokens(),
            sequences: step.num_sequences(),
            max_blocks: step.max_blocks(),
            logits: step.num_logits(),
            scored: step.num_scored(),
            decode_rows: step.decode_rows(),
            prompt_positions: step.prompt_positions(),
            attention_scores: step.attention_scores(),
        }
    }

    /// The shape of a decode step of this number of sequences.
    pub fn decode(sequences: usize, max_blocks: usize) -> Self {
        Self {
            rows: sequences,
            sequences,
            max_blocks,
            logits: sequences,
            scored: 0,
            decode_rows: sequences,
            prompt_positions: 0,
            attention_scores: [0; 2],
        }
    }

    fn lengths(&self) -> [usize; ARRAYS] {
        let Self { rows, sequences, max_blocks, logits, scored, .. } = *self;
        let tables = sequences * max_blocks;
        let sampling = logits * SAMPLE_WORDS;
        [2, rows, rows, rows, rows, rows, sequences + 1, tables, sequences, logits, scored, sampling]
    }

    /// The first word of each array.
    fn starts(&self) -> [usize; ARRAYS] {
        let mut end = 0;
        self.lengths().map(|len| {
            let start = end;
            end += len.next_multiple_of(4);
            start
        })
    }

    /// Where the arrays of the rows' tokens begin.
    fn tokens(&self) -> StepTokens {
        let starts = self.starts();
        StepTokens { ids: starts[TOKEN_IDS], source: starts[TOKEN_SOURCE], rows: self.rows }
    }

    /// Words of all arrays.
    pub fn words(&self) -> usize {
        self.lengths().iter().map(|len| len.next_multiple_of(4)).sum()
    }
}

/// The words of a step on the device, and page-locked words to fill them from. Two page-locked arrays take turns, so
/// that a step may be prepared while the arrays of the step before are being copied.
pub struct DeviceStep {
    words: Buffer,
    pinned: [PinnedWords; 2],
    turn: usize,
}

impl DeviceStep {
    /// Allocates room for steps of up to this number of words.
    pub fn new(words: usize, ex: &Exec) -> Result<Self> {
        let pinned = [ex.pinned(words)?, ex.pinned(words)?];
        Ok(Self { words: ex.zeros(DType::U32, &[words])?, pinned, turn: 0 })
    }

    /// Copies a step without padding and without tokens to sample. `number` is the step's number.
    pub fn upload(&mut self, step: &Step, number: u64, ex: &Exec) -> Result<DeviceViews<'_>> {
        let sampled = ex.scratch(DType::U32, &[0])?;
        let last = LastStep { sampled: sampled.view(), read_back: None };
        self.upload_padded(step, number, &DeviceSampling::default(), (Shape::of(step), last), ex)
    }

    /// Copies a step, padded to a shape: padding rows have token 0 at position 0, write nothing and sample nothing. A
    /// row whose token was sampled by the step before takes it from the results of that step. The same launch reads
    /// these results back to the host.
    pub fn upload_padded(
        &mut self,
        step: &Step,
        number: u64,
        sampling: &DeviceSampling,
        (shape, last): (Shape, LastStep<'_>),
        ex: &Exec,
    ) -> Result<DeviceViews<'_>> {
        let own = Shape::of(step);
        let fits = own.rows <= shape.rows
            && own.sequences <= shape.sequences
            && own.max_blocks <= shape.max_blocks
            && own.logits <= shape.logits
            && own.scored <= shape.scored;
        if !fits || shape.words() > self.words.view().elem_count() {
            bail!(
                "device step: {own:?} does not fit {shape:?} of at most {} words",
                self.words.view().elem_count()
            )
        }
        self.turn = 1 - self.turn;
        let pinned = &mut self.pinned[self.turn];
        fill(pinned.wait()?, (step, number), sampling, shape);
        let to = self.words.view_mut().narrow(0, shape.words())?;
        upload_step_into(pinned, last, shape.tokens(), to, ex)?;
        self.views(shape)
    }

    /// The arrays of a shape.
    pub fn views(&self, shape: Shape) -> Result<DeviceViews<'_>> {
        let words = self.words.view();
        let starts = shape.starts();
        let lengths = shape.lengths();
        let array = |index: usize, dims: &[usize]| words.narrow(starts[index], lengths[index])?.reshape(dims);
        let Shape { rows, sequences, max_blocks, logits, scored, .. } = shape;
        let Shape { decode_rows, prompt_positions, attention_scores, .. } = shape;
        let head = array(HEAD, &[2])?;
        let valid_rows = head.narrow(0, 1)?;
        let number = head.narrow(1, 1)?;
        let sampling = array(SAMPLING, &[logits, SAMPLE_WORDS])?;
        let step = StepViews {
            token_ids: array(TOKEN_IDS, &[rows])?,
            positions: array(POSITIONS, &[rows])?,
            slot_mapping: array(SLOT_MAPPING, &[rows])?,
            rope_len: array(ROPE_LEN, &[rows])?,
            query_start_loc: array(QUERY_START_LOC, &[sequences + 1])?,
            block_tables: array(BLOCK_TABLES, &[sequences, max_blocks])?,
            states: array(STATES, &[sequences])?,
            logits_rows: array(LOGITS_ROWS, &[logits])?,
            scored_rows: array(SCORED_ROWS, &[scored])?,
            decode_rows,
            prompt_positions,
            attention_scores,
        };
        Ok(DeviceViews { step, valid_rows, number, sampling })
    }
}

/// Writes the arrays one after the other, each padded.
fn fill(words: &mut [u32], (step, number): (&Step, u64), sampling: &DeviceSampling, shape: Shape) {
    let lengths = shape.lengths();
    let mut rest = words;
    let mut put = |index: usize, padding: u32, data: &mut dyn Iterator<Item = u32>| {
        let (array, after) = std::mem::take(&mut rest).split_at_mut(lengths[index].next_multiple_of(4));
        rest = after;
        for word in array {
            *word = data.next().unwrap_or(padding);
        }
    };
    let rows = step.num_tokens() as u32;
    put(HEAD, 0, &mut [rows, number as u32].into_iter());
    put(TOKEN_IDS, 0, &mut step.token_ids().iter().copied());
    put(POSITIONS, 0, &mut step.positions().iter().copied());
    put(SLOT_MAPPING, u32::MAX, &mut step.slot_mapping().iter().copied());
    put(ROPE_LEN, 1, &mut step.rope_len().iter().copied());
    put(TOKEN_SOURCE, u32::MAX, &mut sampling.token_source.iter().copied());
    put(QUERY_START_LOC, rows, &mut step.query_start_loc().iter().copied());
    let gap = shape.max_blocks - step.max_blocks();
    let tables = step.block_tables().chunks(step.max_blocks().max(1));
    put(BLOCK_TABLES, 0, &mut tables.flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(0, gap))));
    // A sequence of padding has no rows, so it has no state either.
    put(STATES, u32::MAX, &mut step.states().iter().copied());
    put(LOGITS_ROWS, 0, &mut step.logits_rows().iter().copied());
    put(SCORED_ROWS, 0, &mut step.scored_rows().iter().copied());
    let padding = std::iter::repeat(SampleParams::PADDING.words()).flatten();
    put(SAMPLING, 0, &mut sampling.params.iter().copied().chain(padding));
}
