//! Routing called on candle tensors.

use candle_core::{DType, Result, Tensor};
use moe_kernels::gradient::TensorResults;
use moe_kernels::{Buffer, Exec, StepContext, with_tensors, with_views};

use crate::gate::GateInput;
use crate::io::{RouteInput, RouteOutput};
use crate::router::Router;

/// Routing of T tokens as tensors.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Routed {
    /// Logical expert ids [T, K] u32; [`NO_EXPERT`](moe_kernels::NO_EXPERT) = no expert.
    pub topk_ids: Tensor,
    /// Weights [T, K] f32.
    pub topk_weights: Tensor,
    /// Identity weights `[T]` f32 of a router with zero experts.
    pub zero_expert_weights: Option<Tensor>,
}

impl TensorResults for Routed {
    fn map_tensors(self, f: impl Fn(Tensor) -> Result<Tensor>) -> Result<Self> {
        let zero_expert_weights = self.zero_expert_weights.map(&f).transpose()?;
        Ok(Self { topk_weights: f(self.topk_weights)?, zero_expert_weights, ..self })
    }
}

impl Router {
    /// Routes router logits [T, E] f32, without a step context. The tensor may be on the CPU or on a CUDA device, in
    /// any layout; the result is on the same device.
    ///
    /// # Errors
    ///
    /// The errors of [`route_into`](Self::route_into).
    pub fn route(&self, router_logits: &Tensor) -> Result<Routed> {
        self.check_input(router_logits, None)?;
        with_tensors([router_logits], [], |[logits], [], ex| {
            self.route_views(RouteInput::new(logits, 0), &mut StepContext::default(), ex)
        })
    }

    /// Routes router logits [T, E] f32 of one MoE layer within the step of `context`; `hidden` [T, H]
    /// is for routing functions that look at it.
    ///
    /// # Errors
    ///
    /// The errors of [`route_into`](Self::route_into).
    pub fn route_step(
        &self,
        router_logits: &Tensor,
        hidden: Option<&Tensor>,
        layer: usize,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<Routed> {
        self.check_input(router_logits, hidden)?;
        with_views([router_logits], [hidden], |[logits], [hidden]| {
            self.route_views(RouteInput { hidden, ..RouteInput::new(logits, layer) }, context, ex)
        })
    }

    fn route_views(&self, input: RouteInput<'_>, context: &mut StepContext, ex: &mut Exec) -> Result<Routed> {
        self.owned(input.logits.rows(), ex, |out, ex| self.route_into(&input, out, context, ex))
    }

    /// The outputs of `route` for `tokens` tokens, as tensors.
    fn owned(
        &self,
        tokens: usize,
        ex: &mut Exec,
        route: impl FnOnce(RouteOutput<'_>, &mut Exec) -> Result<()>,
    ) -> Result<Routed> {
        let slots = [tokens, self.config.num_slots()];
        let mut ids = ex.output(DType::U32, &slots)?;
        let mut weights = ex.output(DType::F32, &slots)?;
        let zero = (self.config.num_zero_experts > 0).then(|| ex.output(DType::F32, &[tokens]));
        let mut zero = zero.transpose()?;
        let out = RouteOutput {
            topk_ids: ids.view_mut(),
            topk_weights: weights.view_mut(),
            zero_expert_weights: zero.as_mut().map(Buffer::view_mut),
        };
        route(out, ex)?;
        Ok(Routed {
            topk_ids: ids.into_tensor()?,
            topk_weights: weights.into_tensor()?,
            zero_expert_weights: zero.map(Buffer::into_tensor).transpose()?,
        })
    }

    /// Routes hidden states [T, H] through a gate of weight [E, H] and optional bias `[E]`, of their dtype or in f32,
    /// within the step of `context`.
    ///
    /// # Errors
    ///
    /// The errors of [`gate_and_route_into`](Self::gate_and_route_into).
    pub fn gate_and_route(
        &self,
        hidden: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        layer: usize,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<Routed> {
        self.check_gate(hidden, weight, bias)?;
        with_views([hidden, weight], [bias], |[hidden, weight], [bias]| {
            let input = GateInput { bias, ..GateInput::new(hidden, weight, layer) };
            self.owned(hidden.rows(), ex, |out, ex| self.gate_and_route_into(&input, None, out, context, ex))
        })
    }
}
