//! A loaded attention layer: its config, its weights, the ranks that share its heads.

use std::sync::Arc;

use candle_core::Tensor;
use moe_comm::{Communicator, RowParallel};

use super::config::AttentionConfig;
use crate::projection::Projection;

/// An attention layer.
#[derive(Clone, Debug)]
pub struct Attention {
    pub(super) config: AttentionConfig,
    pub(super) weights: LayerWeights,
    pub(super) scale: f32,
    /// The ranks that cut the heads, if these are a part of them.
    pub(super) ranks: Option<HeadRanks>,
}

/// [`AttentionWeights`](super::AttentionWeights) in the form in which a layer holds them.
#[derive(Clone, Debug)]
pub(super) struct LayerWeights {
    /// Rows of q, k and v, and then of an output gate, [Hq * D, H].
    pub qkv: Projection,
    pub o: Projection,
    pub qk_norm: Option<(Tensor, Tensor)>,
    /// `[Hq]` f32, because kernels add it to denominators without rounding.
    pub sinks: Option<Tensor>,
}

/// The ranks that share the heads of a layer.
#[derive(Clone, Debug)]
pub(super) struct HeadRanks {
    /// The output product.
    pub output: RowParallel,
    /// The ranks, for norms over all heads.
    pub comm: Arc<dyn Communicator>,
    /// How many ranks in succession hold the same key-value heads.
    pub kv_replicas: usize,
}
