//! The input and the output of routing.

use moe_kernels::{View, ViewMut};

/// Router logits and their place in the step.
#[derive(Clone, Copy, Debug)]
pub struct RouteInput<'a> {
    /// Router logits [T, num_experts + num_zero_experts] f32.
    pub logits: View<'a>,
    /// Hidden states [T, H], for routing functions that look at them.
    pub hidden: Option<View<'a>>,
    /// MoE layer counted from 0 without dense layers: the layer of capture, replay and heat.
    pub layer: usize,
    /// The row of the step that is row 0 of this input, if a step is routed in pieces.
    pub first_row: usize,
}

impl<'a> RouteInput<'a> {
    /// The logits of a whole step in one MoE layer.
    pub fn new(logits: View<'a>, layer: usize) -> Self {
        Self { logits, hidden: None, layer, first_row: 0 }
    }
}

/// The arrays that routing writes.
#[derive(Debug)]
pub struct RouteOutput<'a> {
    /// Logical expert ids [T, K] u32, or with [`GateInput::log2phy`](crate::GateInput::log2phy) physical ids of copies;
    /// [`NO_EXPERT`](moe_kernels::NO_EXPERT) = no expert.
    pub topk_ids: ViewMut<'a>,
    /// Weights [T, K] f32; 0 where there is no expert.
    pub topk_weights: ViewMut<'a>,
    /// Identity weights `[T]` f32: the block adds `weight * hidden` once. Required with zero
    /// experts; without them it is optional and filled with 0.
    pub zero_expert_weights: Option<ViewMut<'a>>,
}
