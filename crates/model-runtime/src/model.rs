//! What a causal language model is to the programs that run it.
//!
//! Generation, parity and benchmarks call the same [`CausalLm::forward`]; parity only adds an
//! [`Observer`].

use candle_core::{DType, Result};

use moe_kernels::plan::{Machine, Stage};
use moe_kernels::{Exec, ExpertTraffic, StepContext, View, ViewMut};
use moe_layer::PlanStep;
use serde::Serialize;

use crate::kv_cache::{KvCache, LayerStates};
use crate::step::StepViews;

/// Facts about a model, from its config.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelInfo {
    /// Number of token ids V.
    pub vocab_size: usize,
    /// Width of the residual stream H.
    pub hidden_size: usize,
    /// Number of decoder layers.
    pub num_layers: usize,
    /// The longest sequence that the positions are made for (RoPE scaling included).
    pub max_context_len: usize,
    /// Whether a token's keys depend on the length of its prompt (dynamic NTK RoPE), so that only
    /// prompts of one length can share a cached prefix.
    pub keys_depend_on_prompt_len: bool,
    /// The dtype of weights and activations.
    pub dtype: DType,
    /// What each layer keeps of a sequence.
    pub states: LayerStates,
    /// The routed experts; `None` for a dense model.
    pub moe: Option<MoeInfo>,
}

/// Facts about a model's routed experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoeInfo {
    /// Decoder layers that have experts, ascending. MoE layer m of captures and heat is decoder
    /// layer `layers[m]`.
    pub layers: Vec<usize>,
    /// Routed experts E of a layer.
    pub num_experts: usize,
    /// Experts per token K, without fused shared ones.
    pub top_k: usize,
}

/// The kernels of a layer in a step, in their order, with the faster ones that do not run and why.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LayerPlan {
    /// Norm, attention and addition.
    pub attention: Vec<Stage>,
    /// Norm, MLP or experts, and addition.
    pub mlp: Vec<Stage>,
}

/// What an [`Observer`] is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Observed {
    /// Hidden states as transformers counts them (`output_hidden_states`), [T, H] in the model
    /// dtype or f32: 0 = embeddings, i = after decoder layer i - 1, and the last, L, after the final
    /// norm.
    HiddenStates(usize),
    /// Router logits of a decoder layer, [T, E] f32.
    RouterLogits(usize),
}

/// Sees intermediate results of a forward pass.
pub trait Observer: Send {
    /// Called once for each result, in the order of execution. The view is of host memory and only valid now.
    fn observe(&mut self, what: Observed, data: View) -> Result<()>;

    /// Whether it wants [`Observed::HiddenStates`]. If so, each of the ranks that share the tokens keeps the whole
    /// residual stream. Otherwise each of them may keep only some of its rows.
    fn sees_hidden_states(&self) -> bool {
        true
    }
}

/// The observer of a forward pass, if there is one.
pub struct Observe<'a>(pub Option<&'a mut dyn Observer>);

impl Observe<'_> {
    /// What the observer wants to see inside the layers, if there is one.
    pub fn asks(&self) -> Option<&'static str> {
        self.0.as_ref().map(|_| "a look at hidden states and router logits")
    }

    /// Shows [`Observed::HiddenStates`] to an observer that wants them; `ex` brings it to the host.
    pub fn hidden(&mut self, index: usize, data: View<'_>, ex: &Exec) -> Result<()> {
        if !self.0.as_ref().is_some_and(|observer| observer.sees_hidden_states()) {
            return Ok(());
        }
        self.show(Observed::HiddenStates(index), data, ex)
    }

    /// Shows [`Observed::RouterLogits`]; `ex` brings it to the host.
    pub fn router(&mut self, layer: usize, data: View<'_>, ex: &Exec) -> Result<()> {
        self.show(Observed::RouterLogits(layer), data, ex)
    }

    fn show(&mut self, what: Observed, data: View<'_>, ex: &Exec) -> Result<()> {
        match &mut self.0 {
            Some(observer) if data.is_cuda() => observer.observe(what, ex.to_host(data)?.view()),
            Some(observer) => observer.observe(what, data),
            None => Ok(()),
        }
    }
}

/// Receives the logits of a step's scored rows, a few rows at a time: the logits of a long prompt would take gigabytes
/// at once.
pub trait Scorer: Send {
    /// Sees the logits [n, V] f32 of n of the [`StepViews::scored_rows`], from number `first` on. All are shown once,
    /// in their order. The view is where the model is, and only valid now.
    ///
    /// # Errors
    /// Whatever ends the step.
    fn score(&mut self, first: usize, logits: View, ex: &mut Exec) -> Result<()>;
}

/// Where a forward pass leaves logits.
pub struct LogitsOut<'a> {
    /// The logits of the rows that the step names, [R, V] f32.
    pub rows: ViewMut<'a>,
    /// What receives the logits of scored rows. Without a scorer, these logits are computed only if ranks compute
    /// logits together.
    pub scorer: Option<&'a mut dyn Scorer>,
}

impl<'a> LogitsOut<'a> {
    /// Makes the value from its parts. The scorer may have a longer lifetime, which a literal of this type would not
    /// accept.
    pub fn new<'s: 'a>(rows: ViewMut<'a>, scorer: Option<&'a mut (dyn Scorer + 's)>) -> Self {
        Self { rows, scorer: scorer.map(|scorer| scorer as &mut dyn Scorer) }
    }
}

/// A causal language model with a paged KV cache.
pub trait CausalLm: Send + Sync {
    /// The model's facts.
    fn info(&self) -> &ModelInfo;

    /// The router of MoE layer `moe_layer` (an index into [`MoeInfo::layers`]); `None` if the layer has no router, or
    /// has it inside a kernel.
    fn router(&self, moe_layer: usize) -> Option<&moe_layer::Router> {
        let _ = moe_layer;
        None
    }

    /// The experts of MoE layer `moe_layer`, if a map places them on this rank and others.
    fn placed_experts(&self, moe_layer: usize) -> Option<&moe_layer::PlacedExperts> {
        let _ = moe_layer;
        None
    }

    /// The transfers that experts in host memory have cost so far, for all layers together; `None` if all experts are
    /// on the device. It waits for the device.
    ///
    /// # Errors
    /// Any error of the device.
    fn expert_traffic(&self) -> Result<Option<ExpertTraffic>> {
        Ok(None)
    }

    /// Which kernels compute each layer in this step on this machine, and why other kernels do not. Empty for a model
    /// that does not describe its layers.
    fn plan(&self, step: &PlanStep, machine: &Machine) -> Vec<LayerPlan> {
        let _ = (step, machine);
        Vec::new()
    }

    /// The ranks that run this model's steps together, if there are several. They must be told of a step
    /// ([`begin`](crate::step_ranks::StepRanks::begin)) before [`forward`](Self::forward).
    fn ranks(&self) -> Option<&dyn crate::step_ranks::StepRanks> {
        None
    }

    /// Executes a step: writes keys and values of all rows to `kv`, and the logits of the rows that the step names to
    /// `logits.rows`. The logits of scored rows are passed to `logits.scorer`. An observer, if there is one, also gets
    /// the intermediate results of all rows; the logits' bits are the same.
    ///
    /// Token ids, replay, capture and heat of mixture-of-experts layers are in `context`.
    fn forward(
        &self,
        step: &StepViews,
        kv: &mut KvCache,
        logits: LogitsOut,
        observer: Option<&mut dyn Observer>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()>;
}
