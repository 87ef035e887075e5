//! Experts on CUDA that apply the router weights and add up the slots themselves: they turn token rows into sums.

use std::sync::Arc;

use candle_core::{DType, Result, bail};
use moe_kernels::cuda::{
    ExpertEpilogue, ExpertLists, ExpertSlots, FusedExperts, expert_slot_rows, fused_experts_into,
    slotted_experts_into,
};
use moe_kernels::{
    Activation, ActivationFormat, Dims, Dispatched, Exec, ExpertTraffic, Scratch, TensorView, ViewMut,
    WeightAndReduce, fill_into,
};

use moe_kernels::plan::{ColumnOrder, EpilogueCall, QuantWeights};

use crate::experts::{Experts, Reservation};
use crate::oracle::Backend;
use crate::weights::{ExpertWeights, ExpertsShape};

/// SwiGLU experts on CUDA, plain ones or with biases and gpt-oss's clamped activation. Activations are in bf16, weights
/// in bf16 or quantised. With few rows per expert the weights
/// are streamed; with many, grouped products run on tensor cores. `out` is [T', H] f32, weighted and reduced.
///
/// They take token rows [T', H] with ids and weights in the Standard format, or in the Listed format, in which the
/// slots are already sorted by expert.
///
/// The weights may have fewer slots than there are experts. Then the other experts are in host memory, and are brought
/// into the slots when a step needs them.
#[derive(Clone, Debug)]
pub struct CudaFusedExperts {
    weights: ExpertWeights,
    activation: Activation,
    backend: Backend,
    slots: Option<Arc<ExpertSlots>>,
}

impl CudaFusedExperts {
    /// Makes experts with these weights. The weights must be on a CUDA device and for bf16 activations.
    pub fn new(weights: ExpertWeights, activation: Activation) -> Result<Self> {
        Self::of(Backend::CudaFused, weights, activation)
    }

    /// Does the same as [`new`](Self::new) for rows in the Listed format.
    pub fn listed(weights: ExpertWeights, activation: Activation) -> Result<Self> {
        Self::of(Backend::CudaFusedListed, weights, activation)
    }

    fn of(backend: Backend, weights: ExpertWeights, activation: Activation) -> Result<Self> {
        if !weights.device().is_cuda() || weights.shape().dtype != DType::BF16 {
            bail!(
                "{backend} experts: expected bf16 weights on a CUDA device, got {} on {:?}",
                weights.shape().dtype.as_str(),
                weights.device().location()
            )
        }
        Ok(Self { weights, activation, backend, slots: None })
    }

    /// Does the same as [`new`](Self::new), but `weights` has only the experts in the slots, and no biases: nothing
    /// brings biases to the slots.
    pub fn slotted(weights: ExpertWeights, activation: Activation, slots: ExpertSlots) -> Result<Self> {
        if weights.has_bias() {
            bail!("{} experts: slots have no biases", Backend::CudaFused)
        }
        if weights.shape().num_local_experts != slots.num_slots() {
            bail!(
                "{} experts: expected weights of {} slots, got {}",
                Backend::CudaFused,
                slots.num_slots(),
                weights.shape().num_local_experts
            )
        }
        Ok(Self { slots: Some(Arc::new(slots)), ..Self::new(weights, activation)? })
    }

    fn with_args<R>(
        &self,
        dispatched: &Dispatched,
        run: impl FnOnce(&FusedExperts) -> Result<R>,
    ) -> Result<R> {
        let name = self.name();
        let format = self.activation_format();
        if dispatched.format != format || dispatched.weights_applied {
            bail!("{name}: expected rows in the {format:?} format without their router weights")
        }
        let w13 = self.weights.w13().read()?;
        let w2 = self.weights.w2().read()?;
        let biases = self.weights.bias_views()?;
        let [w13_bias, w2_bias] = biases.each_ref().map(Option::as_ref);
        let w13_bias = w13_bias.map(TensorView::view).transpose()?;
        let w2_bias = w2_bias.map(TensorView::view).transpose()?;
        run(&FusedExperts {
            x: dispatched.rows.view(),
            w13: w13.view()?,
            w2: w2.view()?,
            topk_ids: dispatched.topk_ids()?,
            topk_weights: dispatched.topk_weights()?,
            expert_map: dispatched.expert_map,
            lists: self.lists(dispatched)?,
            epilogue: ExpertEpilogue { w13_bias, w2_bias, activation: self.activation },
        })
    }

    /// The lists of slots by expert that rows in the Listed format contain.
    fn lists<'a>(&self, dispatched: &'a Dispatched) -> Result<Option<ExpertLists<'a>>> {
        if dispatched.format == ActivationFormat::Standard {
            return Ok(None);
        }
        let counts = dispatched.expert_num_tokens()?;
        let slots = dispatched.expert_slots()?;
        Ok(Some(ExpertLists { counts, slots }))
    }
}

impl Experts for CudaFusedExperts {
    fn name(&self) -> &str {
        self.backend.name()
    }

    fn activation_format(&self) -> ActivationFormat {
        match self.backend {
            Backend::CudaFusedListed => ActivationFormat::Listed,
            _ => ActivationFormat::Standard,
        }
    }

    fn shape(&self) -> ExpertsShape {
        let shape = self.weights.shape();
        let num_local_experts =
            self.slots.as_ref().map_or(shape.num_local_experts, |slots| slots.num_experts());
        ExpertsShape { num_local_experts, ..shape }
    }

    fn num_slots(&self) -> Option<usize> {
        self.slots.as_ref().map(|slots| slots.num_slots())
    }

    fn traffic(&self) -> Result<Option<ExpertTraffic>> {
        let Some(slots) = &self.slots else { return Ok(None) };
        slots.traffic(&Exec::on(self.weights.device())?).map(Some)
    }

    fn quantisation(&self) -> Option<[QuantWeights; 2]> {
        self.weights.quantisation()
    }

    fn epilogue(&self) -> EpilogueCall {
        self.weights.epilogue(self.activation)
    }

    fn weight_and_reduce(&self) -> WeightAndReduce {
        WeightAndReduce::NoOp
    }

    fn out_dims(&self, dispatched: &Dispatched) -> Result<Dims> {
        Dims::new(dispatched.rows.view().dims())
    }

    fn workspace(&self, max_tokens: usize, top_k: usize) -> Result<Reservation> {
        let shape = self.shape();
        let rows = Reservation::new()
            .with(DType::BF16, &[max_tokens, top_k, shape.intermediate_size])?
            .with(DType::F32, &[max_tokens, top_k, shape.hidden_size])?;
        match self.quantisation() {
            // This buffer has a row for each slot, with its columns in the order of the slot's expert.
            Some([QuantWeights { order: ColumnOrder::Sorted, .. }, _]) => {
                rows.with(DType::BF16, &[max_tokens, top_k, shape.hidden_size])
            }
            _ => Ok(rows),
        }
    }

    fn slot_rows(&self, dispatched: &Dispatched, ex: &mut Exec) -> Result<Option<Scratch>> {
        if self.shape().num_local_experts == 0 || self.slots.is_some() {
            return Ok(None);
        }
        self.with_args(dispatched, |args| expert_slot_rows(args, ex))
    }

    fn apply(&self, dispatched: &Dispatched, out: ViewMut, ex: &mut Exec) -> Result<()> {
        if self.shape().num_local_experts == 0 {
            // There are more ranks than experts, so this rank has none and adds nothing.
            return fill_into(0., out, ex);
        }
        self.with_args(dispatched, |args| match &self.slots {
            Some(slots) => slotted_experts_into(slots, args, out, ex),
            None => fused_experts_into(args, out, ex),
        })
    }
}
