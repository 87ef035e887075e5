//! Qwen3-MoE's config.json, with the defaults of transformers 5.17.

use candle_core::DType;
use model_runtime::config::{Config, ConfigError, RopeConfig, limits};
use model_runtime::{AttentionConfig, DecoderConfig, MoeConfig, QkNorm, TensorNames};

/// Tensors of a layer without its experts, at most.
const LAYER_TENSORS: usize = 16;

/// Everything a Qwen3-MoE config says that changes the forward pass.
#[derive(Clone, Debug)]
pub struct Qwen3MoeConfig {
    /// The decoder around the attention.
    pub decoder: DecoderConfig,
    /// The attention of each layer, with the heads of all ranks.
    pub attention: Vec<AttentionConfig>,
    /// The dtype that the config names.
    pub dtype: Option<DType>,
}

impl Qwen3MoeConfig {
    /// Reads and validates a config. Nothing is allocated from its sizes before they are bounded.
    pub fn new(config: &Config) -> Result<Self, ConfigError> {
        config.quantisation()?;
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
        let rms_norm_eps = config.rms_norm_eps()?;
        let max_position_embeddings =
            config.size_or(&["max_position_embeddings"], 32768, limits::POSITIONS)?;
        let attention_bias = config.bool_or(&["attention_bias"], false)?;
        config.size_or(&["num_experts", "num_local_experts"], 128, limits::EXPERTS)?;
        let decoder = DecoderConfig {
            names: TensorNames::USUAL,
            vocab_size: config.size_or(&["vocab_size"], 151936, limits::VOCAB)?,
            hidden_size,
            intermediate_size: width("intermediate_size", 6144)?,
            activation: config.activation()?,
            rms_norm_eps,
            tie_word_embeddings: config.bool_or(&["tie_word_embeddings"], false)?,
            rope: RopeConfig::from_config(config, head_dim, max_position_embeddings)?,
            moe: Some(MoeConfig {
                router: config.router()?,
                intermediate_size: width("moe_intermediate_size", 768)?,
                shared_intermediate_size: 0,
            }),
            is_sparse: sparse_layers(config)?,
        };
        decoder.check_sizes(config, LAYER_TENSORS, &[num_attention_heads, head_dim, hidden_size, 4])?;
        let attention = AttentionConfig {
            hidden_size,
            num_heads: num_attention_heads,
            num_kv_heads: num_key_value_heads,
            head_dim,
            qkv_bias: attention_bias,
            o_bias: attention_bias,
            qk_norm: QkNorm::PerHead,
            rms_norm_eps,
            sliding_window: sliding_window.filter(|_| use_sliding_window),
            softmax_scale: None,
        };
        let attention = vec![attention; decoder.num_layers()];
        Ok(Self { decoder, attention, dtype: config.dtype()? })
    }
}

/// Which layers are sparse: every `decoder_sparse_step`-th, except `mlp_only_layers`.
fn sparse_layers(config: &Config) -> Result<Vec<bool>, ConfigError> {
    let layers = config.size_or(&["num_hidden_layers"], 24, limits::LAYERS)?;
    let step = config.size_or(&["decoder_sparse_step"], 1, limits::LAYERS)?;
    let dense = config.sizes(&["mlp_only_layers"], 0..=*limits::LAYERS.end())?;
    Ok((0..layers).map(|layer| !dense.contains(&layer) && (layer + 1) % step == 0).collect())
}
