//! Qwen3-MoE's config.json, with the defaults of transformers 5.17, and the tensors it implies.

use candle_core::DType;
use model_runtime::checkpoint::TensorSpec;
use model_runtime::config::{Config, ConfigError, RopeConfig, checked_product, limits};
use model_runtime::{Geometry, GeometryError, TensorSlice};
use moe_layer::{Activation, RouterConfig};

/// Everything a Qwen3-MoE config says that changes the forward pass.
#[derive(Clone, Debug)]
pub struct Qwen3MoeConfig {
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream, H.
    pub hidden_size: usize,
    /// Width of dense layers' MLPs.
    pub intermediate_size: usize,
    /// Width of one expert's MLP, I.
    pub moe_intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Whether q, k, v and o projections have a bias.
    pub attention_bias: bool,
    /// Window of every layer's attention, if `use_sliding_window`.
    pub sliding_window: Option<usize>,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Whether lm_head is the embedding.
    pub tie_word_embeddings: bool,
    /// Activation of dense MLPs and experts.
    pub activation: Activation,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Number of experts, E.
    pub num_experts: usize,
    /// Routing.
    pub router: RouterConfig,
    /// Per layer: whether its MLP is a sparse block.
    pub is_sparse: Vec<bool>,
    /// The dtype that the config names.
    pub dtype: Option<DType>,
}

impl Qwen3MoeConfig {
    /// Reads and validates a config. Nothing is allocated from its sizes before they are bounded.
    pub fn new(config: &Config) -> Result<Self, ConfigError> {
        let model_type = config.string(&["model_type"])?;
        if model_type != "qwen3_moe" {
            return Err(config.unsupported(
                format!("model_type {model_type:?}"),
                "; this program runs model_type \"qwen3_moe\"",
            ));
        }
        config.refuse_quantization()?;
        let width = |key: &str, default| config.size_or(&[key], default, limits::WIDTH);
        let hidden_size = width("hidden_size", 2048)?;
        let num_attention_heads = config.size_or(&["num_attention_heads"], 32, limits::HEADS)?;
        let num_key_value_heads = config.size_or(&["num_key_value_heads"], 4, limits::HEADS)?;
        if num_attention_heads % num_key_value_heads != 0 {
            return Err(config.invalid(
                "num_key_value_heads",
                &format!("a divisor of num_attention_heads = {num_attention_heads}"),
                num_key_value_heads,
            ));
        }
        let head_dim =
            config.size_or(&["head_dim"], hidden_size.div_euclid(num_attention_heads), limits::HEAD_DIM)?;
        if head_dim == 0 || head_dim % 2 != 0 {
            return Err(config.invalid("head_dim", "an even number above 0, for rotary embedding", head_dim));
        }
        // Absent means 4096; an explicit null means no window, also with use_sliding_window.
        let sliding_window = match config.object().get("sliding_window") {
            None => Some(4096),
            Some(_) => config.opt_size(&["sliding_window"], limits::POSITIONS)?,
        };
        let use_sliding_window = config.bool_or(&["use_sliding_window"], false)?;
        let rms_norm_eps = config.float_or(&["rms_norm_eps"], 1e-6)?;
        if rms_norm_eps < 0. {
            return Err(config.invalid("rms_norm_eps", "a number of at least 0", rms_norm_eps));
        }
        let max_position_embeddings =
            config.size_or(&["max_position_embeddings"], 32768, limits::POSITIONS)?;
        let this = Self {
            vocab_size: config.size_or(&["vocab_size"], 151936, limits::VOCAB)?,
            hidden_size,
            intermediate_size: width("intermediate_size", 6144)?,
            moe_intermediate_size: width("moe_intermediate_size", 768)?,
            num_hidden_layers: config.size_or(&["num_hidden_layers"], 24, limits::LAYERS)?,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            attention_bias: config.bool_or(&["attention_bias"], false)?,
            sliding_window: sliding_window.filter(|_| use_sliding_window),
            max_position_embeddings,
            rms_norm_eps: rms_norm_eps as f32,
            tie_word_embeddings: config.bool_or(&["tie_word_embeddings"], false)?,
            activation: config.activation()?,
            rope: RopeConfig::from_config(config, head_dim, max_position_embeddings)?,
            num_experts: config.size_or(&["num_experts", "num_local_experts"], 128, limits::EXPERTS)?,
            router: config.router()?,
            is_sparse: sparse_layers(config)?,
            dtype: config.dtype()?,
        };
        this.check_sizes(config)?;
        Ok(this)
    }

    /// Number of sparse layers.
    pub fn num_moe_layers(&self) -> usize {
        self.is_sparse.iter().filter(|sparse| **sparse).count()
    }

    /// The tensors of a checkpoint. `packed(layer)` says whether that layer stores its experts as
    /// 3-D tensors, as transformers 5 writes them, or one by one, as the hub has them.
    pub fn tensors(&self, packed: impl Fn(usize) -> bool) -> Vec<TensorSpec> {
        let h = self.hidden_size;
        let mut list = vec![TensorSpec::new("model.embed_tokens.weight", &[self.vocab_size, h])];
        for (layer, sparse) in self.is_sparse.iter().enumerate() {
            let prefix = format!("model.layers.{layer}");
            self.attention_tensors(&prefix, &mut list);
            if *sparse {
                self.sparse_tensors(&format!("{prefix}.mlp"), packed(layer), &mut list);
            } else {
                mlp_tensors(&format!("{prefix}.mlp"), h, self.intermediate_size, &mut list);
            }
        }
        list.push(TensorSpec::new("model.norm.weight", &[h]));
        if !self.tie_word_embeddings {
            list.push(TensorSpec::new("lm_head.weight", &[self.vocab_size, h]));
        }
        list
    }

    /// The parts of those tensors that the rank of this geometry holds; the others it holds whole.
    ///
    /// # Errors
    /// Sizes that the geometry cannot cut.
    pub fn slices(
        &self,
        geometry: &Geometry,
        packed: impl Fn(usize) -> bool,
    ) -> Result<Vec<TensorSlice>, GeometryError> {
        crate::slices::slices(self, geometry, packed)
    }

    fn attention_tensors(&self, prefix: &str, list: &mut Vec<TensorSpec>) {
        let (h, d) = (self.hidden_size, self.head_dim);
        let (q, kv) = (self.num_attention_heads * d, self.num_key_value_heads * d);
        for (name, rows, columns) in
            [("q_proj", q, h), ("k_proj", kv, h), ("v_proj", kv, h), ("o_proj", h, q)]
        {
            list.push(TensorSpec::new(format!("{prefix}.self_attn.{name}.weight"), &[rows, columns]));
            if self.attention_bias {
                list.push(TensorSpec::new(format!("{prefix}.self_attn.{name}.bias"), &[rows]));
            }
        }
        for (name, size) in [
            ("self_attn.q_norm", d),
            ("self_attn.k_norm", d),
            ("input_layernorm", h),
            ("post_attention_layernorm", h),
        ] {
            list.push(TensorSpec::new(format!("{prefix}.{name}.weight"), &[size]));
        }
    }

    fn sparse_tensors(&self, prefix: &str, packed: bool, list: &mut Vec<TensorSpec>) {
        let (e, h, i) = (self.num_experts, self.hidden_size, self.moe_intermediate_size);
        list.push(TensorSpec::new(format!("{prefix}.gate.weight"), &[e, h]));
        if packed {
            list.push(TensorSpec::new(format!("{prefix}.experts.gate_up_proj"), &[e, 2 * i, h]));
            list.push(TensorSpec::new(format!("{prefix}.experts.down_proj"), &[e, h, i]));
            return;
        }
        for expert in 0..e {
            mlp_tensors(&format!("{prefix}.experts.{expert}"), h, i, list);
        }
    }

    /// Refuses sizes that are each valid but absurd together.
    fn check_sizes(&self, config: &Config) -> Result<(), ConfigError> {
        let (layers, moe_layers) = (self.num_hidden_layers, self.num_moe_layers());
        checked_product(config, "the number of tensors", &[layers, 16], limits::TENSORS)?;
        checked_product(
            config,
            "the number of expert tensors",
            &[moe_layers, self.num_experts, 3],
            limits::TENSORS,
        )?;
        let experts = [moe_layers, self.num_experts, self.moe_intermediate_size, self.hidden_size, 3];
        checked_product(config, "the number of expert weights", &experts, limits::WEIGHTS)?;
        let heads = [layers, self.num_attention_heads, self.head_dim, self.hidden_size, 4];
        checked_product(config, "the number of attention weights", &heads, limits::WEIGHTS)?;
        let dense = [layers, self.intermediate_size, self.hidden_size, 3];
        checked_product(config, "the number of dense weights", &dense, limits::WEIGHTS)?;
        let embedding = [self.vocab_size, self.hidden_size];
        checked_product(config, "the number of embedding weights", &embedding, limits::WEIGHTS)?;
        Ok(())
    }
}

fn mlp_tensors(prefix: &str, hidden: usize, intermediate: usize, list: &mut Vec<TensorSpec>) {
    for (name, rows, columns) in [
        ("gate_proj", intermediate, hidden),
        ("up_proj", intermediate, hidden),
        ("down_proj", hidden, intermediate),
    ] {
        list.push(TensorSpec::new(format!("{prefix}.{name}.weight"), &[rows, columns]));
    }
}

/// Which layers are sparse: every `decoder_sparse_step`-th, except `mlp_only_layers`.
fn sparse_layers(config: &Config) -> Result<Vec<bool>, ConfigError> {
    let layers = config.size_or(&["num_hidden_layers"], 24, limits::LAYERS)?;
    let step = config.size_or(&["decoder_sparse_step"], 1, limits::LAYERS)?;
    let dense =
        config.sizes(&["mlp_only_layers"], model_runtime::config::Bounds::up_to(limits::LAYERS.max))?;
    Ok((0..layers).map(|layer| !dense.contains(&layer) && (layer + 1) % step == 0).collect())
}
