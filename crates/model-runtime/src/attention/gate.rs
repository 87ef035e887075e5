//! Query projections that also hold the rows of an output gate: for each head, D rows of q and then D of its gate.

use candle_core::{Result, Tensor};

use super::config::AttentionConfig;

impl AttentionConfig {
    /// Rows of the query projection as it is stored: with an output gate it also has the rows of the gate.
    pub(super) fn stored_query_rows(&self) -> usize {
        let q = self.num_heads * self.head_dim;
        if self.output_gate { 2 * q } else { q }
    }

    /// `tensor` [stored q rows, then the rows of k and v, ..] as q, k, v, and then the rows of the gate.
    pub(super) fn with_gate_last(&self, tensor: Tensor) -> Result<Tensor> {
        if !self.output_gate {
            return Ok(tensor);
        }
        let d = self.head_dim;
        let rows = tensor.dim(0)?;
        let of_heads = |start: usize| (0..self.num_heads).map(move |head| 2 * head * d + start);
        let rest = std::iter::once(self.stored_query_rows()..rows);
        let runs = of_heads(0).map(|start| start..start + d).chain(rest);
        let runs = runs.chain(of_heads(d).map(|start| start..start + d));
        let order: Vec<u32> = runs.flatten().map(|row| row as u32).collect();
        tensor.index_select(&Tensor::new(order, tensor.device())?, 0)
    }
}
