//! The per-expert loop: separate gate, up and down matrices of every expert, one expert after the
//! other.
//!
//! This is how models ran before packed weights and grouped kernels, kept as the reference that
//! the fused block is compared with and as a fallback that depends on nothing but dense products.
//! The owner of a token weights its slots, k ascending. Products, activation and sum are in the
//! fused path's order, so on the CPU both give the same bits.
//!
//! [`MoeMlp`] is the whole of it on one rank, without dispatch. Several ranks, and chunks of tokens,
//! need a dispatch: there [`ExpertLoop`] takes the place of the grouped kernels in a
//! [`SparseMoeBlock`].

mod experts;
mod load;

use candle_nn::VarBuilder;
use moe_experts::{Experts, ExpertsShape};
use moe_kernels::candle::{DType, Result, Tensor, bail};
use moe_kernels::{
    Activation, Exec, StepContext, TensorView, View, ViewMut, Workspace, forward_rows, weighted_sum_into,
};
use moe_router::{GateInput, RouteOutput, Router, RouterConfig};
use tracing::trace_span;

use crate::block::SparseMoeBlock;
use crate::check::check_gate;
use crate::context::BlockContext;
use crate::load::{BlockOptions, batch_limits, compose};
use crate::shared::SharedExperts;

pub use experts::{ExpertLoop, ExpertMlp};

/// A sparse block that loops over its experts.
pub struct MoeMlp {
    gate: Tensor,
    router: Router,
    experts: ExpertLoop,
    shared: Option<SharedExperts>,
    layer: usize,
    workspace: Workspace,
}

impl MoeMlp {
    /// `gate` is the router's weight [E, H] in the model dtype; `layer` counts the model's MoE
    /// layers from 0.
    ///
    /// # Errors
    /// Another number of experts than the router chooses among; experts of different shapes or
    /// dtypes; a gate of other dims; routing that only the fused block offers (zero experts, fused
    /// shared experts, router weights on the input); another device than the CPU.
    pub fn new(
        gate: Tensor,
        router: Router,
        experts: Vec<ExpertMlp>,
        activation: Activation,
        layer: usize,
    ) -> Result<Self> {
        check_routing(router.config())?;
        let Some(first) = experts.first().filter(|_| experts.len() == router.config().num_experts) else {
            bail!(
                "legacy experts: the router chooses among {} experts, but there are {}",
                router.config().num_experts,
                experts.len()
            )
        };
        let (intermediate_size, hidden_size) = first.gate.dims2()?;
        let dtype = first.gate.dtype();
        let shape = ExpertsShape { num_local_experts: experts.len(), hidden_size, intermediate_size, dtype };
        Self::of(gate, router, ExpertLoop::new(experts, shape, activation)?, layer)
    }

    fn of(gate: Tensor, router: Router, experts: ExpertLoop, layer: usize) -> Result<Self> {
        let ExpertsShape { num_local_experts, hidden_size, dtype, .. } = experts.shape();
        check_gate(&gate, num_local_experts, hidden_size, dtype)?;
        let gate = gate.contiguous()?;
        Ok(Self { gate, router, experts, shared: None, layer, workspace: Workspace::new() })
    }

    /// Loads gate, router and experts, from per-expert tensors or, split, from packed ones: the
    /// layouts and prefixes of [`load_block`](crate::load_block).
    ///
    /// # Errors
    /// Missing or wrongly shaped tensors; an expert backend, which only the fused path has; what
    /// [`MoeMlp::new`] refuses.
    pub fn load(options: &BlockOptions, gate: VarBuilder, experts: VarBuilder) -> Result<Self> {
        check_options(options)?;
        let (config, context) = (&options.router, BlockContext::default());
        let router = Router::load(config, gate.clone())?;
        let weight = gate.get((config.num_logits(), options.hidden_size), "weight")?;
        let layout = context.geometry.expert_layout(config.num_experts)?;
        Self::of(weight, router, ExpertLoop::load(options, &context, &layout, experts)?, options.layer)
    }

    /// Adds shared experts.
    ///
    /// # Errors
    /// Another hidden size or dtype.
    pub fn with_shared_experts(mut self, shared: SharedExperts) -> Result<Self> {
        shared.check_fits(&self.gate)?;
        self.shared = Some(shared);
        Ok(self)
    }

    /// The router.
    pub fn router(&self) -> &Router {
        &self.router
    }

    /// `out` [T, H] (model dtype or f32) = block(`hidden` [T, H], model dtype). Of `context`: token
    /// ids, replay, capture and heat, as the router documents them.
    pub fn forward_into(
        &self,
        hidden: View<'_>,
        out: ViewMut<'_>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        self.forward_observed_into(hidden, out, &mut |_| Ok(()), context, ex)
    }

    /// The same; `observe` sees the router logits, [T, E] f32.
    pub fn forward_observed_into(
        &self,
        hidden: View<'_>,
        mut out: ViewMut<'_>,
        observe: &mut dyn FnMut(View<'_>) -> Result<()>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let _span = trace_span!("moe").entered();
        let gate = TensorView::new(&self.gate)?;
        let (tokens, k) = (hidden.rows(), self.router.config().top_k);
        let mut logits = ex.scratch(DType::F32, &[tokens, self.router.config().num_experts])?;
        let mut topk_ids = ex.scratch(DType::U32, &[tokens, k])?;
        let mut topk_weights = ex.scratch(DType::F32, &[tokens, k])?;
        let output = RouteOutput {
            topk_ids: topk_ids.view_mut(),
            topk_weights: topk_weights.view_mut(),
            zero_expert_weights: None,
        };
        let input = GateInput::new(hidden, gate.view()?, self.layer);
        trace_span!("router").in_scope(|| {
            self.router.gate_and_route_into(&input, Some(logits.view_mut()), output, context, ex)
        })?;
        observe(logits.view())?;
        let mut slots = ex.scratch(DType::F32, &[tokens, k, hidden.dims()[1]])?;
        trace_span!("experts")
            .in_scope(|| self.experts.slots_into(hidden, topk_ids.view(), None, slots.view_mut(), ex))?;
        weighted_sum_into(slots.view(), topk_ids.view(), topk_weights.view(), out.reborrow(), ex)?;
        match &self.shared {
            Some(shared) => trace_span!("shared_experts").in_scope(|| shared.add_into(hidden, out, ex)),
            None => Ok(()),
        }
    }

    /// The same on candle tensors of the CPU: `hidden` [.., H] in the gate's dtype, in any layout.
    pub fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        forward_rows(hidden, (self.gate.dims2()?.1, hidden.dtype()), &self.workspace, |x, out, ex| {
            self.forward_into(x, out, &mut StepContext::default(), ex)
        })
    }
}

impl std::fmt::Debug for MoeMlp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MoeMlp")
            .field("layer", &self.layer)
            .field("gate", &self.gate.dims())
            .field("experts", &self.experts.shape())
            .field("shared", &self.shared.is_some())
            .finish()
    }
}

/// A block around the loop, for a rank of several or for tokens in chunks; the rest is as in
/// [`MoeMlp::load`].
pub(crate) fn load_loop_on(
    options: &BlockOptions,
    context: &BlockContext,
    gate: VarBuilder,
    experts: VarBuilder,
) -> Result<SparseMoeBlock> {
    check_options(options)?;
    let layout = context.geometry.expert_layout(options.router.num_experts)?;
    let experts = ExpertLoop::load(options, context, &layout, experts)?;
    let (block, ()) = compose(options, context, &layout, gate, |prepare, _| {
        let experts = experts.clone().with_format(prepare.activation_format(), batch_limits(prepare));
        Ok((Box::new(experts) as Box<dyn Experts>, ()))
    })?;
    Ok(block)
}

fn check_options(options: &BlockOptions) -> Result<()> {
    if let Some(backend) = &options.backend {
        bail!("the legacy expert path has no backends, so not {backend} either; choose the fused path")
    }
    check_routing(&options.router)
}

fn check_routing(config: &RouterConfig) -> Result<()> {
    let only_fused = [
        ("zero experts", config.num_zero_experts > 0),
        ("fused shared experts", config.num_fused_shared_experts > 0),
        ("router weights on the input", config.apply_router_weight_on_input),
    ];
    match only_fused.iter().find(|(_, asked)| *asked) {
        Some((what, _)) => bail!("the legacy expert path does not support {what}; choose the fused path"),
        None => Ok(()),
    }
}
