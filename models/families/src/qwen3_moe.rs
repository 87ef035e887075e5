//! Qwen3-MoE: norms over each head of q and of k, and experts in all or some of the layers.

use model_runtime::config::{Config, ConfigError, RopeConfig, limits};
use model_runtime::{AttentionConfig, DecoderConfig, MoeConfig, QkNorm};
use moe_engine::ModelFamily;

use crate::grouped_query::{Sizes, attention};
use crate::spec::DecoderSpec;

/// Qwen3-MoE.
pub const FAMILY: ModelFamily = ModelFamily {
    model_type: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    example: "Qwen/Qwen3-30B-A3B",
    parse: |config| Ok(Box::new(read(config)?)),
};

const NO_MLA: &str = "`mla`: Qwen3-MoE has no multi-head latent attention; leave it out";

const SIZES: Sizes = Sizes { hidden_size: 2048, num_heads: 32, num_kv_heads: Some(4), rms_norm_eps: 1e-6 };

/// Reads and validates a config.json, with the defaults of transformers 5.17.
///
/// # Errors
/// Values of another type or out of bounds.
pub fn read(config: &Config) -> Result<DecoderSpec, ConfigError> {
    config.quantisation()?;
    let width = |key: &str, default| config.size_or(&[key], default, limits::WIDTH);
    let bias = config.bool_or(&["attention_bias"], false)?;
    let attention = AttentionConfig {
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: QkNorm::PerHead,
        sliding_window: sliding_window(config)?,
        ..attention(config, &SIZES)?
    };
    let positions = config.size_or(&["max_position_embeddings"], 32768, limits::POSITIONS)?;
    config.size_or(&["num_experts", "num_local_experts"], 128, limits::EXPERTS)?;
    let rope = RopeConfig::from_config(config, attention.head_dim, positions)?;
    let is_sparse = sparse_layers(config)?;
    let decoder = DecoderConfig {
        vocab_size: config.size_or(&["vocab_size"], 151936, limits::VOCAB)?,
        hidden_size: attention.hidden_size,
        intermediate_size: width("intermediate_size", 6144)?,
        activation: config.activation()?,
        rms_norm_eps: attention.rms_norm_eps,
        tie_word_embeddings: config.bool_or(&["tie_word_embeddings"], false)?,
        rope: vec![rope; is_sparse.len()],
        moe: Some(MoeConfig::new(config.router()?, width("moe_intermediate_size", 768)?)),
        is_sparse,
        ..DecoderConfig::default()
    };
    DecoderSpec::new(config, decoder, attention, NO_MLA)
}

/// Returns the window, if it is used. If the key is absent, it is 4096; an explicit null means none.
fn sliding_window(config: &Config) -> Result<Option<usize>, ConfigError> {
    let window = match config.object().get("sliding_window") {
        None => Some(4096),
        Some(_) => config.opt_size(&["sliding_window"], limits::POSITIONS)?,
    };
    let is_used = config.bool_or(&["use_sliding_window"], false)?;
    Ok(window.filter(|_| is_used))
}

/// Which layers are sparse: every `decoder_sparse_step`-th, except `mlp_only_layers`.
pub(crate) fn sparse_layers(config: &Config) -> Result<Vec<bool>, ConfigError> {
    let layers = config.size_or(&["num_hidden_layers"], 24, limits::LAYERS)?;
    let step = config.size_or(&["decoder_sparse_step"], 1, limits::LAYERS)?;
    let dense = config.sizes(&["mlp_only_layers"], 0..=*limits::LAYERS.end())?;
    Ok((0..layers).map(|layer| !dense.contains(&layer) && (layer + 1) % step == 0).collect())
}
