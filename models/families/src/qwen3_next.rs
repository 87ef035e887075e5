//! Qwen3-Next: three of four layers have linear attention, whose input products are grouped by key heads.

use model_runtime::config::{Config, ConfigError};
use moe_engine::ModelFamily;

use crate::hybrid::{self, Defaults, NAMES};
use crate::spec::DecoderSpec;

/// Qwen3-Next.
pub const FAMILY: ModelFamily = ModelFamily {
    model_type: "qwen3_next",
    architecture: "Qwen3NextForCausalLM",
    example: "Qwen/Qwen3-Next-80B-A3B-Instruct",
    parse: |config| Ok(Box::new(read(config)?)),
};

const DEFAULTS: Defaults =
    Defaults { names: NAMES, vocab_size: 151936, layers: 48, experts: 512, dense_layers: true };

/// Reads and validates a config.json, with the defaults of transformers 5.24.
///
/// # Errors
/// Values of another type or out of bounds; layers of an unknown type, or no layer with full attention.
pub fn read(config: &Config) -> Result<DecoderSpec, ConfigError> {
    hybrid::read(config, &DEFAULTS)
}

#[cfg(test)]
mod tests {
    use model_runtime::MixerConfig;

    use super::*;

    fn parse(fields: &str) -> Result<DecoderSpec, String> {
        let text = format!(r#"{{"model_type": "qwen3_next"{fields}}}"#);
        read(&Config::parse(&text, "c").unwrap()).map_err(|e| e.to_string())
    }

    #[test]
    fn an_empty_config_has_the_defaults_of_transformers() {
        let spec = parse("").unwrap();
        let decoder = &spec.model.decoder;
        let full = |layer: usize| matches!(spec.model.mixers[layer], MixerConfig::Attention(_));
        assert_eq!(
            (0..8).map(full).collect::<Vec<_>>(),
            [false, false, false, true, false, false, false, true]
        );
        let MixerConfig::Attention(attention) = &spec.model.mixers[47] else { panic!("the last layer") };
        assert_eq!((attention.num_heads, attention.num_kv_heads, attention.head_dim), (16, 2, 256));
        assert_eq!((attention.rotary_dim, attention.output_gate, attention.qkv_bias), (64, true, false));
        let MixerConfig::Linear(linear) = &spec.model.mixers[0] else { panic!("the first layer") };
        let heads = linear.heads;
        assert_eq!((heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim), (16, 32, 128, 128));
        assert_eq!((linear.conv_width, decoder.zero_centred_norms), (4, true));
        let moe = decoder.moe.as_ref().unwrap();
        assert_eq!((moe.router.num_experts, moe.router.top_k, moe.router.renormalize), (512, 10, true));
        assert_eq!((moe.shared_intermediate_size, decoder.rope[0].dim), (512, 64));
        let states =
            spec.model.states(&model_runtime::Geometry::default(), candle_core::DType::BF16).unwrap();
        assert_eq!(states.bytes_per_token().unwrap(), 12 * 2 * 2 * 2 * 256);
        assert_eq!(states.bytes_per_sequence().unwrap(), 36 * 4 * (32 * 128 * 128 + 3 * 8192));
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (fields, said) in [
            (r#", "layer_types": ["full_attention"]"#, "a type for each of 48 layers, got 1"),
            (r#", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]"#, "\"sliding_attention\""),
            (r#", "num_hidden_layers": 3"#, "at least one layer needs full attention"),
            (r#", "linear_num_value_heads": 24"#, "`linear_num_value_heads`: expected a multiple"),
            (r#", "linear_conv_kernel_dim": 9"#, "linear_conv_kernel_dim"),
            (r#", "hidden_act": "gelu""#, "hidden_act"),
            (r#", "sliding_window": 4"#, "sliding_window"),
        ] {
            let error = parse(fields).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
