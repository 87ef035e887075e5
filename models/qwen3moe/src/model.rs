//! The Qwen3-MoE decoder: a composition of runtime modules and sparse blocks.
//!
//! One forward for everything: bulk and chunked prefill, decode, parity. The residual stream is
//! f32 whatever the model dtype: it is small beside the weights, and rounding it in every layer is
//! most of what a bf16 run loses. Each norm also adds the block's output to it.

use candle_nn::VarBuilder;
#[cfg(feature = "cuda")]
use model_runtime::RopeRows;
use model_runtime::attention::{Attention, AttentionConfig, AttentionNames};
use model_runtime::layers::{Embedding, LmHead, RmsNorm, gather_rows_into};
use model_runtime::{
    CausalLm, Exec, KvCache, KvLayout, ModelInfo, MoeInfo, Observe, Observer, Rope, StepViews, View, ViewMut,
    VocabParallel,
};
use moe_layer::candle::Result;
use moe_layer::{
    BackendSelection, BlockContext, BlockOptions, DType, GatedMlp, MoePath, Router, RowParallel, SparseLayer,
};
use tracing::trace_span;

use crate::config::Qwen3MoeConfig;

enum Mlp {
    Dense(GatedMlp),
    Sparse(SparseLayer),
}

struct DecoderLayer {
    input_norm: RmsNorm,
    attention: Attention,
    post_attention_norm: RmsNorm,
    mlp: Mlp,
}

/// A loaded Qwen3-MoE model.
pub struct Qwen3Moe {
    info: ModelInfo,
    embedding: Embedding,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    lm_head: LmHead,
    rope: Rope,
}

impl Qwen3Moe {
    /// Loads the model's tensors; `vb` is at the root of the checkpoint and has the model dtype.
    /// `backend` names the expert backend of the fused path; `None` lets the oracle choose. Its choice
    /// comes along, unless there was none to make.
    pub fn load(
        config: &Qwen3MoeConfig,
        path: MoePath,
        backend: Option<&str>,
        vb: VarBuilder,
    ) -> Result<(Self, Option<BackendSelection>)> {
        let context = BlockContext { sliced_weights: true, ..BlockContext::default() };
        Self::load_on(config, path, backend, &context, vb)
    }

    /// Loads the part of a rank. `vb` shows its slices ([`Qwen3MoeConfig::slices`]).
    ///
    /// # Errors
    /// Missing or wrongly shaped tensors; sizes that the geometry cannot cut.
    pub fn load_on(
        config: &Qwen3MoeConfig,
        path: MoePath,
        backend: Option<&str>,
        context: &BlockContext,
        vb: VarBuilder,
    ) -> Result<(Self, Option<BackendSelection>)> {
        let (h, eps) = (config.hidden_size, config.rms_norm_eps as f64);
        let model = vb.pp("model");
        let split = Split::new(config, context)?;
        let embedding = Embedding::load(split.vocab, h, model.pp("embed_tokens"))?;
        let mut layers = Vec::new();
        let mut chosen = None;
        let mut moe_layers = Vec::new();
        for (index, sparse) in config.is_sparse.iter().enumerate() {
            let vb = model.pp("layers").pp(index);
            let mlp = if *sparse {
                let options = block_options(config, moe_layers.len(), backend);
                let vb = vb.pp("mlp");
                let (gate, experts) = (vb.pp("gate"), vb.pp("experts"));
                let (sparse, selection) = SparseLayer::load_on(path, &options, context, gate, experts, None)?;
                moe_layers.push(index);
                chosen = selection;
                Mlp::Sparse(sparse)
            } else {
                let mlp = GatedMlp::load(h, split.dense, config.activation, vb.pp("mlp"))?;
                Mlp::Dense(match &split.ranks {
                    Some(Ranks { dense: Some(dense), .. }) => mlp.with_row_parallel(dense.clone()),
                    _ => mlp,
                })
            };
            let attention =
                Attention::load(split.attention.clone(), AttentionNames::default(), vb.pp("self_attn"))?;
            layers.push(DecoderLayer {
                input_norm: RmsNorm::load(h, eps, vb.pp("input_layernorm"))?,
                attention: match &split.ranks {
                    Some(ranks) => attention.with_row_parallel(ranks.attention.clone()),
                    None => attention,
                },
                post_attention_norm: RmsNorm::load(h, eps, vb.pp("post_attention_layernorm"))?,
                mlp,
            });
        }
        let lm_head = match config.tie_word_embeddings {
            true => LmHead::new(embedding.weight().clone())?,
            false => LmHead::load(split.vocab, h, vb.pp("lm_head"))?,
        };
        let (embedding, lm_head) = match &split.ranks {
            Some(Ranks { vocab, .. }) => {
                (embedding.with_vocab_parallel(vocab.clone()), lm_head.with_vocab_parallel(vocab.clone()))
            }
            None => (embedding, lm_head),
        };
        let rope = Rope::new(config.rope.clone());
        let model = Self {
            info: info(config, split.attention.num_kv_heads, moe_layers, &rope, vb.dtype()),
            embedding,
            layers,
            norm: RmsNorm::load(h, eps, model.pp("norm"))?,
            lm_head,
            rope,
        };
        Ok((model, chosen))
    }
}

impl CausalLm for Qwen3Moe {
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
        #[cfg(feature = "cuda")]
        if observe.is_nobody() && self.fuses(step, ex) {
            self.add_layers_into(step, &rope, kv, residual.view_mut(), ex)?;
            self.norm.forward_into(residual.view(), x.view_mut(), ex)?;
            return self.lm_head.forward_into(x.view(), logits, ex);
        }
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

/// Decode steps of a few tokens on CUDA: four launches a layer, with norms and additions inside.
#[cfg(feature = "cuda")]
impl Qwen3Moe {
    fn fuses(&self, step: &StepViews, ex: &Exec) -> bool {
        let tokens = step.num_tokens();
        let layer_fuses = |layer: &DecoderLayer| {
            let block = match &layer.mlp {
                Mlp::Dense(_) => None,
                Mlp::Sparse(sparse) => sparse.block(),
            };
            layer.attention.fuses(tokens, ex) && block.is_some_and(|block| block.fuses(tokens, ex))
        };
        step.one_row_each && step.num_logits() == tokens && self.layers.iter().all(layer_fuses)
    }

    fn add_layers_into(
        &self,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvCache,
        mut residual: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        for (index, layer) in self.layers.iter().enumerate() {
            let kv = kv.layer_mut(index)?;
            layer.input_norm.with_pre_norm(|norm| {
                layer.attention.add_normed_into(norm, residual.reborrow(), step, rope, kv, ex)
            })?;
            if let Mlp::Sparse(sparse) = &layer.mlp
                && let Some(block) = sparse.block()
            {
                let norm = &layer.post_attention_norm;
                norm.with_pre_norm(|norm| block.add_normed_into(norm, residual.reborrow(), ex))?;
            }
        }
        Ok(())
    }
}

fn block_options(config: &Qwen3MoeConfig, layer: usize, backend: Option<&str>) -> BlockOptions {
    BlockOptions {
        router: config.router.clone(),
        hidden_size: config.hidden_size,
        intermediate_size: config.moe_intermediate_size,
        activation: config.activation,
        layer,
        backend: backend.map(str::to_string),
    }
}

/// This rank's sizes, and the ranks that share them.
struct Split {
    attention: AttentionConfig,
    vocab: usize,
    dense: usize,
    ranks: Option<Ranks>,
}

/// What tensor parallelism puts together.
struct Ranks {
    attention: RowParallel,
    /// With dense layers.
    dense: Option<RowParallel>,
    vocab: VocabParallel,
}

impl Split {
    fn new(config: &Qwen3MoeConfig, context: &BlockContext) -> Result<Self> {
        let (geometry, tp) = (&context.geometry, &context.groups.tp);
        let heads = geometry.attention_heads(config.num_attention_heads, config.num_key_value_heads)?;
        let whole = attention_config(config);
        let attention =
            AttentionConfig { num_heads: heads.heads.len(), num_kv_heads: heads.kv_heads.len(), ..whole };
        let width = config.num_attention_heads * config.head_dim;
        let ranks = || -> Result<Ranks> {
            let output = geometry.row_shard("the width of all query heads", width)?;
            let dense = || -> Result<RowParallel> {
                let shard = geometry.row_shard("intermediate_size", config.intermediate_size)?;
                RowParallel::new(&shard, tp.clone())
            };
            Ok(Ranks {
                attention: RowParallel::new(&output, tp.clone())?,
                dense: config.is_sparse.contains(&false).then(dense).transpose()?,
                vocab: VocabParallel::new(config.vocab_size, tp.clone()),
            })
        };
        Ok(Self {
            attention,
            vocab: geometry.vocab_shard(config.vocab_size).len(),
            dense: config.intermediate_size / geometry.tp_size,
            ranks: (geometry.tp_size > 1).then(ranks).transpose()?,
        })
    }
}

fn attention_config(config: &Qwen3MoeConfig) -> AttentionConfig {
    AttentionConfig {
        hidden_size: config.hidden_size,
        num_heads: config.num_attention_heads,
        num_kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        qkv_bias: config.attention_bias,
        o_bias: config.attention_bias,
        qk_norm: true,
        rms_norm_eps: config.rms_norm_eps as f64,
        sliding_window: config.sliding_window,
        softmax_scale: None,
    }
}

fn info(
    config: &Qwen3MoeConfig,
    num_kv_heads: usize,
    layers: Vec<usize>,
    rope: &Rope,
    dtype: DType,
) -> ModelInfo {
    ModelInfo {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        num_layers: config.num_hidden_layers,
        max_position_embeddings: config.max_position_embeddings,
        max_context_len: rope.config().max_context_len(),
        keys_depend_on_prompt_len: rope.config().depends_on_prompt_len(),
        kv: KvLayout {
            num_layers: config.num_hidden_layers,
            num_kv_heads,
            head_dim: config.head_dim,
            value_dim: Some(config.head_dim),
            dtype,
        },
        moe: (!layers.is_empty()).then_some(MoeInfo {
            layers,
            num_experts: config.router.num_experts,
            top_k: config.router.top_k,
        }),
    }
}
