//! Building a block from a checkpoint: weights, the oracle's backend, and the dispatch around it.

use candle_nn::VarBuilder;
use moe_dispatch::NoEp;
use moe_experts::{ExpertWeights, LoadSpec, Selection, build, select};
use moe_kernels::candle::Result;
use moe_kernels::{Activation, ActivationFormat, ExpertsSpec};
use moe_router::{Router, RouterConfig};

use crate::block::SparseMoeBlock;

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
    /// What the oracle decides on: all experts on this rank, rows in the Standard format.
    fn spec(&self, weights: &ExpertWeights) -> ExpertsSpec {
        ExpertsSpec {
            routing: self.router.routing_method(),
            activation_format: ActivationFormat::Standard,
            apply_router_weight_on_input: self.router.apply_router_weight_on_input,
            ..weights.spec(self.activation, self.router.num_slots())
        }
    }
}

/// Loads a block whose experts all live on this rank, without shared experts: add those by
/// [`with_shared_experts`](SparseMoeBlock::with_shared_experts) and
/// [`SharedExperts::load`](crate::SharedExperts::load). `gate` has the
/// prefix of the router (its `weight` [E + zero experts, H], and what the routing method needs),
/// `experts` that of the experts (see [`ExpertWeights::load`]). The oracle's choice comes along,
/// to be shown to the user.
///
/// # Errors
/// Missing or wrongly shaped tensors; an invalid routing method; no backend that fits.
pub fn load_block(
    options: &BlockOptions,
    gate: VarBuilder,
    experts: VarBuilder,
) -> Result<(SparseMoeBlock, Selection)> {
    let config = &options.router;
    let router = Router::load(config, gate.clone())?;
    let weight = gate.get((config.num_logits(), options.hidden_size), "weight")?;
    let packed_experts = config.num_experts + config.num_fused_shared_experts;
    let sizes = LoadSpec::new(packed_experts, options.hidden_size, options.intermediate_size);
    let weights = ExpertWeights::load(&sizes, experts)?;
    let selection = select(&options.spec(&weights), options.backend.as_deref())?;
    let prepare = NoEp::new().with_router_weight_on_input(config.apply_router_weight_on_input);
    let experts = build(&selection, weights)?;
    let block = SparseMoeBlock::new(weight, router, Box::new(prepare), experts, options.layer)?;
    Ok((block, selection))
}
