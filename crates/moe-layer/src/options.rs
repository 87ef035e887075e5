//! What a block is built from.

use moe_experts::ExpertWeights;
use moe_kernels::{Activation, ActivationFormat, ExpertsSpec};
use moe_router::RouterConfig;

use crate::context::BlockContext;

/// What a block is built from, beside its tensors.
#[derive(Clone, Debug)]
pub struct BlockOptions {
    /// Routing method and number of experts.
    pub router: RouterConfig,
    /// Hidden size H.
    pub hidden_size: usize,
    /// Intermediate size I of one expert.
    pub intermediate_size: usize,
    /// Activation of the experts.
    pub activation: Activation,
    /// The block's place among the model's MoE layers, from 0.
    pub layer: usize,
    /// Name of the expert backend; `None` lets the oracle choose.
    pub backend: Option<String>,
}

impl BlockOptions {
    /// Experts with weights: the routed and the fused shared ones.
    pub(crate) fn packed_experts(&self) -> usize {
        self.router.num_experts + self.router.num_fused_shared_experts
    }

    /// What the oracle decides on.
    pub(crate) fn spec(
        &self,
        weights: &ExpertWeights,
        format: ActivationFormat,
        context: &BlockContext,
    ) -> ExpertsSpec {
        let geometry = &context.geometry;
        ExpertsSpec {
            batch_invariant: context.batch_invariant,
            num_experts: self.packed_experts(),
            routing: self.router.routing_method(),
            activation_format: format,
            apply_router_weight_on_input: self.router.apply_router_weight_on_input,
            tp_size: geometry.moe_tp_size,
            ep_size: geometry.ep_size,
            ..weights.spec(self.activation, self.router.num_slots())
        }
    }
}
