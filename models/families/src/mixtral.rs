//! Mixtral: experts in every layer, with their own names of matrices. The weights of a token's experts add up to 1.

use model_runtime::config::{RopeConfig, limits};
use model_runtime::{
    AttentionConfig, Config, ConfigError, DecoderConfig, MoeConfig, RotatedPairs, TensorNames,
};
use moe_engine::ModelFamily;

use crate::fixed_keys::check_softmax_routing;
use crate::grouped_query::{Sizes, attention};
use crate::spec::DecoderSpec;

/// Mixtral.
pub const FAMILY: ModelFamily = ModelFamily {
    model_type: "mixtral",
    architecture: "MixtralForCausalLM",
    example: "mistralai/Mixtral-8x7B-Instruct-v0.1",
    parse: |config| Ok(Box::new(read(config)?)),
};

const NO_MLA: &str = "`mla`: Mixtral has no multi-head latent attention; leave it out";

const SIZES: Sizes = Sizes { hidden_size: 4096, num_heads: 32, num_kv_heads: Some(8), rms_norm_eps: 1e-5 };

/// The base of the rotary frequencies if a config has none.
const DEFAULT_THETA: f64 = 1e6;

/// Reads and validates a config.json, with the defaults of transformers 5.24.
///
/// # Errors
/// Values of another type or out of bounds; a router that does not renormalise, which transformers does not support.
pub fn read(config: &Config) -> Result<DecoderSpec, ConfigError> {
    config.quantisation()?;
    check_softmax_routing(config)?;
    if !config.bool_or(&["norm_topk_prob"], true)? {
        let advice = "; Mixtral's router always renormalises the weights of the chosen experts";
        return Err(config.unsupported("norm_topk_prob false", advice));
    }
    let sliding_window = config.opt_size(&["sliding_window"], limits::POSITIONS)?;
    // GGUF files store the rows of q and k in an order in which neighbouring dimensions are rotated together.
    let rotated_pairs = match config.is_in_gguf("rope_interleave")? {
        true => RotatedPairs::Neighbours,
        false => RotatedPairs::Halves,
    };
    let attention = AttentionConfig { sliding_window, rotated_pairs, ..attention(config, &SIZES)? };
    let positions = config.size_or(&["max_position_embeddings"], 4096 * 32, limits::POSITIONS)?;
    let rope = match config.has("rope_theta") {
        false => {
            RopeConfig::from_config(&config.with("rope_theta", DEFAULT_THETA), attention.head_dim, positions)?
        }
        true => RopeConfig::from_config(config, attention.head_dim, positions)?,
    };
    config.size_or(&["num_local_experts", "num_experts"], 8, limits::EXPERTS)?;
    let intermediate_size = config.size_or(&["intermediate_size"], 14336, limits::WIDTH)?;
    let layers = config.size_or(&["num_hidden_layers"], 32, limits::LAYERS)?;
    let decoder = DecoderConfig {
        names: TensorNames::MIXTRAL,
        vocab_size: config.size_or(&["vocab_size"], 32000, limits::VOCAB)?,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<DecoderSpec, String> {
        read(&Config::parse(text, "c").unwrap()).map_err(|e| e.to_string())
    }

    #[test]
    fn an_empty_config_is_mixtral_8x7b() {
        let spec = parse(r#"{"model_type": "mixtral"}"#).unwrap();
        let decoder = &spec.model.decoder;
        let attention = spec.model.attention(31).unwrap();
        assert_eq!((attention.num_heads, attention.num_kv_heads, attention.head_dim), (32, 8, 128));
        assert_eq!((attention.sliding_window, attention.rms_norm_eps), (None, 1e-5));
        assert_eq!((decoder.rope[0].theta, decoder.rope[0].max_position_embeddings), (1e6, 131_072));
        let moe = decoder.moe.as_ref().unwrap();
        assert_eq!((moe.router.num_experts, moe.router.top_k, moe.intermediate_size), (8, 2, 14336));
        assert!(moe.router.renormalize && decoder.is_sparse == [true; 32]);
    }

    #[test]
    fn what_a_config_says_wins() {
        let text = r#"{"model_type": "mixtral", "sliding_window": 4096, "num_key_value_heads": null, "num_attention_heads": 16,
                      "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}"#;
        let spec = parse(text).unwrap();
        let attention = spec.model.attention(0).unwrap();
        assert_eq!(
            (attention.sliding_window, attention.num_kv_heads, attention.head_dim),
            (Some(4096), 16, 256)
        );
        assert_eq!(spec.model.decoder.rope[0].theta, 5e5);
        let null = parse(r#"{"model_type": "mixtral", "sliding_window": null, "rope_theta": 1e4}"#).unwrap();
        assert_eq!(
            (null.model.attention(0).unwrap().sliding_window, null.model.decoder.rope[0].theta),
            (None, 1e4)
        );
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (fields, said) in [
            (r#""norm_topk_prob": false"#, "norm_topk_prob false"),
            (r#""num_key_value_heads": 5"#, "a divisor of num_attention_heads = 32, got 5"),
            (r#""head_dim": 7"#, "`head_dim`: expected an even number"),
            (r#""hidden_act": "tanh""#, "hidden_act \"tanh\""),
            (r#""sliding_window": 0"#, "sliding_window"),
        ] {
            let error = parse(&format!(r#"{{"model_type": "mixtral", {fields}}}"#)).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
