//! The sparse Mixture-of-Experts block: the one place that composes router, dispatch and experts.
//!
//! `route -> prepare -> experts -> finalize -> + zero experts -> + shared experts`. The parts are
//! boxed traits, chosen when the block is built and checked against each other there. Beside them stand monolithic
//! experts over the same weights, whose launches contain the router: the plan (`plan.rs`) says which steps they compute.

use std::num::NonZeroUsize;
use std::sync::Arc;

use moe_dispatch::{PrepareFinalize, Tokens};
use moe_experts::{Experts, MonolithicExperts};
use moe_kernels::candle::{DType, Result, Tensor, bail};
use moe_kernels::plan::Fusion;
use moe_kernels::{
    CpuIsa, Exec, ExpertTraffic, MonolithicIo, StepContext, View, ViewMut, Weight, copy_rows_into,
    forward_rows,
};
use moe_router::{GateInput, GateStep, RouteOutput, Router, Selection};
use tracing::trace_span;

use crate::check::{check_gate, check_modular};
use crate::chunked::{End, Path, Routed};
use crate::placed::{PlacedExperts, StepCopies};
use crate::plan::MoeForm;
use crate::plan_step::PlanStep;
use crate::shared::SharedExperts;

/// A sparse Mixture-of-Experts block.
pub struct SparseMoeBlock {
    gate: Weight,
    router: Box<Router>,
    path: Path,
    /// Another path, for steps of which the ranks agreed that all only decode.
    decode: Option<Path>,
    /// Experts whose launches contain the router, in the order of trial.
    monolithic: Vec<Box<dyn MonolithicExperts>>,
    /// Where experts are placed by a map.
    placed: Option<Arc<PlacedExperts>>,
    shared: Option<SharedExperts>,
    layer: usize,
    /// Tokens of a chunk, at most.
    chunk: Option<NonZeroUsize>,
}

impl SparseMoeBlock {
    /// A block of modular experts. `gate` is the router's weight [E + zero experts, H] in the
    /// model dtype; `layer` counts the model's MoE layers from 0.
    ///
    /// # Errors
    /// Parts that do not fit, both of them named: another activation format;
    /// row limits that are missing or too small; a router and a prepare side of which one applies
    /// the router weight to the input; another number of experts in the router, the expert map or
    /// the weights; a gate of other dims or dtype than the router and the experts need.
    pub fn new(
        gate: Tensor,
        router: Router,
        prepare: Box<dyn PrepareFinalize>,
        experts: Box<dyn Experts>,
        layer: usize,
    ) -> Result<Self> {
        Self::of_placed(gate, router, (prepare, experts), layer, None)
    }

    /// As [`new`](Self::new), for experts that a map places: the router chooses logical experts, the other parts see physical ones.
    ///
    /// # Errors
    /// As [`new`](Self::new); a map of other experts.
    pub(crate) fn of_placed(
        gate: Tensor,
        router: Router,
        (prepare, experts): (Box<dyn PrepareFinalize>, Box<dyn Experts>),
        layer: usize,
        placed: Option<Arc<PlacedExperts>>,
    ) -> Result<Self> {
        let config = router.config();
        check_modular(config, prepare.as_ref(), experts.as_ref(), placed.as_deref())?;
        check_gate(&gate, config.num_logits(), experts.shape().hidden_size, experts.shape().dtype)?;
        Ok(Self {
            gate: Weight::new(gate)?,
            router: Box::new(router),
            path: Path { prepare, experts },
            decode: None,
            monolithic: Vec::new(),
            placed,
            shared: None,
            layer,
            chunk: None,
        })
    }

    /// Adds experts whose launches contain the router, over the weights of the modular ones: the plan says which steps
    /// they compute.
    ///
    /// # Errors
    /// Experts of another shape than the modular ones.
    pub fn with_monolithic(mut self, experts: Box<dyn MonolithicExperts>) -> Result<Self> {
        if experts.shape() != self.path.experts.shape() {
            bail!(
                "monolithic experts `{}`: expected the shape of the modular `{}`, {:?}, got {:?}",
                experts.name(),
                self.path.experts.name(),
                self.path.experts.shape(),
                experts.shape()
            )
        }
        self.monolithic.push(experts);
        Ok(self)
    }

    /// Computes the tokens of a call in even chunks of at most `size`; the output is the same. On
    /// several ranks all must have the same size, as [`load_block_on`](crate::load_block_on) sees to.
    pub fn with_chunk_size(mut self, size: Option<NonZeroUsize>) -> Self {
        self.chunk = size;
        self
    }

    /// Packs the gate for the CPU kernels of a path ([`Weight::packed`]); `None` leaves it in rows.
    ///
    /// # Errors
    /// No memory left.
    pub fn with_packed_gate(mut self, isa: Option<CpuIsa>) -> Result<Self> {
        self.gate = self.gate.packed(isa, self.router.config().num_logits())?;
        Ok(self)
    }

    /// Adds another prepare/finalize backend with its experts, over the same weights, for steps of
    /// which the ranks agreed that all of them only decode (`StepContext::only_decode`).
    ///
    /// # Errors
    /// As [`new`](Self::new); experts of another shape.
    pub fn with_decode_path(
        mut self,
        prepare: Box<dyn PrepareFinalize>,
        experts: Box<dyn Experts>,
    ) -> Result<Self> {
        check_modular(self.router.config(), prepare.as_ref(), experts.as_ref(), self.placed.as_deref())?;
        if experts.shape() != self.path.experts.shape() {
            bail!(
                "decode path: expected experts like those of {}, {:?}, got {:?}",
                self.path.prepare.name(),
                self.path.experts.shape(),
                experts.shape()
            )
        }
        self.decode = Some(Path { prepare, experts });
        Ok(self)
    }

    /// Adds shared experts.
    ///
    /// # Errors
    /// Another hidden size or dtype.
    pub fn with_shared_experts(mut self, shared: SharedExperts) -> Result<Self> {
        let experts = self.path.experts.shape();
        shared.check_fits(experts.hidden_size, experts.dtype)?;
        self.shared = Some(shared);
        Ok(self)
    }

    /// Leaves the sum over the ranks that share the tokens to the caller; whether there is one and it is
    /// all that follows the experts.
    pub fn defer_sum(&mut self) -> bool {
        let alone = self.router.config().num_zero_experts == 0 && self.shared.is_none();
        alone && self.decode.is_none() && self.path.prepare.defer_sum()
    }

    pub(crate) fn shared_experts(&self) -> Option<&SharedExperts> {
        self.shared.as_ref()
    }

    /// The experts that a map places; `None` where physical experts are the logical ones.
    pub fn placed_experts(&self) -> Option<&PlacedExperts> {
        self.placed.as_deref()
    }

    /// What experts in host memory have cost so far; `None` where all are on the device. Waits for the device.
    ///
    /// # Errors
    /// Any error of the device.
    pub fn expert_traffic(&self) -> Result<Option<ExpertTraffic>> {
        self.path.experts.traffic()
    }

    pub(crate) fn has_decode_path(&self) -> bool {
        self.decode.is_some()
    }

    pub(crate) fn monolithic(&self) -> &[Box<dyn MonolithicExperts>] {
        &self.monolithic
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a step; `only_decode`: the ranks agreed that each of them only decodes.
    pub(crate) fn path_of(&self, only_decode: bool) -> &Path {
        self.decode.as_ref().filter(|_| only_decode).unwrap_or(&self.path)
    }

    /// The router.
    pub fn router(&self) -> &Router {
        &self.router
    }

    /// Whether the experts of a row may depend on its number in the step, and not on what is in it alone.
    pub fn routes_by_number(&self) -> bool {
        match self.router.config().selection {
            Selection::Hash { .. } | Selection::Custom | Selection::Simulated { .. } => true,
            Selection::TopK | Selection::Grouped { .. } | Selection::RawLogits => false,
        }
    }

    /// The modular experts' name, for logs.
    pub fn experts_name(&self) -> &str {
        self.path.experts.name()
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
        self.path.chunk_bytes(tokens, self.router.config().num_slots(), self.shared.as_ref())
    }

    /// `out` [T, H] (model dtype or f32) = block(`hidden` [T, H], model dtype). Of `context`: token
    /// ids, replay, capture and heat, as the router documents them.
    ///
    /// # Errors
    /// Wrong dims or dtypes; ranks that disagree, or died.
    pub fn forward_into(
        &self,
        hidden: View<'_>,
        out: ViewMut<'_>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let routed = context.asks_of_router();
        let only_decode = context.only_decode;
        let step = PlanStep { only_decode, routed, ..PlanStep::prompts(hidden.rows()) };
        let form = self.choose(&step, &[Fusion::Nothing], &ex.machine());
        self.forward_as_into(form, hidden, out, &mut |_| Ok(()), context, ex)
    }

    /// [`forward_into`](Self::forward_into) in a form that [`choose`](Self::choose) chose without anything fused around it;
    /// `observe` sees the router logits [T, E] f32 of modular experts.
    ///
    /// # Errors
    /// As [`forward_into`](Self::forward_into); a form that was chosen for another step.
    pub fn forward_as_into(
        &self,
        form: MoeForm,
        hidden: View<'_>,
        out: ViewMut<'_>,
        observe: &mut dyn FnMut(View<'_>) -> Result<()>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        if let MoeForm::Modular(_) = form {
            return self.modular(hidden, End::Sum(out), observe, context, ex);
        }
        let context = &*context;
        let routed = |out: ViewMut<'_>, ex: &mut Exec| {
            if out.dtype() == DType::F32 {
                return self.fused_into(form, MonolithicIo::Store { x: hidden, out }, context, ex);
            }
            let mut sums = ex.scratch(DType::F32, hidden.dims())?;
            self.fused_into(form, MonolithicIo::Store { x: hidden, out: sums.view_mut() }, context, ex)?;
            copy_rows_into(sums.view(), out, ex)
        };
        match &self.shared {
            Some(shared) => shared.add_to(hidden, out, ex, routed),
            None => routed(out, ex),
        }
    }

    /// Monolithic experts with what is fused around them, in a form that [`choose`](Self::choose) chose.
    ///
    /// # Errors
    /// Wrong dims or dtypes; a form that was chosen for another step.
    pub fn fused_into(
        &self,
        form: MoeForm,
        io: MonolithicIo<'_>,
        context: &StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let _span = trace_span!("moe").entered();
        let MoeForm::Monolithic { index, .. } = form else {
            bail!("modular experts fuse nothing around them")
        };
        let Some(experts) = self.monolithic.get(index) else {
            bail!("this block has {} monolithic experts, so no number {index}", self.monolithic.len())
        };
        let gate = self.gate.read()?;
        let gate = gate.view()?.rows("monolithic experts")?;
        let form = self.copies_form(&self.path, io.rows().rows(), &ex.machine());
        let copies = self.placed.as_ref().zip(form).map(|(placed, form)| placed.copies(form));
        // With one copy of each expert the map names experts; with several the router names copies.
        let sole = copies.as_ref().and_then(StepCopies::expert_map);
        let log2phy = copies.as_ref().filter(|_| sole.is_none()).and_then(StepCopies::log2phy);
        let slots = self.path.prepare.local_experts().and_then(|experts| experts.expert_map());
        let routing = context.routing.layer(self.layer, 0)?;
        let step = GateStep { padded: context.padded, routing, log2phy };
        let _experts = ex.launched_as_one(|| experts.name());
        self.router.with_gate(gate, None, step, |gate| experts.apply(gate, sole.or(slots), io, ex))
    }

    /// Routes all tokens at once, so that what the step context counts is the step's rows, then
    /// computes them chunk by chunk.
    pub(crate) fn modular(
        &self,
        hidden: View<'_>,
        end: End<'_>,
        observe: &mut dyn FnMut(View<'_>) -> Result<()>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let _span = trace_span!("moe").entered();
        let path = self.path_of(context.only_decode);
        let gate = self.gate.read()?;
        let (tokens, config) = (hidden.rows(), self.router.config());
        let mut logits = ex.scratch(DType::F32, &[tokens, config.num_logits()])?;
        let mut topk_ids = ex.scratch(DType::U32, &[tokens, config.num_slots()])?;
        let mut topk_weights = ex.scratch(DType::F32, &[tokens, config.num_slots()])?;
        let mut identity = ex.scratch(DType::F32, &[tokens])?;
        let output = RouteOutput {
            topk_ids: topk_ids.view_mut(),
            topk_weights: topk_weights.view_mut(),
            zero_expert_weights: (config.num_zero_experts > 0).then(|| identity.view_mut()),
        };
        let form = self.copies_form(path, tokens, &ex.machine());
        let placed = self.placed.as_deref().zip(form);
        {
            let copies = placed.map(|(placed, form)| placed.copies(form));
            let log2phy = copies.as_ref().and_then(StepCopies::log2phy);
            let input = GateInput { log2phy, ..GateInput::new(hidden, gate.view()?, self.layer) };
            trace_span!("router").in_scope(|| {
                self.router.gate_and_route_into(&input, Some(logits.view_mut()), output, context, ex)
            })?;
        }
        observe(logits.view())?;
        drop(logits);
        let routed = Routed {
            tokens: Tokens::new(hidden, topk_ids.view(), topk_weights.view()),
            identity: (config.num_zero_experts > 0).then(|| identity.view()),
            shared: self.shared.as_ref(),
            near: placed.filter(|(placed, form)| placed.is_near(*form)).map(|(placed, _)| placed),
        };
        path.run(&routed, self.chunk, end, context.rank_tokens.as_deref(), ex)
    }

    /// [`forward_into`](Self::forward_into) on candle tensors: `hidden` [.., H] in the gate's dtype and on its device, in any
    /// layout; the result is of the same shape, dtype and device.
    ///
    /// # Errors
    /// Another hidden size, dtype or device.
    pub fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        let hidden_size = self.path.experts.shape().hidden_size;
        forward_rows(hidden, hidden_size, hidden.dtype(), |x, out, ex| {
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
