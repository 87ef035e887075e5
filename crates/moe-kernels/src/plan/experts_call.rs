//! What the choice of the experts' kernels depends on.

use super::quant::QuantWeights;
use crate::tags::Activation;

/// Sizes of an expert layer's step on this rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsCall {
    /// Tokens T.
    pub tokens: usize,
    /// Slots per token K.
    pub top_k: usize,
    /// Physical experts that ids name.
    pub num_ids: usize,
    /// Experts on this rank.
    pub num_local: usize,
    /// Width of a row, H.
    pub hidden: usize,
    /// Intermediate size on this rank, I.
    pub inter: usize,
    /// How w13 and w2 are quantised; `None`: they are bf16.
    pub quant: Option<[QuantWeights; 2]>,
    /// The number of passes in which the experts of a step are brought to the device
    /// ([`max_passes`](crate::max_passes)); 1 if all of them have a slot.
    pub passes: usize,
    /// What the experts compute in addition to their products.
    pub epilogue: EpilogueCall,
}

/// What experts compute in addition to their products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EpilogueCall {
    /// Whether gate and up, or down, have biases.
    pub bias: bool,
    /// The activation of gate and up.
    pub activation: Activation,
}

impl EpilogueCall {
    /// SwiGLU without biases, which every kernel computes.
    pub const PLAIN: Self = Self { bias: false, activation: Activation::SwiGlu };
}
