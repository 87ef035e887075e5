//! Linear attention by the gated delta rule: a mixer with a state of a fixed size in place of keys and values.

mod config;
mod forward;
mod load;
mod order;

use std::fmt;

use candle_core::Tensor;
use moe_comm::RowParallel;

pub use self::config::LinearAttentionConfig;
use crate::projection::Projection;

/// A layer of linear attention, or one rank's heads of it.
#[derive(Clone)]
pub struct LinearAttention {
    config: LinearAttentionConfig,
    /// Rows in the order of [`DeltaHeads`](moe_kernels::DeltaHeads), [P, H].
    input: Projection,
    /// [H, Hv * Dv].
    output: Projection,
    /// [W, C] f32.
    conv: Tensor,
    /// `[Hv]` f32 each.
    a_log: Tensor,
    dt_bias: Tensor,
    /// `[Dv]` f32.
    norm: Tensor,
    /// The ranks that share the heads, if these are a part of them.
    ranks: Option<RowParallel>,
}

impl fmt::Debug for LinearAttention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LinearAttention({:?})", self.config)
    }
}
