//! The DeepSeek-V2 decoder: latent attention, then a dense MLP or experts with shared experts.
//!
//! One forward for everything: bulk and chunked prefill, decode, parity. As in the other models
//! of this workspace the residual stream is f32, and each norm also adds the block's output to it.

use candle_nn::VarBuilder;
use model_runtime::layers::{Embedding, LmHead, RmsNorm, gather_rows_into};
use model_runtime::{
    CausalLm, Exec, KvCache, MlaAttention, MlaForm, MlaNames, ModelInfo, MoeInfo, Observe, Observer, Rope,
    StepViews, View, ViewMut,
};
use moe_layer::candle::Result;
use moe_layer::{
    BackendSelection, BlockOptions, DType, GatedMlp, MoePath, Router, RouterConfig, SharedExperts,
    SparseLayer,
};
use tracing::trace_span;

use crate::config::DeepseekV2Config;

enum Mlp {
    Dense(GatedMlp),
    Sparse(SparseLayer),
}

struct DecoderLayer {
    input_norm: RmsNorm,
    attention: MlaAttention,
    post_attention_norm: RmsNorm,
    mlp: Mlp,
}

/// A loaded DeepSeek-V2 model.
pub struct DeepseekV2 {
    info: ModelInfo,
    embedding: Embedding,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    lm_head: LmHead,
    rope: Rope,
}

impl DeepseekV2 {
    /// Loads the model's tensors; `vb` is at the root of the checkpoint and has the model dtype.
    /// `backend` names the expert backend of the fused path; `None` lets the oracle choose. Its choice
    /// comes along, unless there was none to make.
    pub fn load(
        config: &DeepseekV2Config,
        path: MoePath,
        mla: MlaForm,
        backend: Option<&str>,
        vb: VarBuilder,
    ) -> Result<(Self, Option<BackendSelection>)> {
        let (h, eps) = (config.hidden_size, config.rms_norm_eps as f64);
        let model = vb.pp("model");
        let embedding = Embedding::load(config.vocab_size, h, model.pp("embed_tokens"))?;
        let mut loader = MlpLoader { config, path, backend, moe_layers: Vec::new(), chosen: None };
        let mut layers = Vec::new();
        for index in 0..config.num_hidden_layers {
            let vb = model.pp("layers").pp(index);
            layers.push(DecoderLayer {
                input_norm: RmsNorm::load(h, eps, vb.pp("input_layernorm"))?,
                attention: MlaAttention::load(config.mla(mla), MlaNames::default(), vb.pp("self_attn"))?,
                post_attention_norm: RmsNorm::load(h, eps, vb.pp("post_attention_layernorm"))?,
                mlp: loader.load(index, vb.pp("mlp"))?,
            });
        }
        let lm_head = match config.tie_word_embeddings {
            true => LmHead::new(embedding.weight().clone())?,
            false => LmHead::load(config.vocab_size, h, vb.pp("lm_head"))?,
        };
        let rope = Rope::new(config.rope.clone());
        let model = Self {
            info: info(config, mla, loader.moe_layers, vb.dtype()),
            embedding,
            layers,
            norm: RmsNorm::load(h, eps, model.pp("norm"))?,
            lm_head,
            rope,
        };
        Ok((model, loader.chosen))
    }
}

/// Loads the MLPs of the layers, in their order.
struct MlpLoader<'a> {
    config: &'a DeepseekV2Config,
    path: MoePath,
    backend: Option<&'a str>,
    /// The sparse layers so far.
    moe_layers: Vec<usize>,
    chosen: Option<BackendSelection>,
}

impl MlpLoader<'_> {
    fn load(&mut self, index: usize, vb: VarBuilder) -> Result<Mlp> {
        let (config, h) = (self.config, self.config.hidden_size);
        let router = config.router.as_ref().filter(|_| config.is_sparse.get(index) == Some(&true));
        let Some(router) = router else {
            let mlp = GatedMlp::load(h, config.intermediate_size, config.activation, vb)?;
            return Ok(Mlp::Dense(mlp));
        };
        let shared = match config.shared_intermediate_size() {
            0 => None,
            width => Some(SharedExperts::load(h, width, config.activation, vb.pp("shared_experts"), None)?),
        };
        let options = self.options(router);
        let (sparse, selection) =
            SparseLayer::load(self.path, &options, vb.pp("gate"), vb.pp("experts"), shared)?;
        self.moe_layers.push(index);
        self.chosen = selection;
        Ok(Mlp::Sparse(sparse))
    }

    fn options(&self, router: &RouterConfig) -> BlockOptions {
        BlockOptions {
            router: router.clone(),
            hidden_size: self.config.hidden_size,
            intermediate_size: self.config.moe_intermediate_size,
            activation: self.config.activation,
            layer: self.moe_layers.len(),
            backend: self.backend.map(str::to_string),
        }
    }
}

impl CausalLm for DeepseekV2 {
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
        let first = self.layers.first().map_or(&self.norm, |layer| &layer.input_norm);
        first.forward_into(residual.view(), x.view_mut(), ex)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let _span = trace_span!("layer", layer = index).entered();
            let kv = kv.layer_mut(index)?;
            layer.attention.forward_into(x.view(), step, &rope, kv, delta.view_mut(), ex)?;
            let norm = &layer.post_attention_norm;
            norm.add_forward_into(delta.view(), residual.view_mut(), x.view_mut(), ex)?;
            match &layer.mlp {
                Mlp::Dense(mlp) => {
                    trace_span!("mlp").in_scope(|| mlp.forward_into(x.view(), delta.view_mut(), ex))?;
                }
                Mlp::Sparse(sparse) => {
                    let host = ex.handle();
                    let mut see = |logits: View<'_>| observe.router(index, logits, &host);
                    sparse.forward_observed_into(x.view(), delta.view_mut(), &mut see, ex)?;
                }
            }
            let next = self.layers.get(index + 1).map_or(&self.norm, |layer| &layer.input_norm);
            next.add_forward_into(delta.view(), residual.view_mut(), x.view_mut(), ex)?;
            let is_last = index + 1 == self.layers.len();
            observe.hidden(index + 1, if is_last { x.view() } else { residual.view() }, ex)?;
        }
        if step.num_logits() == step.num_tokens() {
            return self.lm_head.forward_into(x.view(), logits, ex);
        }
        let mut last = ex.scratch(dtype, &[step.num_logits(), self.info.hidden_size])?;
        gather_rows_into(x.view(), step.logits_rows, last.view_mut(), ex)?;
        self.lm_head.forward_into(last.view(), logits, ex)
    }
}

fn info(config: &DeepseekV2Config, mla: MlaForm, layers: Vec<usize>, dtype: DType) -> ModelInfo {
    let moe = |router: &RouterConfig| MoeInfo {
        num_experts: router.num_experts,
        top_k: router.top_k,
        layers: layers.clone(),
    };
    ModelInfo {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        num_layers: config.num_hidden_layers,
        max_position_embeddings: config.max_position_embeddings,
        max_context_len: config.rope.max_context_len(),
        keys_depend_on_prompt_len: config.rope.depends_on_prompt_len(),
        kv: config.mla(mla).kv_layout(config.num_hidden_layers, dtype),
        moe: config.router.as_ref().filter(|_| !layers.is_empty()).map(moe),
    }
}
