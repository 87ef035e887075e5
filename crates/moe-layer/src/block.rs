//! The sparse Mixture-of-Experts block: the one place that composes router, dispatch and experts.
//!
//! `route -> prepare -> experts -> finalize -> + zero experts -> + shared experts`. The parts are
//! boxed traits, chosen when the block is built and checked against each other there, so that a
//! forward pass has no decision left to make.

use std::num::NonZeroUsize;

use moe_dispatch::PrepareFinalize;
use moe_experts::{AnyExperts, MonolithicExperts, Reservation};
use moe_kernels::candle::{DType, Result, Tensor, bail};
use moe_kernels::{Exec, StepContext, TensorView, View, ViewMut, Workspace, forward_rows, linear_into};
use moe_router::{GateInput, RouteOutput, Router};
use tracing::trace_span;

use crate::check::{check_gate, check_modular};
use crate::chunked::{Path, Routed, SharedOrder};
use crate::shared::SharedExperts;

/// The two families of experts with what each needs around it.
pub(crate) enum Family {
    Modular {
        router: Box<Router>,
        path: Path,
        /// Another path, for steps of which the ranks agreed that all only decode.
        decode: Option<Path>,
    },
    Monolithic(Box<dyn MonolithicExperts>),
}

/// A sparse Mixture-of-Experts block.
pub struct SparseMoeBlock {
    gate: Tensor,
    family: Family,
    shared: Option<SharedExperts>,
    layer: usize,
    /// Tokens of a chunk, at most.
    chunk: Option<NonZeroUsize>,
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
        let path = Path { prepare, experts };
        let family = Family::Modular { router: Box::new(router), path, decode: None };
        Ok(Self::of(gate.contiguous()?, family, layer))
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
        Ok(Self::of(gate.contiguous()?, family, layer))
    }

    fn of(gate: Tensor, family: Family, layer: usize) -> Self {
        Self { gate, family, shared: None, layer, chunk: None, workspace: Workspace::new() }
    }

    /// Computes the tokens of a call in even chunks of at most `size`; the output is the same. On
    /// several ranks all must have the same size.
    pub fn with_chunk_size(mut self, size: Option<NonZeroUsize>) -> Self {
        self.chunk = size;
        self
    }

    /// Adds another prepare/finalize backend with its experts, over the same weights, for steps of
    /// which the ranks agreed that all of them only decode (`StepContext::only_decode`).
    ///
    /// # Errors
    /// As [`new`](Self::new); monolithic experts in this block.
    pub fn with_decode_path(
        mut self,
        prepare: Box<dyn PrepareFinalize>,
        experts: AnyExperts,
    ) -> Result<Self> {
        let Family::Modular { router, path, decode } = &mut self.family else {
            bail!("cannot add a decode path with {} to monolithic experts", prepare.name())
        };
        let experts = experts.into_modular(prepare.name())?;
        check_modular(router.config(), prepare.as_ref(), experts.as_ref())?;
        if experts.shape() != path.experts.shape() {
            bail!(
                "decode path: expected experts like those of {}, {:?}, got {:?}",
                path.prepare.name(),
                path.experts.shape(),
                experts.shape()
            )
        }
        *decode = Some(Path { prepare, experts });
        Ok(self)
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

    /// Leaves the sum over the ranks that share the tokens to the caller; whether there is one and it is
    /// all that follows the experts.
    pub fn defer_sum(&mut self) -> bool {
        let has_shared = self.has_shared_experts();
        match &mut self.family {
            Family::Modular { router, path, decode: None } => {
                router.config().num_zero_experts == 0 && !has_shared && path.prepare.defer_sum()
            }
            _ => false,
        }
    }

    pub(crate) fn gate(&self) -> &Tensor {
        &self.gate
    }

    pub(crate) fn family(&self) -> &Family {
        &self.family
    }

    pub(crate) fn layer(&self) -> usize {
        self.layer
    }

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
            Family::Modular { path, .. } => path.experts.name(),
            Family::Monolithic(experts) => experts.name(),
        }
    }

    /// The experts' largest buffers for at most `max_tokens` tokens.
    pub fn experts_workspace(&self, max_tokens: usize) -> Result<Reservation> {
        match &self.family {
            Family::Modular { router, path, .. } => {
                path.experts.workspace(max_tokens, router.config().num_slots())
            }
            Family::Monolithic(experts) => experts.workspace(max_tokens, 1),
        }
    }

    /// The name of the prepare/finalize backend, for logs.
    pub fn dispatch_name(&self) -> &str {
        match &self.family {
            Family::Modular { path, .. } => path.prepare.name(),
            Family::Monolithic(_) => "none",
        }
    }

    /// Tokens of a chunk, at most; `None` without chunks.
    pub fn chunk_size(&self) -> Option<NonZeroUsize> {
        self.chunk
    }

    /// Bytes of workspace that a chunk of `tokens` tokens takes: rows that arrive, expert
    /// intermediates and slot rows, for the most rows that can arrive. It does not fall as `tokens`
    /// rise.
    ///
    /// # Errors
    /// Sizes that overflow.
    pub fn chunk_bytes(&self, tokens: usize) -> Result<usize> {
        match &self.family {
            Family::Modular { router, path, .. } => {
                path.chunk_bytes(tokens, router.config().num_slots(), self.shared.as_ref())
            }
            Family::Monolithic(experts) => Ok(experts.workspace(tokens, 1)?.bytes()),
        }
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
        let gate = gate.view()?;
        match &self.family {
            Family::Modular { router, path, decode } => {
                let path = decode.as_ref().filter(|_| context.only_decode).unwrap_or(path);
                self.modular(router, (path, path.shared_order()), (hidden, gate), out, observe, context, ex)
            }
            Family::Monolithic(experts) => {
                let mut logits = ex.scratch(DType::F32, &[hidden.rows(), gate.rows()])?;
                trace_span!("gate").in_scope(|| linear_into(hidden, gate, None, logits.view_mut(), ex))?;
                observe(logits.view())?;
                refuse_routing_context(experts.as_ref(), context)?;
                trace_span!("experts")
                    .in_scope(|| experts.apply(hidden, logits.view(), out.reborrow(), ex))?;
                match &self.shared {
                    Some(shared) => {
                        trace_span!("shared_experts").in_scope(|| shared.add_into(hidden, out, ex))
                    }
                    None => Ok(()),
                }
            }
        }
    }

    /// Routes all tokens at once, so that what the step context counts is the step's rows, then
    /// computes them chunk by chunk.
    pub(crate) fn modular(
        &self,
        router: &Router,
        (path, order): (&Path, SharedOrder),
        (hidden, gate): (View<'_>, View<'_>),
        out: ViewMut<'_>,
        observe: &mut dyn FnMut(View<'_>) -> Result<()>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let (tokens, config) = (hidden.rows(), router.config());
        let mut logits = ex.scratch(DType::F32, &[tokens, gate.rows()])?;
        let mut topk_ids = ex.scratch(DType::U32, &[tokens, config.num_slots()])?;
        let mut topk_weights = ex.scratch(DType::F32, &[tokens, config.num_slots()])?;
        let mut identity = ex.scratch(DType::F32, &[tokens])?;
        let output = RouteOutput {
            topk_ids: topk_ids.view_mut(),
            topk_weights: topk_weights.view_mut(),
            zero_expert_weights: (config.num_zero_experts > 0).then(|| identity.view_mut()),
        };
        let input = GateInput::new(hidden, gate, self.layer);
        trace_span!("router")
            .in_scope(|| router.gate_and_route_into(&input, Some(logits.view_mut()), output, context, ex))?;
        observe(logits.view())?;
        drop(logits);
        let routed = Routed {
            hidden,
            topk_ids: topk_ids.view(),
            topk_weights: topk_weights.view(),
            identity: (config.num_zero_experts > 0).then(|| identity.view()),
            shared: self.shared.as_ref(),
            order,
        };
        path.run(&routed, self.chunk, out, context.rank_tokens.as_deref(), ex)
    }

    /// The same on candle tensors: `hidden` [.., H] in the gate's dtype and on its device, in any layout; the result
    /// is of the same shape, dtype and device.
    ///
    /// # Errors
    /// Another hidden size, dtype or device.
    pub fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        forward_rows(hidden, (self.gate.dims2()?.1, hidden.dtype()), &self.workspace, |x, out, ex| {
            self.forward_into(x, out, &mut StepContext::default(), ex)
        })
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

/// Kernels with a built-in router neither show nor take ids.
fn refuse_routing_context(experts: &dyn MonolithicExperts, step: &StepContext) -> Result<()> {
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
