//! The arrays of a step, wherever they are.

use moe_kernels::{StepContext, View};
use moe_layer::PlanStep;

/// The arrays that executing a step reads, in host or device memory. All are u32; shapes as in
/// the module's table.
#[derive(Clone, Copy, Debug)]
pub struct StepViews<'a> {
    /// Token ids, `[T]`.
    pub token_ids: View<'a>,
    /// Positions, `[T]`.
    pub positions: View<'a>,
    /// KV slots, `[T]`.
    pub slot_mapping: View<'a>,
    /// Lengths for the rotary frequencies, `[T]`.
    pub rope_len: View<'a>,
    /// Row ranges of the sequences, [S+1].
    pub query_start_loc: View<'a>,
    /// KV blocks of the sequences, [S, max_blocks].
    pub block_tables: View<'a>,
    /// Numbers of the sequences' recurrent states, `[S]`.
    pub states: View<'a>,
    /// Rows whose logits are wanted, `[R]`.
    pub logits_rows: View<'a>,
    /// Rows that are scored, `[P]`.
    pub scored_rows: View<'a>,
    /// How many rows at the beginning decode: row i is the one new row of sequence i.
    pub decode_rows: usize,
    /// Positions that the sequences of the rows after the decoding rows see, see
    /// [`Step::prompt_positions`](crate::Step::prompt_positions).
    pub prompt_positions: usize,
    /// See [`Step::attention_scores`](crate::Step::attention_scores).
    pub attention_scores: [usize; 2],
}

impl StepViews<'_> {
    /// Number of rows T.
    pub fn num_tokens(&self) -> usize {
        self.token_ids.elem_count()
    }

    /// Number of rows R whose logits are wanted.
    pub fn num_logits(&self) -> usize {
        self.logits_rows.elem_count()
    }

    /// Number of rows P that are scored.
    pub fn num_scored(&self) -> usize {
        self.scored_rows.elem_count()
    }

    /// Whether row i is the one new row of sequence i, as in pure decoding.
    pub fn one_row_each(&self) -> bool {
        self.decode_rows == self.num_tokens()
    }

    /// The facts about the step on which the choice of kernels depends. `observed` is what an observer asks for.
    pub fn plan_step(&self, observed: Option<&'static str>, context: &StepContext) -> PlanStep {
        PlanStep {
            rows: self.num_tokens(),
            decode_rows: self.decode_rows,
            only_decode: context.only_decode,
            attention_scores: self.attention_scores,
            prompt_positions: Some(self.prompt_positions),
            logits: self.num_logits(),
            scored: self.num_scored(),
            whole_residual: context.whole_residual,
            observed,
            routed: context.asks_of_router(),
        }
    }
}
