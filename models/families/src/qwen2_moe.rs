//! Qwen2-MoE: a shared expert whose output is scaled by a gate, and a window in some layers.

use model_runtime::config::{Config, ConfigError, RopeConfig, limits};
use model_runtime::{AttentionConfig, DecoderConfig, MixerConfig, MoeConfig, TensorNames};
use moe_engine::ModelFamily;

use crate::fixed_keys::check_softmax_routing;
use crate::grouped_query::{Sizes, attention, sliding_layers};
use crate::qwen3_moe::sparse_layers;
use crate::spec::DecoderSpec;

/// Qwen2-MoE.
pub const FAMILY: ModelFamily = ModelFamily {
    model_type: "qwen2_moe",
    architecture: "Qwen2MoeForCausalLM",
    example: "Qwen/Qwen1.5-MoE-A2.7B",
    parse: |config| Ok(Box::new(read(config)?)),
};

const NO_MLA: &str = "`mla`: Qwen2-MoE has no multi-head latent attention; leave it out";

const NAMES: TensorNames = TensorNames {
    shared_experts: Some("shared_expert"),
    shared_expert_gate: Some("shared_expert_gate"),
    ..TensorNames::USUAL
};

const SIZES: Sizes = Sizes { hidden_size: 2048, num_heads: 16, num_kv_heads: Some(16), rms_norm_eps: 1e-6 };

/// The default of `max_window_layers`.
const WINDOW_LAYERS: usize = 28;

/// Reads and validates a config.json, with the defaults of transformers 5.17.
///
/// # Errors
/// Values of another type or out of bounds; layers of an unknown type, or with a window although windows are off.
pub fn read(config: &Config) -> Result<DecoderSpec, ConfigError> {
    config.quantisation()?;
    check_softmax_routing(config)?;
    let width = |key: &str, default| config.size_or(&[key], default, limits::WIDTH);
    let attention =
        AttentionConfig { qkv_bias: config.bool_or(&["qkv_bias"], true)?, ..attention(config, &SIZES)? };
    let positions = config.size_or(&["max_position_embeddings"], 32768, limits::POSITIONS)?;
    let rope = RopeConfig::from_config(config, attention.head_dim, positions)?;
    config.size_or(&["num_experts", "num_local_experts"], 60, limits::EXPERTS)?;
    let is_sparse = sparse_layers(config)?;
    let windows = windows(config, is_sparse.len())?;
    let decoder = DecoderConfig {
        names: NAMES,
        vocab_size: config.size_or(&["vocab_size"], 151936, limits::VOCAB)?,
        hidden_size: attention.hidden_size,
        intermediate_size: width("intermediate_size", 5632)?,
        activation: config.activation()?,
        rms_norm_eps: attention.rms_norm_eps,
        tie_word_embeddings: config.bool_or(&["tie_word_embeddings"], false)?,
        rope: vec![rope; is_sparse.len()],
        moe: Some(MoeConfig {
            shared_intermediate_size: width("shared_expert_intermediate_size", 5632)?,
            ..MoeConfig::new(config.router()?, width("moe_intermediate_size", 1408)?)
        }),
        is_sparse,
        ..DecoderConfig::default()
    };
    let layer = |sliding_window| AttentionConfig { sliding_window, ..attention.clone() };
    let mixers = windows.into_iter().map(|window| MixerConfig::Attention(layer(window))).collect();
    DecoderSpec::of_layers(config, decoder, mixers, NO_MLA)
}

/// Returns the window of each layer. With `use_sliding_window`, the layers that `layer_types` names have one, or else
/// every other layer below `max_window_layers`.
fn windows(config: &Config, layers: usize) -> Result<Vec<Option<usize>>, ConfigError> {
    let sliding = sliding_layers(config, layers)?;
    if !config.bool_or(&["use_sliding_window"], false)? {
        return match sliding.is_some_and(|sliding| sliding.contains(&true)) {
            true => Err(config.unsupported("a sliding_attention layer", " without use_sliding_window")),
            false => Ok(vec![None; layers]),
        };
    }
    let window = config.size_or(&["sliding_window"], 4096, limits::POSITIONS)?;
    let below = config.size_or(&["max_window_layers"], WINDOW_LAYERS, 0..=*limits::LAYERS.end())?;
    let sliding =
        sliding.unwrap_or_else(|| (0..layers).map(|layer| layer % 2 == 0 && layer < below).collect());
    Ok(sliding.into_iter().map(|is_sliding| is_sliding.then_some(window)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(fields: &str) -> Result<DecoderSpec, String> {
        let text = format!(r#"{{"model_type": "qwen2_moe"{fields}}}"#);
        read(&Config::parse(&text, "c").unwrap()).map_err(|e| e.to_string())
    }

    fn windows_of(fields: &str) -> Vec<Option<usize>> {
        parse(fields).unwrap().model.attention_layers().map(|layer| layer.sliding_window).collect()
    }

    #[test]
    fn an_empty_config_is_qwen_1_5_moe() {
        let spec = parse("").unwrap();
        let decoder = &spec.model.decoder;
        let attention = spec.model.attention(23).unwrap();
        assert_eq!((attention.num_heads, attention.num_kv_heads, attention.head_dim), (16, 16, 128));
        assert_eq!((attention.qkv_bias, attention.o_bias, attention.sliding_window), (true, false, None));
        let moe = decoder.moe.as_ref().unwrap();
        assert_eq!((moe.router.num_experts, moe.router.top_k, moe.intermediate_size), (60, 4, 1408));
        assert_eq!((moe.shared_intermediate_size, moe.router.renormalize), (5632, false));
        assert_eq!((decoder.rope[0].theta, decoder.is_sparse.len()), (1e4, 24));
    }

    #[test]
    fn each_layer_has_a_window_of_its_own() {
        let some = r#", "num_hidden_layers": 4, "sliding_window": 7, "use_sliding_window": "#;
        assert_eq!(windows_of(&format!("{some}false")), [None; 4]);
        assert_eq!(windows_of(&format!("{some}true")), [Some(7), None, Some(7), None]);
        assert_eq!(
            windows_of(&format!(r#"{some}true, "max_window_layers": 1"#)),
            [Some(7), None, None, None]
        );
        let types =
            r#", "layer_types": ["full_attention", "full_attention", "full_attention", "sliding_attention"]"#;
        assert_eq!(windows_of(&format!("{some}true{types}")), [None, None, None, Some(7)]);
        assert!(parse(&format!("{some}false{types}")).unwrap_err().contains("without use_sliding_window"));
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (fields, said) in [
            (
                r#", "layer_types": ["full_attention"]"#,
                "`layer_types`: expected a type for each of 24 layers, got 1",
            ),
            (r#", "num_hidden_layers": 1, "layer_types": ["linear_attention"]"#, "\"linear_attention\""),
            (r#", "use_sliding_window": true, "sliding_window": 0"#, "sliding_window"),
            (r#", "partial_rotary_factor": 0.5"#, "partial_rotary_factor 0.5"),
        ] {
            let error = parse(fields).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
