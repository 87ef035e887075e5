//! Qwen3-MoE as candle-transformers 0.11.1 has it, with its MoE block replaced by [`SparseMoeBlock`].

use candle_core::{D, Result, Tensor};
use candle_nn::kv_cache::ConcatKvCache;
use candle_nn::{Linear, Module, RmsNorm, VarBuilder, linear_no_bias, rms_norm};
use candle_transformers::models::qwen3_moe::Config;
use candle_transformers::utils::{build_additive_causal_mask, repeat_kv};
use moe_layer::{Activation, BlockOptions, RouterConfig, SparseMoeBlock, load_block};

/// The block of a layer. `mlp` is the prefix of its tensors: `gate.weight`, `experts.{e}.gate_proj.weight`, ..
fn moe_block(cfg: &Config, layer: usize, mlp: VarBuilder) -> Result<SparseMoeBlock> {
    let router = RouterConfig::new(cfg.num_experts, cfg.num_experts_per_tok);
    let options = BlockOptions {
        router: RouterConfig { renormalize: cfg.norm_topk_prob, ..router },
        hidden_size: cfg.hidden_size,
        intermediate_size: cfg.moe_intermediate_size,
        activation: Activation::SwiGlu,
        layer,
        backend: None,
    };
    Ok(load_block(&options, mlp.pp("gate"), mlp.pp("experts"))?.0)
}

/// Cosines and sines of all positions, [S, D/2].
struct Rope {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    fn new(cfg: &Config, vb: &VarBuilder) -> Result<Self> {
        let dim = cfg.head_dim;
        let positions = cfg.max_position_embeddings;
        let frequency = |i| 1f32 / cfg.rope_theta.powf(i as f64 / dim as f64) as f32;
        let frequencies: Vec<f32> = (0..dim).step_by(2).map(frequency).collect();
        let frequencies = Tensor::from_vec(frequencies, (1, dim / 2), vb.device())?;
        let position = Tensor::arange(0f32, positions as f32, vb.device())?.reshape((positions, 1))?;
        let angles = position.matmul(&frequencies)?;
        Ok(Self { cos: angles.cos()?.to_dtype(vb.dtype())?, sin: angles.sin()?.to_dtype(vb.dtype())? })
    }

    /// Rotates `x` [B, heads, S, D], whose first row is at position `offset`.
    fn apply(&self, x: &Tensor, offset: usize) -> Result<Tensor> {
        let rows = x.dim(2)?;
        let cos = self.cos.narrow(0, offset, rows)?;
        let sin = self.sin.narrow(0, offset, rows)?;
        candle_nn::rotary_emb::rope(&x.contiguous()?, &cos, &sin)
    }
}

struct Layer {
    norms: [RmsNorm; 2],
    qkv: [Linear; 3],
    qk_norms: [RmsNorm; 2],
    out: Linear,
    kv: ConcatKvCache,
    /// The one line that differs from candle-transformers.
    moe: SparseMoeBlock,
}

impl Layer {
    fn new(cfg: &Config, layer: usize, vb: VarBuilder) -> Result<Self> {
        let attn = vb.pp("self_attn");
        let eps = cfg.rms_norm_eps;
        let d = cfg.head_dim;
        let q = cfg.num_attention_heads * d;
        let kv = cfg.num_key_value_heads * d;
        let linear = |name, rows| linear_no_bias(cfg.hidden_size, rows, attn.pp(name));
        let norm = |name| rms_norm(cfg.hidden_size, eps, vb.pp(name));
        Ok(Self {
            norms: [norm("input_layernorm")?, norm("post_attention_layernorm")?],
            qkv: [linear("q_proj", q)?, linear("k_proj", kv)?, linear("v_proj", kv)?],
            qk_norms: [rms_norm(d, eps, attn.pp("q_norm"))?, rms_norm(d, eps, attn.pp("k_norm"))?],
            out: linear_no_bias(q, cfg.hidden_size, attn.pp("o_proj"))?,
            kv: ConcatKvCache::new(2),
            moe: moe_block(cfg, layer, vb.pp("mlp"))?,
        })
    }

    fn attention(&mut self, x: &Tensor, mask: Option<&Tensor>, offset: usize, rope: &Rope) -> Result<Tensor> {
        let (b, s, _) = x.dims3()?;
        let d = rope.cos.dim(1)? * 2;
        let heads =
            |linear: &Linear| linear.forward(x)?.reshape((b, s, (), d))?.transpose(1, 2)?.contiguous();
        let [q, k, v] = &self.qkv;
        let q = heads(q)?;
        let k = heads(k)?;
        let v = heads(v)?;
        let q = rope.apply(&self.qk_norms[0].forward(&q)?, offset)?;
        let k = rope.apply(&self.qk_norms[1].forward(&k)?, offset)?;
        let (k, v) = self.kv.append(&k, &v)?;
        let groups = q.dim(1)? / k.dim(1)?;
        let k = repeat_kv(k, groups)?.contiguous()?;
        let v = repeat_kv(v, groups)?.contiguous()?;
        let scores = (q.matmul(&k.transpose(2, 3)?)? / (d as f64).sqrt())?;
        let scores = mask.map_or(Ok(scores.clone()), |mask| scores.broadcast_add(mask))?;
        let mixed = candle_nn::ops::softmax_last_dim(&scores)?.matmul(&v)?;
        self.out.forward(&mixed.transpose(1, 2)?.reshape((b, s, ()))?)
    }

    /// `x` [B, S, H]; the block takes it as it is.
    fn forward(&mut self, x: &Tensor, mask: Option<&Tensor>, offset: usize, rope: &Rope) -> Result<Tensor> {
        let attended = self.attention(&self.norms[0].forward(x)?, mask, offset, rope)?;
        let x = (x + attended)?;
        &x + self.moe.forward(&self.norms[1].forward(&x)?)?
    }
}

/// The model, with the interface of candle-transformers' `ModelForCausalLM`.
pub struct Model {
    embed: candle_nn::Embedding,
    rope: Rope,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
}

impl Model {
    /// From the tensors of a checkpoint.
    pub fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        let layers = vb.pp("model.layers");
        Ok(Self {
            embed: candle_nn::embedding(cfg.vocab_size, cfg.hidden_size, vb.pp("model.embed_tokens"))?,
            rope: Rope::new(cfg, &vb)?,
            layers: (0..cfg.num_hidden_layers)
                .map(|i| Layer::new(cfg, i, layers.pp(i)))
                .collect::<Result<_>>()?,
            norm: rms_norm(cfg.hidden_size, cfg.rms_norm_eps, vb.pp("model.norm"))?,
            head: linear_no_bias(cfg.hidden_size, cfg.vocab_size, vb.pp("lm_head"))?,
        })
    }

    /// Logits [B, 1, V] of the last of the tokens `ids` [B, S], which follow `offset` earlier ones.
    pub fn forward(&mut self, ids: &Tensor, offset: usize) -> Result<Tensor> {
        let s = ids.dim(D::Minus1)?;
        let dtype = self.rope.cos.dtype();
        let mask = match s {
            1 => None,
            _ => Some(build_additive_causal_mask(s, offset, None, ids.device(), dtype)?),
        };
        let mut x = self.embed.forward(ids)?;
        for layer in &mut self.layers {
            x = layer.forward(&x, mask.as_ref(), offset, &self.rope)?;
        }
        self.norm.forward(&x.narrow(1, s - 1, 1)?)?.apply(&self.head)
    }

    /// Forgets the sequences.
    pub fn clear_kv_cache(&mut self) {
        self.layers.iter_mut().for_each(|layer| layer.kv.reset());
    }
}
