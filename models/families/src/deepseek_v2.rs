//! DeepSeek-V2: its config, with the defaults of transformers 5.17. Its experts run one after the other or fused.

use model_runtime::config::{Bounds, Config, ConfigError, limits};
use model_runtime::{DecoderConfig, MoeConfig, TensorNames};
use moe_engine::ModelFamily;
use moe_layer::RouterConfig;

use crate::latent::LatentSpec;
use crate::latent_config::{Sizes, attention, or_null, rope};

#[cfg(test)]
mod tests;

const SIZES: Sizes = Sizes {
    hidden_size: 4096,
    num_heads: 32,
    q_lora_rank: 1536,
    qk_nope_head_dim: 128,
    v_head_dim: 128,
    max_position_embeddings: 2048,
};

/// The bounds of `first_k_dense_replace` and `moe_layer_freq`.
const LAYERS_OR_NONE: Bounds = 0..=*limits::LAYERS.end();

/// DeepSeek-V2 and V2-Lite.
pub const FAMILY: ModelFamily = ModelFamily {
    model_type: "deepseek_v2",
    architecture: "DeepseekV2ForCausalLM",
    example: "deepseek-ai/DeepSeek-V2-Lite",
    parse: |config| Ok(Box::new(read(config)?)),
};

/// Reads and validates a config. Nothing of a size in the config is allocated before the size is checked.
///
/// # Errors
/// Values of another type or out of bounds; options that are not supported.
pub fn read(config: &Config) -> Result<LatentSpec, ConfigError> {
    config.quantisation()?;
    if config.bool_or(&["mlp_bias"], false)? {
        return Err(config.unsupported("mlp_bias true", "; MLPs without biases are supported"));
    }
    let width = |key: &str, default| config.size_or(&[key], default, limits::WIDTH);
    let rope = rope(config, &SIZES)?;
    let rms_norm_eps = config.rms_norm_eps()?;
    let router = router(config)?;
    let intermediate_size = width("moe_intermediate_size", 1407)?;
    let shared = or_null(config, "n_shared_experts", 2, 0..=*limits::EXPERTS.end())?.unwrap_or(0);
    let ignored_by_transformers = ignored_by_transformers(config, router.as_ref())?;
    let is_sparse = sparse_layers(config, router.is_some())?;
    let attention = attention(config, &rope, &SIZES)?;
    let decoder = DecoderConfig {
        names: TensorNames { shared_experts: Some("shared_experts"), ..TensorNames::USUAL },
        vocab_size: config.size_or(&["vocab_size"], 102400, limits::VOCAB)?,
        hidden_size: attention.hidden_size,
        intermediate_size: width("intermediate_size", 11008)?,
        activation: config.activation()?,
        rms_norm_eps,
        tie_word_embeddings: config.bool_or(&["tie_word_embeddings"], false)?,
        rope: vec![rope; is_sparse.len()],
        moe: router.map(|router| MoeConfig {
            shared_intermediate_size: shared * intermediate_size,
            ..MoeConfig::new(router, intermediate_size)
        }),
        is_sparse,
        ..DecoderConfig::default()
    };
    Ok(LatentSpec { ignored_by_transformers, ..LatentSpec::new(config, decoder, attention)? })
}

/// The routing. An explicit null for the number of experts means a dense model.
fn router(config: &Config) -> Result<Option<RouterConfig>, ConfigError> {
    if config.object().get("n_routed_experts").is_some_and(|experts| experts.is_null()) {
        return Ok(None);
    }
    config.size_or(&["num_experts", "num_local_experts", "n_routed_experts"], 64, limits::EXPERTS)?;
    config.router().map(Some)
}

/// Which layers are sparse: every `moe_layer_freq`-th from `first_k_dense_replace` on; a frequency
/// of 0 means every layer.
fn sparse_layers(config: &Config, has_experts: bool) -> Result<Vec<bool>, ConfigError> {
    let layers = config.size_or(&["num_hidden_layers"], 32, limits::LAYERS)?;
    let first = config.size_or(&["first_k_dense_replace"], 0, LAYERS_OR_NONE)?;
    let every = config.size_or(&["moe_layer_freq"], 1, LAYERS_OR_NONE)?.max(1);
    Ok((0..layers).map(|layer| has_experts && layer >= first && layer.is_multiple_of(every)).collect())
}

/// Returns options that this config sets and that transformers 5.17 ignores. As in vLLM, `norm_topk_prob` divides the
/// chosen scores by their sum before `routed_scaling_factor` multiplies them.
fn ignored_by_transformers(
    config: &Config,
    router: Option<&RouterConfig>,
) -> Result<Vec<String>, ConfigError> {
    let Some(router) = router else { return Ok(Vec::new()) };
    let every = config.size_or(&["moe_layer_freq"], 1, LAYERS_OR_NONE)?;
    let scoring = router.scoring.name();
    let options = [
        (router.renormalize, "norm_topk_prob true".to_string()),
        (scoring != "softmax", format!("scoring_func {scoring:?}")),
        (router.correction_bias, "topk_method \"noaux_tc\"".to_string()),
        (every > 1, format!("moe_layer_freq {every}")),
    ];
    Ok(options.into_iter().filter(|(set, _)| *set).map(|(_, name)| name).collect())
}
