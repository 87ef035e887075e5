//! A step of a sparse block, by the experts that the plan chose.

use candle_nn::Module;
use moe_dispatch::{AddNorm, Tokens};
use moe_kernels::arguments::expect_rows;
use moe_kernels::candle::{DType, Result, Tensor, bail};
use moe_kernels::plan::Fusion;
use moe_kernels::{Exec, StepContext, SublayerIo, TensorView, View, ViewMut, copy_rows_into, forward_rows};
use moe_router::{GateInput, GateStep, RouteOutput};
use tracing::trace_span;

use crate::block::SparseMoeBlock;
use crate::chunked::{End, Routed};
use crate::form::MoeForm;
use crate::placed::StepCopies;
use crate::plan_step::PlanStep;

impl SparseMoeBlock {
    /// `out` [T, H] (model dtype or f32) = block(`hidden` [T, H], model dtype). It uses token ids, replay, capture and
    /// heat of `context`, as the router documents them.
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
        self.forward_as(form, SublayerIo::Store { x: hidden, out }, &mut |_| Ok(()), context, ex)
    }

    /// [`forward_into`](Self::forward_into) in a form that [`choose`](Self::choose) chose, with the ops before and
    /// after the layer that this form contains. `observe` gets the router logits [T, E] f32 of modular experts.
    ///
    /// # Errors
    /// The errors of [`forward_into`](Self::forward_into); a form that was chosen for another step, or for a fusion for
    /// which `io` has no arrays.
    pub fn forward_as(
        &self,
        form: MoeForm,
        io: SublayerIo<'_>,
        observe: &mut dyn FnMut(View<'_>) -> Result<()>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let Some(index) = form.monolithic else {
            return self.modular(io, observe, context, ex);
        };
        let context = &*context;
        let SublayerIo::Store { x, out } = io else {
            return self.fused(index, io, context, ex);
        };
        let routed = |out: ViewMut<'_>, ex: &mut Exec| {
            if out.dtype() == DType::F32 {
                return self.fused(index, SublayerIo::Store { x, out }, context, ex);
            }
            let mut sums = ex.scratch(DType::F32, x.dims())?;
            self.fused(index, SublayerIo::Store { x, out: sums.view_mut() }, context, ex)?;
            copy_rows_into(sums.view(), out, ex)
        };
        match &self.shared {
            Some(shared) => shared.add_to(x, out, ex, routed),
            None => routed(out, ex),
        }
    }

    /// Runs the monolithic experts with this index.
    fn fused(&self, index: usize, io: SublayerIo<'_>, context: &StepContext, ex: &mut Exec) -> Result<()> {
        let _span = trace_span!("moe").entered();
        let Some(experts) = self.monolithic.get(index) else {
            bail!("this block has {} monolithic experts, so no number {index}", self.monolithic.len())
        };
        let gate = self.gate.read()?;
        let gate = gate.view()?.rows("monolithic experts")?;
        let bias = self.gate_bias()?;
        let bias = bias.as_ref().map(TensorView::view).transpose()?;
        let form = self.copies_form(&self.path, io.rows().rows(), &ex.machine());
        let copies = self.placed.as_ref().zip(form).map(|(placed, form)| placed.copies(form));
        // With one copy of each expert the map names experts; with several the router names copies.
        let sole = copies.as_ref().and_then(StepCopies::expert_map);
        let log2phy = copies.as_ref().filter(|_| sole.is_none()).and_then(StepCopies::log2phy);
        let slots = self.path.prepare.local_experts().and_then(|experts| experts.expert_map());
        let routing = context.routing.layer(self.layer, 0)?;
        let step = GateStep { padded: context.padded, routing, log2phy };
        let _experts = ex.launched_as_one(|| experts.name());
        self.router.with_gate(gate, bias, step, |gate| experts.apply(gate, sole.or(slots), io, ex))
    }

    /// Routes all tokens at once, so that the step context counts the rows of the step, then computes them chunk by
    /// chunk.
    fn modular(
        &self,
        io: SublayerIo<'_>,
        observe: &mut dyn FnMut(View<'_>) -> Result<()>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let _span = trace_span!("moe").entered();
        let path = self.path_of(context.only_decode);
        let hidden = io.x("modular experts")?;
        let end = match io {
            SublayerIo::Store { out, .. } => End::Sum(out),
            SublayerIo::AddNorm { residual, norm, out, .. } if self.adds_norm() => {
                End::AddNorm(AddNorm { residual, norm, out: out.floats("modular experts")? })
            }
            SublayerIo::AddNorm { .. } => bail!(
                "{}: something else is added after the experts, or no sums return to it",
                path.prepare.name()
            ),
            SublayerIo::Add { .. } | SublayerIo::NormAdd { .. } => {
                bail!("modular experts have no form{}", io.fusion().suffix())
            }
        };
        let gate = self.gate.read()?;
        let bias = self.gate_bias()?;
        let bias = bias.as_ref().map(TensorView::view).transpose()?;
        let tokens = hidden.rows();
        let config = self.router.config();
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
            let input = GateInput { bias, log2phy, ..GateInput::new(hidden, gate.view()?, self.layer) };
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

    /// [`forward_into`](Self::forward_into) on candle tensors: `hidden` [.., H] in the experts' dtype and on their
    /// device, in any layout. The result has the same shape, dtype and device.
    ///
    /// # Errors
    /// Another hidden size, dtype or device.
    pub fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        let shape = self.path.experts.shape();
        let hidden_size = shape.hidden_size;
        expect_rows("sparse MoE block", "hidden", hidden, hidden_size, shape.dtype)?;
        forward_rows(hidden, hidden_size, hidden.dtype(), |x, out, ex| {
            self.forward_into(x, out, &mut StepContext::default(), ex)
        })
    }
}

impl Module for SparseMoeBlock {
    fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        SparseMoeBlock::forward(self, hidden)
    }
}
