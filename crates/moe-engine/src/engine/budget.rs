//! How many rows a step may have, and how many of them may be rows of prompts.

/// The limit for rows of prompts in a step that also decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MixedLimit {
    /// The limit applies from this number of decoding rows on.
    pub decode_rows: usize,
    pub prompt_rows: usize,
}

/// With this many decoding rows, most of a step on a GPU is spent on reading memory.
const MANY: usize = 128;
/// Rows of prompts per step for each sequence that may run. Sequences that live for hundreds of steps need two or three
/// to have successors in time. With more, experts are limited by the tensor cores instead of by reading their weights
/// (docs/engine.md).
const PROMPT_ROWS: usize = 4;

impl MixedLimit {
    pub const NONE: Self = Self { decode_rows: usize::MAX, prompt_rows: usize::MAX };

    /// The limit for a GPU on which `max_num_seqs` sequences may run.
    pub fn gpu(max_num_seqs: usize) -> Self {
        let prompt_rows = max_num_seqs.saturating_mul(PROMPT_ROWS);
        Self { decode_rows: MANY.max(max_num_seqs / 2), prompt_rows }
    }
}

/// The number of rows that a step may still get.
pub(super) struct Budget {
    pub rows: usize,
    /// The number of rows that prompts may still get.
    pub prompts: usize,
}

impl Budget {
    /// Rows for a sequence with `remaining` tokens to compute; a sequence with one such token decodes.
    pub fn rows(&self, remaining: usize) -> usize {
        let rows = remaining.min(self.rows);
        if remaining > 1 { rows.min(self.prompts) } else { rows }
    }

    pub fn spend(&mut self, remaining: usize, rows: usize) {
        self.rows -= rows;
        if remaining > 1 {
            self.prompts -= rows;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_takes_few_prompts_next_to_many_decoding_rows() {
        assert_eq!(MixedLimit::gpu(256), MixedLimit { decode_rows: 128, prompt_rows: 1024 });
        assert_eq!(MixedLimit::gpu(512), MixedLimit { decode_rows: 256, prompt_rows: 2048 });
        assert_eq!(MixedLimit::gpu(64).decode_rows, 128);
    }

    #[test]
    fn rows_of_prompts_have_a_limit_of_their_own() {
        let mut budget = Budget { rows: 10, prompts: 5 };
        for (remaining, rows) in [(1, 1), (3, 3), (4, 2), (9, 0), (1, 1), (0, 0)] {
            assert_eq!(budget.rows(remaining), rows, "{remaining}");
            budget.spend(remaining, rows);
        }
        assert_eq!((budget.rows, budget.prompts), (3, 0));
    }
}
