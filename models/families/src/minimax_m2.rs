//! MiniMax-M2: norms over all heads of q and of k; half of each head is rotated; sigmoid scores with a correction bias.

use model_runtime::config::{Config, ConfigError, RopeConfig, limits};
use model_runtime::{
    AttentionConfig, CorrectionBiasNames, DecoderConfig, MlpNames, MoeConfig, QkNorm, TensorNames,
};
use moe_engine::ModelFamily;

use crate::fixed_keys::{check_biased_routing, check_fixed_strings, check_no_window};
use crate::grouped_query::{Sizes, attention};
use crate::spec::DecoderSpec;

/// MiniMax-M2 and M2.1.
pub const FAMILY: ModelFamily = ModelFamily {
    model_type: "minimax_m2",
    architecture: "MiniMaxM2ForCausalLM",
    example: "MiniMaxAI/MiniMax-M2",
    parse: |config| Ok(Box::new(read(config)?)),
};

const NO_MLA: &str = "`mla`: MiniMax-M2 has no multi-head latent attention; leave it out";

const NAMES: TensorNames = TensorNames {
    mlp: "block_sparse_moe",
    matrices: MlpNames::MIXTRAL,
    correction_bias: CorrectionBiasNames {
        published: "e_score_correction_bias",
        packed: "e_score_correction_bias",
        is_row: false,
    },
    ..TensorNames::USUAL
};

const SIZES: Sizes = Sizes { hidden_size: 3072, num_heads: 48, num_kv_heads: Some(8), rms_norm_eps: 1e-6 };

/// The default of `head_dim`.
const HEAD_DIM: f64 = 128.0;

/// The base of the rotary frequencies if a config has none.
const DEFAULT_THETA: f64 = 5e6;

/// Reads and validates a config, with the defaults of transformers 5.24, which also reads the `rotary_dim` of published
/// configs.
///
/// # Errors
/// Values of another type or out of bounds; options in MiniMax's own configs that transformers' code does not support.
pub fn read(config: &Config) -> Result<DecoderSpec, ConfigError> {
    config.quantisation()?;
    refuse_options(config)?;
    let config = &with_defaults(config);
    let attention = AttentionConfig { qk_norm: QkNorm::AllHeads, ..attention(config, &SIZES)? };
    let positions = config.size_or(&["max_position_embeddings"], 196608, limits::POSITIONS)?;
    let rotated = config.size_or(&["rotary_dim"], attention.head_dim, limits::HEAD_DIM)?;
    let share = rotated as f64 / attention.head_dim as f64;
    let rope = RopeConfig::partial_from_config(config, attention.head_dim, positions, share)?;
    let attention = AttentionConfig { rotary_dim: rope.dim, ..attention };
    config.size_or(&["num_local_experts", "num_experts"], 256, limits::EXPERTS)?;
    let intermediate_size = config.size_or(&["intermediate_size"], 1536, limits::WIDTH)?;
    let layers = config.size_or(&["num_hidden_layers"], 62, limits::LAYERS)?;
    let decoder = DecoderConfig {
        names: NAMES,
        vocab_size: config.size_or(&["vocab_size"], 200064, limits::VOCAB)?,
        hidden_size: attention.hidden_size,
        intermediate_size,
        activation: config.activation()?,
        rms_norm_eps: attention.rms_norm_eps,
        tie_word_embeddings: config.bool_or(&["tie_word_embeddings"], false)?,
        rope: vec![rope; layers],
        moe: Some(MoeConfig::new(config.router()?, intermediate_size)),
        is_sparse: vec![true; layers],
        ..DecoderConfig::default()
    };
    DecoderSpec::new(config, decoder, attention, NO_MLA)
}

/// The config with the defaults that differ from the defaults of other families.
fn with_defaults(config: &Config) -> Config {
    let defaults = [("head_dim", HEAD_DIM), ("rope_theta", DEFAULT_THETA)];
    let missing = defaults.into_iter().filter(|(key, _)| !config.has(key));
    missing.fold(config.clone(), |config, (key, value)| config.with(key, value))
}

/// Refuses values in published configs that describe another network than transformers' code computes.
fn refuse_options(config: &Config) -> Result<(), ConfigError> {
    check_biased_routing(config, "sigmoid")?;
    check_no_window(config)?;
    check_fixed_strings(config, &[("qk_norm_type", "per_layer")])?;
    if !config.bool_or(&["use_qk_norm"], true)? {
        return Err(config.unsupported("use_qk_norm false", "; MiniMax-M2 runs with norms of q and k alone"));
    }
    let shared = config.size_or(&["shared_intermediate_size"], 0, 0..=*limits::WIDTH.end())?;
    if shared > 0 {
        return Err(
            config.unsupported(format!("shared_intermediate_size {shared}"), "; there are no shared experts")
        );
    }
    match config.sizes(&["attn_type_list"], 0..=1)?.contains(&0) {
        true => Err(config.unsupported("a 0 in attn_type_list", "; every layer has full attention, type 1")),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(fields: &str) -> Result<DecoderSpec, String> {
        let text = format!(r#"{{"model_type": "minimax_m2"{fields}}}"#);
        read(&Config::parse(&text, "c").unwrap()).map_err(|e| e.to_string())
    }

    #[test]
    fn an_empty_config_has_the_defaults_of_transformers() {
        let spec = parse("").unwrap();
        let decoder = &spec.model.decoder;
        let attention = spec.model.attention(61).unwrap();
        assert_eq!((attention.num_heads, attention.num_kv_heads, attention.head_dim), (48, 8, 128));
        assert_eq!(
            (attention.qk_norm, attention.rotary_dim, attention.qkv_bias),
            (QkNorm::AllHeads, 128, false)
        );
        let moe = decoder.moe.as_ref().unwrap();
        assert_eq!((moe.router.num_experts, moe.router.top_k, moe.intermediate_size), (256, 8, 1536));
        assert_eq!((moe.router.scoring.name(), moe.router.routed_scaling_factor), ("sigmoid", 1.0));
        assert!(moe.router.correction_bias && moe.router.renormalize);
        assert_eq!((decoder.rope[0].theta, decoder.vocab_size), (5e6, 200064));
    }

    #[test]
    fn the_rotated_part_comes_from_any_of_its_keys() {
        let rotated = |fields| parse(fields).map(|spec| spec.model.attention(0).unwrap().rotary_dim);
        assert_eq!(rotated(r#", "rotary_dim": 64"#), Ok(64));
        assert_eq!(rotated(r#", "rotary_dim": 64, "partial_rotary_factor": 0.25"#), Ok(32));
        assert_eq!(
            rotated(r#", "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 7.0}"#),
            Ok(64)
        );
        assert!(rotated(r#", "rotary_dim": 256"#).unwrap_err().contains("`partial_rotary_factor`"));
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (fields, said) in [
            (r#", "use_qk_norm": false"#, "use_qk_norm false is not supported"),
            (r#", "use_routing_bias": false"#, "use_routing_bias false is not supported"),
            (r#", "qk_norm_type": "per_head""#, "qk_norm_type \"per_head\" is not supported"),
            (r#", "scoring_func": "softmax""#, "scoring_func \"softmax\" is not supported"),
            (r#", "shared_intermediate_size": 8"#, "shared_intermediate_size 8 is not supported"),
            (r#", "attn_type_list": [1, 0]"#, "a 0 in attn_type_list is not supported"),
        ] {
            let error = parse(fields).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
