//! The decoder that models share: embedding, layers of attention and MLP or experts, norm, projection.
//!
//! One forward for everything: bulk and chunked prefill, decode, parity. The residual stream is
//! f32 whatever the model dtype: it is small beside the weights, and rounding it in every layer is
//! most of what a bf16 run loses. Each norm also adds the block's output to it. A model differs in
//! its attention, its sizes and the names of its tensors.

mod config;
#[cfg(feature = "cuda")]
mod fused;
mod layout;
mod load;

use std::sync::Arc;

use candle_core::{DType, Result};
use moe_comm::Communicator;
use moe_kernels::{Exec, Scratch, StepContext, View, ViewMut};
use moe_layer::{GatedMlp, Router, SparseLayer};
use tracing::trace_span;

use crate::kv_cache::{KvCache, KvLayer};
use crate::layers::{Embedding, LmHead, RmsNorm, gather_rows_into};
use crate::model::{CausalLm, ModelInfo, Observe, Observer};
use crate::rope::{Rope, RopeRows};
use crate::step::StepViews;

pub use config::{DecoderConfig, DecoderNames, MoeConfig};
pub use load::DecoderOptions;

/// The attention of a decoder layer.
pub trait SelfAttention: Send + Sync {
    /// Attends for the rows of a step: writes what they cache to `kv`, then `out` [T, H] (model dtype or
    /// f32) from `x` [T, H] (model dtype). `rope` holds the rows' cosines and sines.
    ///
    /// # Errors
    /// Wrong dims or dtypes; another KV layout than this layer's; ranks that disagree, or died.
    fn forward_into(
        &self,
        x: View,
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

    /// Whether [`add_normed_into`](Self::add_normed_into) runs this layer for so many tokens.
    #[cfg(feature = "cuda")]
    fn fuses(&self, tokens: usize, ex: &Exec) -> bool {
        let _ = (tokens, ex);
        false
    }

    /// `residual` [T, H] f32 += attention(norm(`residual`)): on CUDA, for a few tokens, with norm and
    /// addition in the launches of the products.
    ///
    /// # Errors
    /// What [`fuses`](Self::fuses) refuses; those of [`forward_into`](Self::forward_into).
    #[cfg(feature = "cuda")]
    fn add_normed_into(
        &self,
        norm: &moe_kernels::cuda::PreNorm<'_>,
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
    Sparse(SparseLayer),
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
    rope: Rope,
    /// The ranks that share each token, where norms add their sums.
    sums: Option<Arc<dyn Communicator>>,
}

impl<A: SelfAttention> CausalLm for Decoder<A> {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn router(&self, moe_layer: usize) -> Option<&Router> {
        let layer = *self.info.moe.as_ref()?.layers.get(moe_layer)?;
        match &self.layers.get(layer)?.mlp {
            Mlp::Sparse(sparse) => sparse.router(),
            Mlp::Dense(_) => None,
        }
    }

    fn forward(
        &self,
        step: &StepViews,
        kv: &mut KvCache,
        logits: ViewMut,
        observer: Option<&mut dyn Observer>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let dims = [step.num_tokens(), self.info.hidden_size];
        let dtype = self.info.kv.dtype;
        let mut observe = Observe(observer);
        let mut residual = ex.scratch(DType::F32, &dims)?;
        let mut delta = ex.scratch(DType::F32, &dims)?;
        let mut x = ex.scratch(dtype, &dims)?;
        let rope = self.rope.rows(step.positions, step.rope_len, ex)?;
        self.embedding.forward_into(step.token_ids, residual.view_mut(), ex)?;
        observe.hidden(0, residual.view(), ex)?;
        #[cfg(feature = "cuda")]
        if observe.is_nobody() && self.fuses(step, context, ex) {
            self.add_layers_into(step, &rope, kv, residual.view_mut(), context, ex)?;
            ex.mark("lm_head", 0)?;
            self.norm.forward_into(residual.view(), x.view_mut(), ex)?;
            return self.lm_head.forward_into(x.view(), logits, ex);
        }
        let first = self.layers.first().map_or(&self.norm, |layer| &layer.input_norm);
        first.forward_into(residual.view(), x.view_mut(), ex)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let _span = trace_span!("layer", layer = index).entered();
            ex.mark("layer", index)?;
            let kv = kv.layer_mut(index)?;
            layer.attention.forward_into(x.view(), step, &rope, kv, delta.view_mut(), ex)?;
            let norm = &layer.post_attention_norm;
            self.add_norm(norm, layer.deferred[0], [&mut delta, &mut residual, &mut x], ex)?;
            let next = self.layers.get(index + 1).map_or(&self.norm, |layer| &layer.input_norm);
            #[cfg(feature = "cuda")]
            if observe.is_nobody() && fused::fuses_next_norm(&layer.mlp, dims[0], context, ex) {
                fused::add_next_norm(&layer.mlp, next, residual.view_mut(), &mut x, context, ex)?;
                continue;
            }
            match &layer.mlp {
                #[cfg(feature = "cuda")]
                mlp if observe.is_nobody() && fused::fuses_routing(mlp, dims[0], context, ex) => {
                    fused::forward_partial_into(mlp, x.view(), delta.view_mut(), context, ex)?;
                }
                Mlp::Dense(mlp) => {
                    trace_span!("mlp").in_scope(|| mlp.forward_into(x.view(), delta.view_mut(), ex))?;
                }
                Mlp::Sparse(sparse) => {
                    let host = ex.clone();
                    let mut see = |logits: View<'_>| observe.router(index, logits, &host);
                    sparse.forward_observed_into(x.view(), delta.view_mut(), &mut see, context, ex)?;
                }
            }
            self.add_norm(next, layer.deferred[1], [&mut delta, &mut residual, &mut x], ex)?;
            let is_last = index + 1 == self.layers.len();
            observe.hidden(index + 1, if is_last { x.view() } else { residual.view() }, ex)?;
        }
        ex.mark("lm_head", 0)?;
        if step.num_logits() == step.num_tokens() {
            return self.lm_head.forward_into(x.view(), logits, ex);
        }
        let mut last = ex.scratch(dtype, &[step.num_logits(), self.info.hidden_size])?;
        gather_rows_into(x.view(), step.logits_rows, last.view_mut(), ex)?;
        self.lm_head.forward_into(last.view(), logits, ex)
    }
}

impl<A> Decoder<A> {
    /// `residual` += `delta`, of which ranks may hold parts, then `x` = norm(`residual`).
    fn add_norm(
        &self,
        norm: &RmsNorm,
        deferred: bool,
        [delta, residual, x]: [&mut Scratch; 3],
        ex: &mut Exec,
    ) -> Result<()> {
        match &self.sums {
            Some(ranks) if deferred => {
                norm.add_parts_into(ranks.as_ref(), delta.view_mut(), residual.view_mut(), x.view_mut(), ex)
            }
            _ => norm.add_forward_into(delta.view(), residual.view_mut(), x.view_mut(), ex),
        }
    }
}
