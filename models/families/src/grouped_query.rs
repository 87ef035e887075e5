//! The common part of families with grouped-query attention: reading the sizes of their attention.

use model_runtime::config::limits;
use model_runtime::{AttentionConfig, Config, ConfigError};

/// Returns which layers attend only to a window of positions, by `layer_types`; `None` without that list.
///
/// # Errors
/// A list whose length is not `layers`, or with other types.
pub(crate) fn sliding_layers(config: &Config, layers: usize) -> Result<Option<Vec<bool>>, ConfigError> {
    if !config.has("layer_types") {
        return Ok(None);
    }
    let types = config.strings(&["layer_types"])?;
    if types.len() != layers {
        return Err(config.invalid(
            "layer_types",
            &format!("a type for each of {layers} layers"),
            types.len(),
        ));
    }
    let is_sliding = |kind: &str| match kind {
        "sliding_attention" => Ok(true),
        "full_attention" => Ok(false),
        other => Err(config.unsupported(
            format!("a layer of type {other:?}"),
            "; supported are full_attention and sliding_attention",
        )),
    };
    types.into_iter().map(is_sliding).collect::<Result<_, _>>().map(Some)
}

/// The defaults of a family's sizes.
pub(crate) struct Sizes {
    pub hidden_size: usize,
    pub num_heads: usize,
    /// `None` means the number of query heads.
    pub num_kv_heads: Option<usize>,
    pub rms_norm_eps: f64,
}

/// Returns attention with the sizes in the config, without biases, norms or a window, with whole heads rotated. If the
/// config has no size of a head, it is the hidden size divided by the number of heads.
///
/// # Errors
/// Sizes that do not divide; an odd size of a head.
pub(crate) fn attention(config: &Config, defaults: &Sizes) -> Result<AttentionConfig, ConfigError> {
    let hidden_size = config.size_or(&["hidden_size"], defaults.hidden_size, limits::WIDTH)?;
    let num_heads = config.size_or(&["num_attention_heads"], defaults.num_heads, limits::HEADS)?;
    // An explicit null also means the number of query heads.
    let given = config.object().contains_key("num_key_value_heads");
    let default = defaults.num_kv_heads.filter(|_| !given).unwrap_or(num_heads);
    let num_kv_heads = config.size_or(&["num_key_value_heads"], default, limits::HEADS)?;
    if num_heads % num_kv_heads != 0 {
        let expected = format!("a divisor of num_attention_heads = {num_heads}");
        return Err(config.invalid("num_key_value_heads", &expected, num_kv_heads));
    }
    let head_dim = config.size_or(&["head_dim"], hidden_size.div_euclid(num_heads), limits::HEAD_DIM)?;
    if head_dim == 0 || head_dim % 2 != 0 {
        return Err(config.invalid("head_dim", "an even number above 0, for rotary embedding", head_dim));
    }
    Ok(AttentionConfig {
        rms_norm_eps: config.rms_norm_eps_or(defaults.rms_norm_eps)?,
        ..AttentionConfig::new(hidden_size, num_heads, num_kv_heads, head_dim)
    })
}
