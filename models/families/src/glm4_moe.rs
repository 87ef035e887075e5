//! GLM-4.5: half of each head is rotated; sigmoid scores with a correction bias, shared experts, dense first layers.

use model_runtime::config::{Config, ConfigError, RopeConfig, limits};
use model_runtime::{AttentionConfig, DecoderConfig, MoeConfig, QkNorm, TensorNames};
use moe_engine::ModelFamily;

use crate::fixed_keys::{check_no_window, check_noaux_routing};
use crate::grouped_query::{Sizes, attention};
use crate::spec::DecoderSpec;

/// GLM-4.5 and GLM-4.5-Air.
pub const FAMILY: ModelFamily = ModelFamily {
    model_type: "glm4_moe",
    architecture: "Glm4MoeForCausalLM",
    example: "zai-org/GLM-4.5-Air",
    parse: |config| Ok(Box::new(read(config)?)),
};

const NO_MLA: &str = "`mla`: GLM-4.5 has no multi-head latent attention; leave it out";

/// Published checkpoints have layers after the others that predict more than one token. They are left out with a
/// warning.
const NAMES: TensorNames = TensorNames { shared_experts: Some("shared_experts"), ..TensorNames::USUAL };

const SIZES: Sizes = Sizes { hidden_size: 4096, num_heads: 96, num_kv_heads: Some(8), rms_norm_eps: 1e-5 };

/// The default of `partial_rotary_factor`.
const ROTATED: f64 = 0.5;

/// Reads and validates a config.json, with the defaults of transformers 5.17.
///
/// # Errors
/// Values of another type or out of bounds.
pub fn read(config: &Config) -> Result<DecoderSpec, ConfigError> {
    config.quantisation()?;
    check_noaux_routing(config)?;
    check_no_window(config)?;
    let width = |key: &str, default| config.size_or(&[key], default, limits::WIDTH);
    let attention = attention(config, &SIZES)?;
    let positions = config.size_or(&["max_position_embeddings"], 131072, limits::POSITIONS)?;
    let rope = RopeConfig::partial_from_config(config, attention.head_dim, positions, ROTATED)?;
    let attention = AttentionConfig {
        rotary_dim: rope.dim,
        qkv_bias: config.bool_or(&["attention_bias"], false)?,
        qk_norm: match config.bool_or(&["use_qk_norm"], false)? {
            true => QkNorm::PerHead,
            false => QkNorm::None,
        },
        ..attention
    };
    config.size_or(&["n_routed_experts", "num_experts", "num_local_experts"], 128, limits::EXPERTS)?;
    let intermediate_size = width("moe_intermediate_size", 1408)?;
    let shared = config.size_or(&["n_shared_experts"], 1, 0..=*limits::EXPERTS.end())?;
    let layers = config.size_or(&["num_hidden_layers"], 46, limits::LAYERS)?;
    let dense = config.size_or(&["first_k_dense_replace"], 1, 0..=*limits::LAYERS.end())?;
    let decoder = DecoderConfig {
        names: NAMES,
        vocab_size: config.size_or(&["vocab_size"], 151552, limits::VOCAB)?,
        hidden_size: attention.hidden_size,
        intermediate_size: width("intermediate_size", 10944)?,
        activation: config.activation()?,
        rms_norm_eps: attention.rms_norm_eps,
        zero_centred_norms: false,
        tie_word_embeddings: config.bool_or(&["tie_word_embeddings"], false)?,
        rope: vec![rope; layers],
        moe: Some(MoeConfig {
            shared_intermediate_size: shared * intermediate_size,
            ..MoeConfig::new(config.router()?, intermediate_size)
        }),
        is_sparse: (0..layers).map(|layer| layer >= dense).collect(),
    };
    DecoderSpec::new(config, decoder, attention, NO_MLA)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(fields: &str) -> Result<DecoderSpec, String> {
        let text = format!(r#"{{"model_type": "glm4_moe"{fields}}}"#);
        read(&Config::parse(&text, "c").unwrap()).map_err(|e| e.to_string())
    }

    #[test]
    fn an_empty_config_has_the_defaults_of_transformers() {
        let spec = parse(r#", "head_dim": 128"#).unwrap();
        let decoder = &spec.model.decoder;
        let attention = spec.model.attention(45).unwrap();
        assert_eq!((attention.num_heads, attention.num_kv_heads, attention.rotary_dim), (96, 8, 64));
        assert_eq!((attention.qkv_bias, attention.o_bias, attention.qk_norm), (false, false, QkNorm::None));
        assert_eq!((decoder.rope[0].dim, decoder.rope[0].head_dim, decoder.rope[0].theta), (64, 128, 1e4));
        let moe = decoder.moe.as_ref().unwrap();
        assert_eq!((moe.router.num_experts, moe.router.top_k, moe.shared_intermediate_size), (128, 8, 1408));
        assert!(moe.router.correction_bias && moe.router.renormalize);
        assert!(!decoder.is_sparse[0] && decoder.is_sparse[1..] == [true; 45]);
    }

    /// Published checkpoints have one such layer after the others. Only ignored tensors are left out without a warning.
    #[test]
    fn layers_that_predict_further_tokens_are_told_of() {
        let spec = parse(r#", "head_dim": 128, "num_nextn_predict_layers": 1"#).unwrap();
        assert_eq!(spec.model.decoder.ignored(), ["*.rotary_emb.inv_freq"]);
    }

    #[test]
    fn the_share_that_is_rotated_comes_from_either_style() {
        let rotated = |fields: &str| {
            parse(&format!(r#", "head_dim": 16{fields}"#))
                .map(|spec| spec.model.attention(0).unwrap().rotary_dim)
        };
        assert_eq!(rotated(r#", "partial_rotary_factor": 0.25"#), Ok(4));
        assert_eq!(
            rotated(r#", "rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 5.0}"#),
            Ok(16)
        );
        for (fields, said) in [
            (r#", "partial_rotary_factor": 0.2"#, "`partial_rotary_factor`: expected the share of 16"),
            (r#", "partial_rotary_factor": 1.5"#, "`partial_rotary_factor`: expected the share of 16"),
            (
                r#", "rope_scaling": {"type": "dynamic", "factor": 2.0}"#,
                "dynamic RoPE for a part of each head",
            ),
        ] {
            let error = rotated(fields).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
