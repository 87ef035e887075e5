//! Loading a decoder, or one rank's part of it.

use candle_core::Result;
use candle_nn::VarBuilder;
use moe_layer::{
    BackendSelection, BlockContext, BlockOptions, GatedMlp, MoePath, SharedExperts, SparseLayer,
};

use super::layout::{DENSE, SHARED};
use super::{Decoder, DecoderConfig, DecoderLayer, DecoderNames, Mlp, MoeConfig, SelfAttention};
use crate::kv_cache::KvLayout;
use crate::layers::{Embedding, LmHead, RmsNorm};
use crate::model::{ModelInfo, MoeInfo};
use crate::rope::Rope;
use crate::vocab::VocabParallel;

/// How a decoder is loaded.
#[derive(Clone, Copy, Debug)]
pub struct DecoderOptions<'a> {
    /// The path of its experts.
    pub path: MoePath,
    /// Name of the expert backend of the fused path; `None` lets the oracle choose.
    pub backend: Option<&'a str>,
    /// The rank's place, and how MoE layers cut their tokens.
    pub context: &'a BlockContext,
}

impl<A: SelfAttention> Decoder<A> {
    /// Loads the tensors of a decoder. `vb` is at the root of the checkpoint, has the model dtype and
    /// shows this rank's slices ([`DecoderConfig::layout`]); `attention` loads that of a layer, whose KV
    /// rows are those of `kv`. The oracle's choice comes along, unless there was none to make.
    ///
    /// # Errors
    /// Missing or wrongly shaped tensors; sizes that the geometry cannot cut; those of the expert path.
    pub fn load(
        config: &DecoderConfig,
        names: &DecoderNames,
        options: &DecoderOptions,
        kv: KvLayout,
        vb: VarBuilder,
        attention: impl Fn(VarBuilder) -> Result<A>,
    ) -> Result<(Self, Option<BackendSelection>)> {
        let (h, eps, context) = (config.hidden_size, config.rms_norm_eps, options.context);
        let tp = &context.groups.tp;
        let vocab = (context.geometry.tp_size > 1).then(|| VocabParallel::new(config.vocab_size, tp.clone()));
        let held = context.geometry.vocab_shard(config.vocab_size).len();
        let embedding = Embedding::load(held, h, vb.pp(names.embedding))?;
        let mut mlps = MlpLoader { config, names, options, moe_layers: 0, chosen: None };
        // In the fast mode norms add what the ranks computed.
        let sums = (context.geometry.tp_size > 1 && !vb.device().is_cpu()).then(|| tp.clone());
        let mut layers = Vec::new();
        for index in 0..config.num_layers() {
            let vb = vb.pp(names.layers).pp(index);
            let mut layer = DecoderLayer {
                input_norm: RmsNorm::load(h, eps, vb.pp(names.input_norm))?,
                attention: attention(vb.pp(names.attention))?,
                post_attention_norm: RmsNorm::load(h, eps, vb.pp(names.post_attention_norm))?,
                mlp: mlps.load(index, vb.pp(names.mlp))?,
                deferred: [false; 2],
            };
            if sums.is_some() {
                layer.deferred = [layer.attention.defer_sum(), layer.mlp.defer_sum()];
            }
            layers.push(layer);
        }
        let lm_head = match config.tie_word_embeddings {
            true => LmHead::new(embedding.weight().clone())?,
            false => LmHead::load(held, h, vb.pp(names.lm_head))?,
        };
        let rope = Rope::new(config.rope.clone());
        let decoder = Self {
            info: config.info(kv),
            embedding: embedding.with_vocab_parallel(vocab.clone()),
            layers,
            norm: RmsNorm::load(h, eps, vb.pp(names.norm))?,
            lm_head: lm_head.with_vocab_parallel(vocab),
            rope,
            sums,
        };
        Ok((decoder, mlps.chosen))
    }
}

/// Loads the MLPs of the layers, in their order.
struct MlpLoader<'a> {
    config: &'a DecoderConfig,
    names: &'a DecoderNames<'a>,
    options: &'a DecoderOptions<'a>,
    /// Sparse layers so far.
    moe_layers: usize,
    chosen: Option<BackendSelection>,
}

impl MlpLoader<'_> {
    fn load(&mut self, index: usize, vb: VarBuilder) -> Result<Mlp> {
        let (config, DecoderOptions { path, context, .. }) = (self.config, *self.options);
        let Some(moe) = config.moe.as_ref().filter(|_| config.is_sparse[index]) else {
            return Ok(Mlp::Dense(self.gated_mlp(DENSE, config.intermediate_size, vb)?));
        };
        let width = moe.shared_intermediate_size;
        let shared = |name| SharedExperts::new(self.gated_mlp(SHARED, width, vb.pp(name))?, None);
        let shared = self.names.shared_experts.filter(|_| width > 0).map(shared).transpose()?;
        let (gate, experts) = (vb.pp(self.names.gate), vb.pp(self.names.experts));
        let (sparse, selection) =
            SparseLayer::load_on(path, &self.block(moe), context, gate, experts, shared)?;
        self.moe_layers += 1;
        self.chosen = selection;
        Ok(Mlp::Sparse(sparse))
    }

    /// This rank's part of a gated MLP.
    fn gated_mlp(&self, what: &'static str, intermediate: usize, vb: VarBuilder) -> Result<GatedMlp> {
        let (config, context) = (self.config, self.options.context);
        let ranks = context.row_parallel(what, intermediate)?;
        let width = intermediate / context.geometry.tp_size;
        let mlp = GatedMlp::load(config.hidden_size, width, config.activation, vb)?;
        Ok(mlp.with_row_parallel(ranks))
    }

    fn block(&self, moe: &MoeConfig) -> BlockOptions {
        BlockOptions {
            router: moe.router.clone(),
            hidden_size: self.config.hidden_size,
            intermediate_size: moe.intermediate_size,
            activation: self.config.activation,
            layer: self.moe_layers,
            backend: self.options.backend.map(str::to_string),
        }
    }
}

impl DecoderConfig {
    fn info(&self, kv: KvLayout) -> ModelInfo {
        let moe = |moe: &MoeConfig| MoeInfo {
            layers: self.moe_layers(),
            num_experts: moe.router.num_experts,
            top_k: moe.router.top_k,
        };
        ModelInfo {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            num_layers: self.num_layers(),
            max_position_embeddings: self.max_position_embeddings,
            max_context_len: self.rope.max_context_len(),
            keys_depend_on_prompt_len: self.rope.depends_on_prompt_len(),
            kv,
            moe: self.moe.as_ref().filter(|_| self.is_sparse.contains(&true)).map(moe),
        }
    }
}
