//! The settings from which a block is built.

use moe_experts::{Backend, ExpertWeights};
use moe_kernels::candle::Result;
use moe_kernels::{Activation, ActivationFormat, ExpertsSpec};
use moe_router::RouterConfig;

use crate::context::BlockContext;
use crate::error::refuse;

/// The settings from which a block is built, in addition to its tensors.
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
    /// Whether the experts' products have biases.
    pub expert_bias: bool,
    /// The block's place among the model's MoE layers, from 0.
    pub layer: usize,
    /// Name of the expert backend; `None` lets the oracle choose.
    pub backend: Option<String>,
}

impl BlockOptions {
    /// Options for SwiGLU experts of the first layer, without biases, on the backend that the oracle chooses. For other
    /// settings, change the fields.
    pub fn new(router: RouterConfig, hidden_size: usize, intermediate_size: usize) -> Self {
        let activation = Activation::SwiGlu;
        Self {
            router,
            hidden_size,
            intermediate_size,
            activation,
            expert_bias: false,
            layer: 0,
            backend: None,
        }
    }

    /// Checks what can be known before tensors are read: routing, sizes, activation, the name of the backend.
    pub(crate) fn check(&self) -> Result<()> {
        self.router.validate()?;
        self.activation.check()?;
        for (name, size) in [("hidden_size", self.hidden_size), ("intermediate_size", self.intermediate_size)]
        {
            if size == 0 {
                refuse!(Parts, "`{name}`: expected at least 1, got 0")
            }
        }
        match self.backend.as_deref() {
            None | Some("auto") => Ok(()),
            Some(name) => Ok(name.parse::<Backend>().map(drop)?),
        }
    }

    /// The number of experts with weights: routed experts and fused shared ones.
    pub(crate) fn packed_experts(&self) -> usize {
        self.router.num_experts + self.router.num_fused_shared_experts
    }

    /// Returns the specification for the oracle.
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
