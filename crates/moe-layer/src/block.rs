//! The sparse Mixture-of-Experts block: the one place that composes router, dispatch and experts.
//!
//! `route -> prepare -> experts -> finalize -> + zero experts -> + shared experts`. The parts are
//! boxed traits, chosen when the block is built and checked against each other there, so that a
//! forward pass has no decision left to make.

use moe_dispatch::PrepareFinalize;
use moe_experts::{AnyExperts, Experts, MonolithicExperts, Reservation};
use moe_kernels::candle::{DType, Result, Tensor, bail};
use moe_kernels::{
    Exec, TensorView, View, ViewMut, WeightAndReduce, Workspace, add_scaled_into, linear_into,
};
use moe_router::{GateInput, RouteOutput, Router};
use tracing::trace_span;

use crate::check::{check_gate, check_modular};
use crate::door::forward_rows;
use crate::shared::SharedExperts;

/// The two families of experts with what each needs around it.
pub(crate) enum Family {
    Modular { router: Box<Router>, prepare: Box<dyn PrepareFinalize>, experts: Box<dyn Experts> },
    Monolithic(Box<dyn MonolithicExperts>),
}

/// A sparse Mixture-of-Experts block.
pub struct SparseMoeBlock {
    gate: Tensor,
    family: Family,
    shared: Option<SharedExperts>,
    layer: usize,
    workspace: Workspace,
}

impl SparseMoeBlock {
    /// A block of modular experts. `gate` is the router's weight [E + zero experts, H] in the
    /// model dtype; `layer` counts the model's MoE layers from 0.
    ///
    /// # Errors
    /// Parts that do not fit, both of them named: monolithic experts; another activation format;
    /// row limits that are missing or too small; a router and a prepare side of which one applies
    /// the router weight to the input; another number of experts in the router, the expert map or
    /// the weights; a gate of other dims or dtype than the router and the experts need.
    pub fn new(
        gate: Tensor,
        router: Router,
        prepare: Box<dyn PrepareFinalize>,
        experts: AnyExperts,
        layer: usize,
    ) -> Result<Self> {
        let experts = experts.into_modular(prepare.name())?;
        let config = router.config();
        check_modular(config, prepare.as_ref(), experts.as_ref())?;
        check_gate(&gate, config.num_logits(), experts.shape().hidden_size, experts.shape().dtype)?;
        let family = Family::Modular { router: Box::new(router), prepare, experts };
        Ok(Self { gate: gate.contiguous()?, family, shared: None, layer, workspace: Workspace::new() })
    }

    /// A block whose experts contain their router. `gate` is the router's weight [E, H].
    ///
    /// # Errors
    /// Modular experts (both sides are named); a gate of another width or dtype, or with fewer
    /// rows than there are experts.
    pub fn new_monolithic(gate: Tensor, experts: AnyExperts, layer: usize) -> Result<Self> {
        let experts = experts.into_monolithic("block without a router")?;
        // Kernels for expert parallelism hold fewer experts than the gate scores.
        let logits = gate.dims().first().map_or(0, |rows| *rows).max(experts.shape().num_local_experts);
        check_gate(&gate, logits, experts.shape().hidden_size, experts.shape().dtype)?;
        let family = Family::Monolithic(experts);
        Ok(Self { gate: gate.contiguous()?, family, shared: None, layer, workspace: Workspace::new() })
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

    #[cfg(feature = "cuda")]
    pub(crate) fn gate(&self) -> &Tensor {
        &self.gate
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn family(&self) -> &Family {
        &self.family
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn has_shared_experts(&self) -> bool {
        self.shared.is_some()
    }

    /// The router, unless it is inside the experts' kernel.
    pub fn router(&self) -> Option<&Router> {
        match &self.family {
            Family::Modular { router, .. } => Some(router),
            Family::Monolithic(_) => None,
        }
    }

    /// The experts' name, for logs.
    pub fn experts_name(&self) -> &str {
        match &self.family {
            Family::Modular { experts, .. } => experts.name(),
            Family::Monolithic(experts) => experts.name(),
        }
    }

    /// The experts' largest buffers for at most `max_tokens` tokens.
    pub fn experts_workspace(&self, max_tokens: usize) -> Result<Reservation> {
        match &self.family {
            Family::Modular { router, experts, .. } => {
                experts.workspace(max_tokens, router.config().num_slots())
            }
            Family::Monolithic(experts) => experts.workspace(max_tokens, 1),
        }
    }

    /// `out` [T, H] (model dtype or f32) = block(`hidden` [T, H], model dtype). Step context of `ex`:
    /// token ids, replay, capture and heat, as the router documents them.
    pub fn forward_into(&self, hidden: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        self.forward_observed_into(hidden, out, &mut |_| Ok(()), ex)
    }

    /// The same; `observe` sees the router logits, [T, E] f32.
    pub fn forward_observed_into(
        &self,
        hidden: View<'_>,
        mut out: ViewMut<'_>,
        observe: &mut dyn FnMut(View<'_>) -> Result<()>,
        ex: &mut Exec,
    ) -> Result<()> {
        let _span = trace_span!("moe").entered();
        let gate = TensorView::new(&self.gate)?;
        let gate = gate.view()?;
        match &self.family {
            Family::Modular { router, prepare, experts } => {
                let parts = Modular { router, prepare: prepare.as_ref(), experts: experts.as_ref() };
                parts.forward_into(self.layer, hidden, gate, out.reborrow(), observe, ex)?;
            }
            Family::Monolithic(experts) => {
                let mut logits = ex.scratch(DType::F32, &[hidden.rows(), gate.rows()])?;
                trace_span!("gate").in_scope(|| linear_into(hidden, gate, None, logits.view_mut(), ex))?;
                observe(logits.view())?;
                refuse_routing_context(experts.as_ref(), ex)?;
                let _span = trace_span!("experts").entered();
                experts.apply(hidden, logits.view(), out.reborrow(), ex)?;
            }
        }
        match &self.shared {
            Some(shared) => trace_span!("shared_experts").in_scope(|| shared.add_into(hidden, out, ex)),
            None => Ok(()),
        }
    }

    /// The same on candle tensors: `hidden` [.., H].
    pub fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        forward_rows(hidden, &self.workspace, |x, out, ex| self.forward_into(x, out, ex))
    }
}

impl std::fmt::Debug for SparseMoeBlock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SparseMoeBlock")
            .field("layer", &self.layer)
            .field("gate", &self.gate.dims())
            .field("experts", &self.experts_name())
            .field("shared", &self.shared.is_some())
            .finish()
    }
}

/// The parts of a modular block.
struct Modular<'a> {
    router: &'a Router,
    prepare: &'a dyn PrepareFinalize,
    experts: &'a dyn Experts,
}

impl Modular<'_> {
    fn forward_into(
        &self,
        layer: usize,
        hidden: View<'_>,
        gate: View<'_>,
        mut out: ViewMut<'_>,
        observe: &mut dyn FnMut(View<'_>) -> Result<()>,
        ex: &mut Exec,
    ) -> Result<()> {
        let (tokens, config) = (hidden.rows(), self.router.config());
        let mut logits = ex.scratch(DType::F32, &[tokens, gate.rows()])?;
        let mut topk_ids = ex.scratch(DType::U32, &[tokens, config.num_slots()])?;
        let mut topk_weights = ex.scratch(DType::F32, &[tokens, config.num_slots()])?;
        let mut identity = ex.scratch(DType::F32, &[tokens])?;
        let output = RouteOutput {
            topk_ids: topk_ids.view_mut(),
            topk_weights: topk_weights.view_mut(),
            zero_expert_weights: (config.num_zero_experts > 0).then(|| identity.view_mut()),
        };
        let input = GateInput::new(hidden, gate, layer);
        trace_span!("router")
            .in_scope(|| self.router.gate_and_route_into(&input, Some(logits.view_mut()), output, ex))?;
        observe(logits.view())?;

        let dispatched = self.prepare.prepare(hidden, topk_ids.view(), topk_weights.view(), ex)?;
        let (dims, strategy) = (self.experts.out_dims(&dispatched)?, self.experts.weight_and_reduce());
        let is_final = strategy == WeightAndReduce::NoOp && self.prepare.finalize_copies_reduced();
        if is_final && out.dtype() == DType::F32 {
            // The experts' rows are the block's: finalize would only copy them.
            let out = out.reborrow();
            trace_span!("experts").in_scope(|| self.experts.apply(&dispatched, out, ex))?;
        } else {
            let mut rows = ex.scratch(DType::F32, &dims)?;
            trace_span!("experts").in_scope(|| self.experts.apply(&dispatched, rows.view_mut(), ex))?;
            self.prepare.finalize(rows.view(), &dispatched, strategy, out.reborrow(), ex)?;
        }
        if config.num_zero_experts > 0 {
            add_scaled_into(hidden, identity.view(), out, ex)?;
        }
        Ok(())
    }
}

/// Kernels with a built-in router neither show nor take ids.
fn refuse_routing_context(experts: &dyn MonolithicExperts, ex: &Exec) -> Result<()> {
    let step = &ex.step;
    let asked = [
        ("routed-experts capture", step.capture.is_some()),
        ("forced replay of routing", step.replay.is_some()),
        ("expert heat", step.heat.is_some()),
        ("force-balance", step.force_balance.is_some()),
    ];
    match asked.iter().find(|(_, asked)| *asked) {
        None => Ok(()),
        Some((what, _)) => bail!(
            "{what} is not supported with the monolithic experts `{}`, whose router is inside the kernel; \
             choose a modular MoE backend",
            experts.name()
        ),
    }
}
