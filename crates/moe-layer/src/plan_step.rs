//! What a step asks of a layer: all that the choice of kernels depends on, apart from the machine.

/// The shape of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanStep {
    /// Rows T, padding included.
    pub rows: usize,
    /// How many rows at the beginning decode: row i is the one new row of sequence i. The others are rows of prompts.
    pub decode_rows: usize,
    /// Whether the ranks agreed that all of them only decode.
    pub only_decode: bool,
    /// (Row, position) pairs that the decoding rows and the rows of prompts see, where a step has both; 0: not known.
    pub attention_scores: [usize; 2],
    /// Positions that the sequences of the prompts see, together; `None`: as many as these have rows.
    pub prompt_positions: Option<usize>,
    /// Rows whose logits are wanted.
    pub logits: usize,
    /// Rows that are scored.
    pub scored: usize,
    /// Whether the residual stream of all rows is asked for, so that each rank keeps all of it.
    pub whole_residual: bool,
    /// What an observer wants to see inside the layer, if there is one.
    pub observed: Option<&'static str>,
    /// What the step records or forces of the routing in host memory, if anything.
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

    /// What the step wants to see or to force inside the layer, if anything.
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
