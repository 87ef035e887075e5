//! The common part of the configs of families with multi-head latent attention.

use model_runtime::config::{Bounds, Config, ConfigError, RopeConfig, RopeScaling, limits, yarn_mscale};
use model_runtime::{MlaConfig, MlaForm};

use crate::fixed_keys::check_no_window;

/// The epsilon of the norms of latents. `rms_norm_eps` does not apply to them.
const LATENT_NORM_EPS: f64 = 1e-6;
/// The largest `mscale_all_dim`. It is far above any in use, and scores stay finite with it.
const LARGEST_MSCALE: f64 = 1e3;

/// The defaults of a family's sizes. Sizes that are not here have the same default in all families.
pub(crate) struct Sizes {
    pub hidden_size: usize,
    pub num_heads: usize,
    pub q_lora_rank: usize,
    pub qk_nope_head_dim: usize,
    pub v_head_dim: usize,
    pub max_position_embeddings: usize,
}

/// Returns the rotary settings of the config. `qk_rope_head_dim` dimensions of each head are rotated.
///
/// # Errors
/// An odd number of these dimensions; the errors of [`RopeConfig::from_config`].
pub(crate) fn rope(config: &Config, defaults: &Sizes) -> Result<RopeConfig, ConfigError> {
    let positions =
        config.size_or(&["max_position_embeddings"], defaults.max_position_embeddings, limits::POSITIONS)?;
    let dim = config.size_or(&["qk_rope_head_dim"], 64, limits::HEAD_DIM)?;
    if dim % 2 != 0 {
        return Err(config.invalid("qk_rope_head_dim", "an even number, for rotary embedding", dim));
    }
    RopeConfig::from_config(config, dim, positions)
}

/// Returns attention with the sizes in the config, in the absorbed form.
///
/// # Errors
/// Values out of bounds; numbers of key heads and query heads that differ; a window.
pub(crate) fn attention(
    config: &Config,
    rope: &RopeConfig,
    defaults: &Sizes,
) -> Result<MlaConfig, ConfigError> {
    check_no_window(config)?;
    let num_heads = config.size_or(&["num_attention_heads"], defaults.num_heads, limits::HEADS)?;
    let kv_heads = config.size_or(&["num_key_value_heads"], num_heads, limits::HEADS)?;
    if kv_heads != num_heads {
        let expected = format!("num_attention_heads = {num_heads}: every head has keys of its own");
        return Err(config.invalid("num_key_value_heads", &expected, kv_heads));
    }
    let qk_nope_head_dim =
        config.size_or(&["qk_nope_head_dim"], defaults.qk_nope_head_dim, limits::HEAD_DIM)?;
    Ok(MlaConfig {
        hidden_size: config.size_or(&["hidden_size"], defaults.hidden_size, limits::WIDTH)?,
        num_heads,
        q_lora_rank: or_null(config, "q_lora_rank", defaults.q_lora_rank, limits::WIDTH)?,
        kv_lora_rank: config.size_or(&["kv_lora_rank"], 512, limits::WIDTH)?,
        qk_nope_head_dim,
        qk_rope_head_dim: rope.dim,
        v_head_dim: config.size_or(&["v_head_dim"], defaults.v_head_dim, limits::HEAD_DIM)?,
        bias: config.bool_or(&["attention_bias"], false)?,
        norm_eps: LATENT_NORM_EPS,
        softmax_scale: ((qk_nope_head_dim + rope.dim) as f64).powf(-0.5) * mscale(config, rope)?.powi(2),
        form: MlaForm::Absorbed,
    })
}

/// Reads a size. If it is absent, it has its default; an explicit null means none, as in DeepSeek's own configs.
///
/// # Errors
/// A size out of bounds.
pub(crate) fn or_null(
    config: &Config,
    key: &str,
    default: usize,
    bounds: Bounds,
) -> Result<Option<usize>, ConfigError> {
    match config.object().contains_key(key) {
        true => config.opt_size(&[key], bounds),
        false => Ok(Some(default)),
    }
}

/// Returns DeepSeek's factor for long contexts: `mscale_all_dim` of scaled RoPE also multiplies both sides of every
/// score.
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
    // If `mscale_all_dim` is 0, the factor is 1, as without the key.
    Ok(yarn_mscale(factor, all_dim))
}

/// Checks that pairs of rotated dimensions are neighbours and not half a head apart.
///
/// # Errors
/// The config has `rope_interleave` false.
pub(crate) fn check_interleaved(config: &Config) -> Result<(), ConfigError> {
    match config.bool_or(&["rope_interleave"], true)? {
        true => Ok(()),
        false => Err(config.unsupported(
            "rope_interleave false",
            "; neighbouring dimensions of a head are rotated together, as published models have it",
        )),
    }
}
