//! Query projections that also hold the rows of an output gate: for each head, D rows of q and then D of its gate.

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::config::AttentionConfig;

impl AttentionConfig {
    /// Rows of the query projection as it is stored: with an output gate it also has the rows of the gate.
    pub(super) fn stored_query_rows(&self) -> usize {
        let q = self.num_heads * self.head_dim;
        if self.output_gate { 2 * q } else { q }
    }

    /// `tensor` [stored q rows, then the rows of k and v, ..] as q, k and v, and the rows of the gate.
    pub(super) fn without_gate(&self, tensor: Tensor) -> Result<(Tensor, Option<Tensor>)> {
        if !self.output_gate {
            return Ok((tensor, None));
        }
        let d = self.head_dim;
        let rows = tensor.dim(0)?;
        let of_heads = |start: usize| (0..self.num_heads).map(move |head| 2 * head * d + start);
        let select = |runs: Vec<Range<usize>>| {
            let rows: Vec<u32> = runs.into_iter().flatten().map(|row| row as u32).collect();
            tensor.index_select(&Tensor::new(rows, tensor.device())?, 0)
        };
        let rest = std::iter::once(self.stored_query_rows()..rows);
        let qkv = select(of_heads(0).map(|start| start..start + d).chain(rest).collect())?;
        let gate = select(of_heads(d).map(|start| start..start + d).collect())?;
        Ok((qkv, Some(gate)))
    }
}
