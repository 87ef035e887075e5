//! Heads of which only the first dimensions are rotated, or whose rotated pairs are neighbours.
//!
//! Kernels rotate dimension i of a head with i + D/2, for all i < D/2. A model that rotates R < D dimensions pairs i
//! with i + R/2, and some models pair 2i with 2i + 1 ([`RotatedPairs`]). The rows of q and of k are therefore put in
//! another order when they are loaded: one in which the two dimensions of a pair are D/2 apart. A pair that is not
//! rotated has a cosine of 1 and a sine of 0 ([`Rope`](crate::Rope)), so none of its bits changes. Both sides of a
//! score are in the same order, and values keep theirs.

use candle_core::{Result, Tensor};

use super::config::{AttentionConfig, QkNorm, RotatedPairs};

impl AttentionConfig {
    /// Heads of q and of k.
    pub(super) fn query_key_heads(&self) -> usize {
        self.num_heads + self.num_kv_heads
    }

    /// Whether kernels rotate heads in the order of the checkpoint.
    pub(super) fn is_in_rotated_order(&self) -> bool {
        self.rotary_dim == self.head_dim && self.rotated_pairs == RotatedPairs::Halves
    }

    /// `tensor` [rows, ..] with the rows of its first `heads` heads in the order in which kernels rotate them.
    pub(super) fn in_rotated_order(&self, tensor: Tensor, heads: usize) -> Result<Tensor> {
        if self.is_in_rotated_order() {
            return Ok(tensor);
        }
        let rows = tensor.dim(0)?;
        let order = self.head_order();
        let head = |head: usize| order.iter().map(move |dim| (head * self.head_dim + dim) as u32);
        let of_heads = (0..heads).flat_map(head);
        let order: Vec<u32> = of_heads.chain((heads * self.head_dim) as u32..rows as u32).collect();
        tensor.index_select(&Tensor::new(order, tensor.device())?, 0)
    }

    /// Norm weights of q and of k in the order of their heads' dimensions.
    pub(super) fn norms_in_rotated_order(&self, (q, k): (Tensor, Tensor)) -> Result<(Tensor, Tensor)> {
        let [q_heads, k_heads] = match self.qk_norm {
            QkNorm::AllHeads => [self.num_heads, self.num_kv_heads],
            QkNorm::PerHead | QkNorm::None => [1, 1],
        };
        Ok((self.in_rotated_order(q, q_heads)?, self.in_rotated_order(k, k_heads)?))
    }

    /// The order of a head's dimensions. First come the first ones of each rotated pair, then dimensions that are not
    /// rotated, up to half of the head. Then the second ones follow in the same way, with the rest.
    fn head_order(&self) -> Vec<usize> {
        let pairs = self.rotary_dim / 2;
        let half = self.head_dim / 2;
        let kept = self.rotary_dim..self.head_dim;
        let dims = 0..self.rotary_dim;
        let is_first = |dim: &usize| match self.rotated_pairs {
            RotatedPairs::Halves => *dim < pairs,
            RotatedPairs::Neighbours => dim.is_multiple_of(2),
        };
        let (first, second) = dims.partition::<Vec<_>, _>(is_first);
        let (before, after) = kept.clone().partition::<Vec<_>, _>(|dim| dim - kept.start < half - pairs);
        [first, before, second, after].concat()
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn config(head_dim: usize, rotary_dim: usize) -> AttentionConfig {
        AttentionConfig { rotary_dim, qkv_bias: true, ..AttentionConfig::new(4, 2, 1, head_dim) }
    }

    #[test]
    fn rotated_pairs_are_half_a_head_apart() {
        assert_eq!(config(8, 4).head_order(), [0, 1, 4, 5, 2, 3, 6, 7]);
        assert_eq!(config(8, 2).head_order(), [0, 2, 3, 4, 1, 5, 6, 7]);
        assert_eq!(config(6, 4).head_order(), [0, 1, 4, 2, 3, 5]);
        assert_eq!(config(6, 6).head_order(), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn neighbours_are_half_a_head_apart() {
        let neighbours = |head_dim, rotary_dim| AttentionConfig {
            rotated_pairs: RotatedPairs::Neighbours,
            ..config(head_dim, rotary_dim)
        };
        assert_eq!(neighbours(6, 6).head_order(), [0, 2, 4, 1, 3, 5]);
        assert_eq!(neighbours(8, 4).head_order(), [0, 2, 4, 5, 1, 3, 6, 7]);
        assert!(!neighbours(6, 6).is_in_rotated_order() && config(6, 6).is_in_rotated_order());
    }

    #[test]
    fn values_keep_their_order() -> Result<()> {
        let config = config(4, 2);
        let rows = Tensor::arange(0u32, 16, &Device::Cpu)?;
        let moved = config.in_rotated_order(rows, config.query_key_heads())?.to_vec1::<u32>()?;
        assert_eq!(moved, [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 13, 14, 15]);
        Ok(())
    }
}
