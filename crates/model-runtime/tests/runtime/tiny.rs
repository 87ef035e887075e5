//! A small decoder for tests: attention layers and a projection each, random weights.

use candle_core::{DType, Device, Result};
use model_runtime::config::{Config, RopeConfig};
use model_runtime::{
    Attention, AttentionConfig, AttentionNames, CausalLm, DummyWeights, Embedding, Exec, KvCache, LmHead,
    LogitsOut, Mixer, MixerIo, ModelInfo, Observed, Observer, QkNorm, RmsNorm, Rope, RotatedPairs,
    StepContext, StepViews, TensorSpec,
};
use moe_kernels::{add_into, embedding_into};

pub const VOCAB: usize = 37;
const HIDDEN: usize = 24;
const LAYERS: usize = 2;

pub fn attention_config(window: Option<usize>) -> AttentionConfig {
    AttentionConfig {
        hidden_size: HIDDEN,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 8,
        rotary_dim: 8,
        rotated_pairs: RotatedPairs::Halves,
        qkv_bias: true,
        o_bias: false,
        qk_norm: QkNorm::PerHead,
        rms_norm_eps: 1e-6,
        sliding_window: window,
        softmax_scale: None,
        sinks: false,
        output_gate: false,
        zero_centred_norms: false,
    }
}

pub struct Tiny {
    info: ModelInfo,
    rope: Rope,
    embedding: Embedding,
    layers: Vec<(RmsNorm, Attention)>,
    norm: RmsNorm,
    head: LmHead,
}

impl Tiny {
    pub fn new(dtype: DType, rope: &str, window: Option<usize>) -> Result<Self> {
        let mut specs = vec![
            TensorSpec::new("embed.weight", &[VOCAB, HIDDEN]),
            TensorSpec::new("norm.weight", &[HIDDEN]),
        ];
        for l in 0..LAYERS {
            let mut add =
                |name: &str, shape: &[usize]| specs.push(TensorSpec::new(format!("{l}.{name}"), shape));
            add("norm.weight", &[HIDDEN]);
            for (p, rows) in [("q", 32), ("k", 16), ("v", 16)] {
                add(&format!("{p}_proj.weight"), &[rows, HIDDEN]);
                add(&format!("{p}_proj.bias"), &[rows]);
            }
            add("o_proj.weight", &[HIDDEN, 32]);
            add("q_norm.weight", &[8]);
            add("k_norm.weight", &[8]);
        }
        let vb = DummyWeights::new(specs, 5).var_builder(dtype, &Device::Cpu);
        let config = Config::parse(rope, "config.json")?;
        let rope = RopeConfig::from_config(&config, 8, 64)?;
        let layer = |l: usize| -> Result<(RmsNorm, Attention)> {
            let vb = vb.pp(l);
            let attention = Attention::load(attention_config(window), AttentionNames::default(), vb.clone())?;
            Ok((RmsNorm::load(HIDDEN, 1e-6, vb.pp("norm"))?, attention))
        };
        let embedding = Embedding::load(VOCAB, HIDDEN, vb.pp("embed"))?;
        Ok(Self {
            info: ModelInfo {
                vocab_size: VOCAB,
                hidden_size: HIDDEN,
                num_layers: LAYERS,
                max_context_len: rope.max_context_len(),
                keys_depend_on_prompt_len: rope.depends_on_prompt_len(),
                dtype,
                states: attention_config(window).kv_layout(dtype).layers(LAYERS),
                moe: None,
            },
            rope: Rope::new(rope),
            layers: (0..LAYERS).map(layer).collect::<Result<_>>()?,
            norm: RmsNorm::load(HIDDEN, 1e-6, vb.pp("norm"))?,
            head: LmHead::tied(&embedding),
            embedding,
        })
    }
}

impl CausalLm for Tiny {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn router(&self, _: usize) -> Option<&moe_layer::Router> {
        None
    }

    fn forward(
        &self,
        step: &StepViews,
        kv: &mut KvCache,
        logits: LogitsOut,
        mut observer: Option<&mut dyn Observer>,
        _: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let t = step.num_tokens();
        let dtype = self.info.dtype;
        let rope = self.rope.rows(step.positions, step.rope_len, ex)?;
        let mut hidden = ex.scratch(dtype, &[t, HIDDEN])?;
        let mut normed = ex.scratch(dtype, &[t, HIDDEN])?;
        let mut delta = ex.scratch(dtype, &[t, HIDDEN])?;
        self.embedding.forward_into(step.token_ids, hidden.view_mut(), ex)?;
        for (l, (norm, attention)) in self.layers.iter().enumerate() {
            if let Some(o) = observer.as_mut() {
                o.observe(Observed::HiddenStates(l), hidden.view())?;
            }
            norm.forward_into(hidden.view(), normed.view_mut(), ex)?;
            let io = MixerIo::Store { x: normed.view().into(), out: delta.view_mut() };
            attention.forward_into(io, step, &rope, kv.layer_mut(l)?, ex)?;
            add_into(delta.view(), hidden.view_mut(), ex)?;
        }
        self.norm.forward_into(hidden.view(), normed.view_mut(), ex)?;
        if let Some(o) = observer {
            o.observe(Observed::HiddenStates(LAYERS), normed.view())?;
        }
        let mut wanted = ex.scratch(dtype, &[step.num_logits(), HIDDEN])?;
        embedding_into(normed.view(), step.logits_rows, wanted.view_mut(), ex)?;
        self.head.forward_into(wanted.view(), logits.rows, ex)
    }
}
