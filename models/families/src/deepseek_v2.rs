//! DeepSeek-V2: the config, with the defaults of transformers 5.17; its experts run one by one or fused.

use model_runtime::config::{Bounds, Config, ConfigError, RopeConfig, RopeScaling, limits, yarn_mscale};
use model_runtime::{DecoderConfig, MlaConfig, MlaForm, MoeConfig, TensorNames};
use moe_engine::ModelFamily;
use moe_layer::RouterConfig;

use crate::latent::LatentSpec;

#[cfg(test)]
mod tests;

/// Tensors of a layer without its experts, at most.
const LAYER_TENSORS: usize = 20;

/// Epsilon of the norms of latents, which `rms_norm_eps` says nothing about.
const LATENT_NORM_EPS: f64 = 1e-6;
/// Far above any `mscale_all_dim` in use, and small enough that scores stay finite.
const LARGEST_MSCALE: f64 = 1e3;
/// `first_k_dense_replace` and `moe_layer_freq`.
const LAYERS_OR_NONE: Bounds = 0..=*limits::LAYERS.end();

/// DeepSeek-V2 and V2-Lite.
pub const FAMILY: ModelFamily = ModelFamily {
    model_type: "deepseek_v2",
    architecture: "DeepseekV2ForCausalLM",
    example: "deepseek-ai/DeepSeek-V2-Lite",
    parse: |config| Ok(Box::new(read(config)?)),
};

/// Reads and validates a config. Nothing is allocated from its sizes before they are bounded.
///
/// # Errors
/// Values of another type or out of bounds; options that are not supported.
pub fn read(config: &Config) -> Result<LatentSpec, ConfigError> {
    config.quantisation()?;
    if config.bool_or(&["mlp_bias"], false)? {
        return Err(config.unsupported("mlp_bias true", "; MLPs without biases are supported"));
    }
    let width = |key: &str, default| config.size_or(&[key], default, limits::WIDTH);
    let max_position_embeddings = config.size_or(&["max_position_embeddings"], 2048, limits::POSITIONS)?;
    let rope_dim = config.size_or(&["qk_rope_head_dim"], 64, limits::HEAD_DIM)?;
    if rope_dim % 2 != 0 {
        return Err(config.invalid("qk_rope_head_dim", "an even number, for rotary embedding", rope_dim));
    }
    let rope = RopeConfig::from_config(config, rope_dim, max_position_embeddings)?;
    let rms_norm_eps = config.rms_norm_eps()?;
    let (router, intermediate_size) = (router(config)?, width("moe_intermediate_size", 1407)?);
    let shared = or_null(config, "n_shared_experts", 2, 0..=*limits::EXPERTS.end())?.unwrap_or(0);
    let ignored_by_transformers = ignored_by_transformers(config, router.as_ref())?;
    let is_sparse = sparse_layers(config, router.is_some())?;
    let attention = attention(config, &rope)?;
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
            router,
            intermediate_size,
            shared_intermediate_size: shared * intermediate_size,
        }),
        is_sparse,
    };
    let head = attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim;
    let reads = attention.hidden_size.max(attention.kv_lora_rank).max(attention.q_lora_rank.unwrap_or(0));
    decoder.check_sizes(config, LAYER_TENSORS, &[attention.num_heads, head, reads, 2])?;
    Ok(LatentSpec { decoder, attention, dtype: config.dtype()?, ignored_by_transformers })
}

/// A size whose absence means a default and whose explicit null means none, as in DeepSeek's own
/// configs.
fn or_null(config: &Config, key: &str, default: usize, bounds: Bounds) -> Result<Option<usize>, ConfigError> {
    match config.object().contains_key(key) {
        true => config.opt_size(&[key], bounds),
        false => Ok(Some(default)),
    }
}

fn attention(config: &Config, rope: &RopeConfig) -> Result<MlaConfig, ConfigError> {
    let num_heads = config.size_or(&["num_attention_heads"], 32, limits::HEADS)?;
    let kv_heads = config.size_or(&["num_key_value_heads"], num_heads, limits::HEADS)?;
    if kv_heads != num_heads {
        let expected = format!("num_attention_heads = {num_heads}: every head has keys of its own");
        return Err(config.invalid("num_key_value_heads", &expected, kv_heads));
    }
    let qk_nope_head_dim = config.size_or(&["qk_nope_head_dim"], 128, limits::HEAD_DIM)?;
    Ok(MlaConfig {
        hidden_size: config.size_or(&["hidden_size"], 4096, limits::WIDTH)?,
        num_heads,
        q_lora_rank: or_null(config, "q_lora_rank", 1536, limits::WIDTH)?,
        kv_lora_rank: config.size_or(&["kv_lora_rank"], 512, limits::WIDTH)?,
        qk_nope_head_dim,
        qk_rope_head_dim: rope.dim,
        v_head_dim: config.size_or(&["v_head_dim"], 128, limits::HEAD_DIM)?,
        bias: config.bool_or(&["attention_bias"], false)?,
        norm_eps: LATENT_NORM_EPS,
        softmax_scale: ((qk_nope_head_dim + rope.dim) as f64).powf(-0.5) * mscale(config, rope)?.powi(2),
        form: MlaForm::Absorbed,
    })
}

/// DeepSeek's temperature of long contexts: `mscale_all_dim` of scaled RoPE also multiplies both
/// sides of every score.
fn mscale(config: &Config, rope: &RopeConfig) -> Result<f64, ConfigError> {
    let factor = match &rope.scaling {
        RopeScaling::Default => return Ok(1.0),
        RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor } => *factor,
        RopeScaling::Yarn(yarn) => yarn.factor,
    };
    let Some(section) = RopeConfig::section(config)? else { return Ok(1.0) };
    let all_dim = section.float_or(&["mscale_all_dim"], 0.0)?;
    if !(0.0..=LARGEST_MSCALE).contains(&all_dim) {
        let expected = format!("a number from 0 to {LARGEST_MSCALE}");
        return Err(section.invalid("mscale_all_dim", &expected, all_dim));
    }
    // At 0 this is 1, as where the key is absent.
    Ok(yarn_mscale(factor, all_dim))
}

/// The routing; an explicit null for the number of experts means a dense model.
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

/// Options that this config sets and that transformers 5.17 does not look at. As in vLLM,
/// `norm_topk_prob` divides the chosen scores by their sum before `routed_scaling_factor` multiplies them.
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
