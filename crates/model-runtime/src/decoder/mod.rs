//! The decoder that models share: embedding, layers of attention and MLP or experts, norm, projection.
//!
//! One forward for everything: bulk and chunked prefill, decode, parity. The residual stream is
//! f32 whatever the model dtype: it is small beside the weights, and rounding it in every layer is
//! most of what a bf16 run loses. Each norm also adds the block's output to it. A model differs in
//! its attention, its sizes and the names of its tensors.

mod config;
mod gate;
mod grouped_query;
mod layout;
mod load;
mod plan;
mod residual;

use std::sync::Arc;

use candle_core::{DType, Result};
use moe_comm::Communicator;
use moe_kernels::names::TensorNames;
use moe_kernels::plan::{Machine, Reason, Stage};
use moe_kernels::{
    CpuIsa, Exec, ExpertTraffic, PreNorm, ProductRows, RowsView, StepContext, View, ViewMut, embedding_into,
};
use moe_layer::{GatedMlp, PlacedExperts, PlanStep, Router, SparseMoeBlock};
use tracing::trace_span;

use crate::kv_cache::{KvCache, KvLayer, LayerState};
use crate::layers::{Embedding, LmHead, RmsNorm};
use crate::model::{CausalLm, LogitsOut, ModelInfo, Observe, Observer, Scorer};
use crate::rope::{LayerRopes, RopeRows};
use crate::run::SCORED_PIECE;
use crate::step::StepViews;

pub use config::{DecoderConfig, MoeConfig};
pub use grouped_query::GroupedQueryModel;
pub use load::DecoderOptions;
pub use plan::LayerPlan;
pub(crate) use plan::{OUTPUT, OUTPUT_ADD, linear_stage};
use residual::Residual;

/// The attention of a decoder layer.
pub trait SelfAttention: Send + Sync {
    /// The same attention with its weights in the order that a path of the CPU reads best, see
    /// [`Weight::packed`](moe_kernels::Weight::packed).
    ///
    /// # Errors
    /// No memory left.
    fn packed(self, isa: Option<CpuIsa>) -> Result<Self>
    where
        Self: Sized,
    {
        let _ = isa;
        Ok(self)
    }

    /// What the layer keeps of a sequence between two steps.
    fn state(&self) -> LayerState;

    /// Memory for the rows `dims` [T, H] that [`forward_into`](Self::forward_into) reads in such a step, in the model dtype
    /// `dtype` or as its first product takes them.
    ///
    /// # Errors
    /// No memory left.
    fn input_rows(&self, dims: &[usize], dtype: DType, ex: &Exec) -> Result<ProductRows> {
        ex.scratch(dtype, dims).map(ProductRows::Floats)
    }

    /// Attends for the rows of a step: writes what they cache to `kv`, then `out` [T, H] (model dtype or
    /// f32) from `x` [T, H] (model dtype, or as [`input_rows`](Self::input_rows) says). `rope` holds the rows' cosines and sines.
    ///
    /// # Errors
    /// Wrong dims or dtypes; another KV layout than this layer's; ranks that disagree, or died.
    fn forward_into(
        &self,
        x: RowsView,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvLayer,
        out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()>;

    /// On CUDA, leaves the sum over the ranks that share the heads to the caller from now on; whether there is one.
    fn defer_sum(&mut self) -> bool {
        false
    }

    /// Whether [`add_normed_into`](Self::add_normed_into) computes such a step with norm and addition inside its launches.
    ///
    /// # Errors
    /// The first reason why not.
    fn fits_fused(&self, step: &PlanStep, machine: &Machine) -> std::result::Result<(), Reason> {
        let _ = (step, machine);
        Err(Reason::Part { part: "an attention that takes no norm and addition into its launches" })
    }

    /// Whether [`add_into`](Self::add_into) computes such a step with the addition inside the launch of its last product.
    ///
    /// # Errors
    /// The first reason why not.
    fn fits_added(&self, step: &PlanStep, machine: &Machine) -> std::result::Result<(), Reason> {
        let _ = (step, machine);
        Err(Reason::Part { part: "an attention whose last product does not add" })
    }

    /// `residual` [T, H] f32 += what [`forward_into`](Self::forward_into) gives, added by the last product where
    /// [`fits_added`](Self::fits_added) says so.
    ///
    /// # Errors
    /// An attention that has no such form; any error of `forward_into`.
    fn add_into(
        &self,
        x: RowsView,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvLayer,
        residual: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let _ = (x, residual, step, rope, kv, ex);
        candle_core::bail!("this attention does not add its result")
    }

    /// The kernels of such a step, in their order; `fused`: with norm and addition inside.
    fn stages(&self, fused: bool, step: &PlanStep, machine: &Machine) -> Vec<Stage>;

    /// `residual` [T, H] f32 += attention(norm(`residual`)), with norm and addition in the launches of the products where
    /// [`fits_fused`](Self::fits_fused) says so.
    ///
    /// # Errors
    /// An attention that has no such form; any error of [`forward_into`](Self::forward_into).
    fn add_normed_into(
        &self,
        norm: &PreNorm<'_>,
        residual: ViewMut,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvLayer,
        ex: &mut Exec,
    ) -> Result<()> {
        let _ = (norm, residual, step, rope, kv, ex);
        candle_core::bail!("this attention is not computed together with its norm")
    }
}

enum Mlp {
    Dense(GatedMlp),
    Sparse(Box<SparseMoeBlock>),
}

struct DecoderLayer<A> {
    input_norm: RmsNorm,
    attention: A,
    post_attention_norm: RmsNorm,
    mlp: Mlp,
    /// Whether attention and MLP leave the sum over ranks to the norm that follows.
    deferred: [bool; 2],
}

impl Mlp {
    fn defer_sum(&mut self) -> bool {
        match self {
            Self::Dense(mlp) => mlp.defer_sum(),
            Self::Sparse(sparse) => sparse.defer_sum(),
        }
    }
}

/// A loaded decoder, or one rank's part of it.
pub struct Decoder<A> {
    info: ModelInfo,
    embedding: Embedding,
    layers: Vec<DecoderLayer<A>>,
    norm: RmsNorm,
    lm_head: LmHead,
    ropes: LayerRopes,
    /// The ranks that share each token, where norms add their sums.
    sums: Option<Arc<dyn Communicator>>,
    /// Whether the last layer computes its MLP for the rows alone whose logits are wanted: on the CPU, where a row has the same bits
    /// without the others, and where no other rank waits for them.
    ends_few: bool,
}

impl<A> Decoder<A> {
    /// `logits` [R, V] f32 of R `rows` of the normed stream `x` [T, H].
    fn logits_of(&self, x: View, rows: View, logits: ViewMut, ex: &mut Exec) -> Result<()> {
        let mut hidden = ex.scratch(x.dtype(), &[rows.elem_count(), self.info.hidden_size])?;
        embedding_into(x, rows, hidden.view_mut(), ex)?;
        self.lm_head.forward_into(hidden.view(), logits, ex)
    }

    /// Shows the scorer the logits of `rows` of the normed stream `x` [T, H], a piece at a time. Ranks that share the vocabulary
    /// compute them together, whoever looks.
    fn score(&self, x: View, rows: View, scorer: Option<&mut dyn Scorer>, ex: &mut Exec) -> Result<()> {
        let mut scorer = scorer;
        if scorer.is_none() && !self.lm_head.is_shared() {
            return Ok(());
        }
        for first in (0..rows.elem_count()).step_by(SCORED_PIECE) {
            let rows = rows.narrow(first, SCORED_PIECE.min(rows.elem_count() - first))?;
            let mut logits = ex.scratch(DType::F32, &[rows.elem_count(), self.info.vocab_size])?;
            self.logits_of(x, rows, logits.view_mut(), ex)?;
            if let Some(scorer) = &mut scorer {
                scorer.score(first, logits.view(), ex)?;
            }
        }
        Ok(())
    }

    /// The sparse block of MoE layer `moe_layer`.
    fn sparse(&self, moe_layer: usize) -> Option<&SparseMoeBlock> {
        let layer = *self.info.moe.as_ref()?.layers.get(moe_layer)?;
        match &self.layers.get(layer)?.mlp {
            Mlp::Sparse(sparse) => Some(sparse),
            Mlp::Dense(_) => None,
        }
    }
}

impl<A: SelfAttention> CausalLm for Decoder<A> {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn router(&self, moe_layer: usize) -> Option<&Router> {
        self.sparse(moe_layer).map(SparseMoeBlock::router)
    }

    fn placed_experts(&self, moe_layer: usize) -> Option<&PlacedExperts> {
        self.sparse(moe_layer)?.placed_experts()
    }

    fn expert_traffic(&self) -> Result<Option<ExpertTraffic>> {
        let mut all: Option<ExpertTraffic> = None;
        for layer in (0..).map_while(|layer| self.sparse(layer)) {
            if let Some(own) = layer.expert_traffic()? {
                all.get_or_insert_default().add(&own);
            }
        }
        Ok(all)
    }

    fn plan(&self, step: &PlanStep, machine: &Machine) -> Vec<LayerPlan> {
        self.layer_plans(step, machine)
    }

    fn forward(
        &self,
        step: &StepViews,
        kv: &mut KvCache,
        logits: LogitsOut,
        observer: Option<&mut dyn Observer>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let dims = [step.num_tokens(), self.info.hidden_size];
        let dtype = self.info.dtype;
        let mut observe = Observe(observer);
        let shape = step.plan_step(observe.asks(), context);
        let shared = self.shares_residual(&shape).is_ok();
        let mut residual = Residual::new(&dims, dtype, self.sums.as_deref(), shared, ex)?;
        let ropes = self.ropes.rows(step.positions, step.rope_len, ex)?;
        self.embedding.forward_into(step.token_ids, residual.stream.view_mut(), ex)?;
        observe.hidden(0, residual.stream.view(), ex)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let _span = trace_span!("layer", layer = index).entered();
            ex.mark("layer", index)?;
            let form = layer.choose(&shape, &ex.machine());
            residual.attention(layer, form, (step, ropes.layer(index)?), kv.layer_mut(index)?, ex)?;
            let next = match self.layers.get(index + 1) {
                Some(layer) => (&layer.input_norm, Some(&layer.attention)),
                None => (&self.norm, None),
            };
            let is_last = next.1.is_none();
            let mut form = form;
            if is_last && self.drops_rows(&shape) {
                if step.num_logits() == 0 {
                    return Ok(());
                }
                residual.keep(step.logits_rows, ex)?;
                form = layer.choose(&PlanStep { rows: step.num_logits(), ..shape }, &ex.machine());
            }
            let host = ex.clone();
            let mut see = |logits: View<'_>| observe.router(index, logits, &host);
            residual.mlp(layer, form, next, &mut see, context, ex)?;
            match is_last {
                false => observe.hidden(index + 1, residual.stream.view(), ex)?,
                true => observe.hidden(index + 1, residual.normed(&self.norm, ex)?, ex)?,
            }
        }
        let x = residual.normed(&self.norm, ex)?;
        ex.mark(TensorNames::USUAL.lm_head, 0)?;
        if step.num_logits() == x.rows() {
            self.lm_head.forward_into(x, logits.rows, ex)?;
        } else {
            self.logits_of(x, step.logits_rows, logits.rows, ex)?;
        }
        self.score(x, step.scored_rows, logits.scorer, ex)
    }
}
