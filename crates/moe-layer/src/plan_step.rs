//! The properties of a step on which the choice of kernels depends, together with the machine.

/// The shape of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanStep {
    /// The number of rows T, padding included.
    pub rows: usize,
    /// The number of rows at the beginning that decode: row i is the one new row of sequence i. The other rows are rows
    /// of prompts.
    pub decode_rows: usize,
    /// Whether all ranks only decode, as they have agreed.
    pub only_decode: bool,
    /// If a step has rows of both kinds: the number of pairs of a row and a position to which it attends, for decoding
    /// rows and for rows of prompts. 0 means that it is not known.
    pub attention_scores: [usize; 2],
    /// The number of positions that the sequences of the prompts have together; `None` means the number of their rows.
    pub prompt_positions: Option<usize>,
    /// The number of rows whose logits are needed.
    pub logits: usize,
    /// The number of rows that are scored.
    pub scored: usize,
    /// Whether the residual stream of all rows is requested, so that each rank keeps all of it.
    pub whole_residual: bool,
    /// The values inside the layer that an observer requests, if there is one.
    pub observed: Option<&'static str>,
    /// The part of the routing that the step records or forces in host memory, if any.
    pub routed: Option<&'static str>,
}

impl PlanStep {
    /// A step of one new row of each of `rows` sequences.
    pub fn decode(rows: usize) -> Self {
        Self { only_decode: true, ..Self::mixed(rows, 0) }
    }

    /// A step of `rows` rows of prompts.
    pub fn prompts(rows: usize) -> Self {
        Self::mixed(0, rows)
    }

    /// A step of decoding rows, then rows of prompts.
    pub fn mixed(decode_rows: usize, prompt_rows: usize) -> Self {
        let rows = decode_rows + prompt_rows;
        Self {
            rows,
            decode_rows,
            only_decode: false,
            attention_scores: [0; 2],
            prompt_positions: None,
            logits: rows,
            scored: 0,
            whole_residual: false,
            observed: None,
            routed: None,
        }
    }

    /// The values inside the layer that the step records or forces, if any.
    pub fn asks(&self) -> Option<&'static str> {
        self.observed.or(self.routed)
    }

    /// Rows of prompts.
    pub fn prompt_rows(&self) -> usize {
        self.rows.saturating_sub(self.decode_rows)
    }

    /// Whether row i is the one new row of sequence i, as in pure decoding.
    pub fn one_row_each(&self) -> bool {
        self.prompt_rows() == 0
    }
}
