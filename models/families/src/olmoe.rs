//! OLMoE: norms over all heads of q and of k. The weights of a token's experts need not add up to 1.

use model_runtime::config::{RopeConfig, limits};
use model_runtime::{AttentionConfig, Config, ConfigError, DecoderConfig, MoeConfig, QkNorm};
use moe_engine::ModelFamily;

use crate::fixed_keys::{check_no_window, check_softmax_routing};
use crate::grouped_query::{Sizes, attention};
use crate::spec::DecoderSpec;

/// OLMoE.
pub const FAMILY: ModelFamily = ModelFamily {
    model_type: "olmoe",
    architecture: "OlmoeForCausalLM",
    example: "allenai/OLMoE-1B-7B-0924",
    parse: |config| Ok(Box::new(read(config)?)),
};

const NO_MLA: &str = "`mla`: OLMoE has no multi-head latent attention; leave it out";

const SIZES: Sizes = Sizes { hidden_size: 2048, num_heads: 16, num_kv_heads: None, rms_norm_eps: 1e-5 };

/// Reads and validates a config.json, with the defaults of transformers 5.24.
///
/// # Errors
/// Values of another type or out of bounds; clipped q, k and v; a window, which transformers does not apply; heads
/// whose total size is not the hidden size, because the norms of q have that size.
pub fn read(config: &Config) -> Result<DecoderSpec, ConfigError> {
    config.quantisation()?;
    if let Some(clip) = config.opt_float(&["clip_qkv"])? {
        return Err(
            config.unsupported(format!("clip_qkv {clip}"), "; queries, keys and values stay as they are")
        );
    }
    check_no_window(config)?;
    check_softmax_routing(config)?;
    let bias = config.bool_or(&["attention_bias"], false)?;
    let attention = AttentionConfig {
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: QkNorm::AllHeads,
        ..attention(config, &SIZES)?
    };
    let AttentionConfig { hidden_size, num_heads, head_dim, .. } = attention;
    if num_heads * head_dim != hidden_size {
        let expected = format!("hidden_size = {hidden_size} over num_attention_heads = {num_heads}");
        return Err(config.invalid("head_dim", &expected, head_dim));
    }
    let positions = config.size_or(&["max_position_embeddings"], 4096, limits::POSITIONS)?;
    config.size_or(&["num_experts", "num_local_experts"], 64, limits::EXPERTS)?;
    let intermediate_size = config.size_or(&["intermediate_size"], 2048, limits::WIDTH)?;
    let layers = config.size_or(&["num_hidden_layers"], 16, limits::LAYERS)?;
    let decoder = DecoderConfig {
        vocab_size: config.size_or(&["vocab_size"], 50304, limits::VOCAB)?,
        hidden_size,
        intermediate_size,
        activation: config.activation()?,
        rms_norm_eps: attention.rms_norm_eps,
        tie_word_embeddings: config.bool_or(&["tie_word_embeddings"], false)?,
        rope: vec![RopeConfig::from_config(config, head_dim, positions)?; layers],
        moe: Some(MoeConfig::new(config.router()?, intermediate_size)),
        is_sparse: vec![true; layers],
        ..DecoderConfig::default()
    };
    DecoderSpec::new(config, decoder, attention, NO_MLA)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(fields: &str) -> Result<DecoderSpec, String> {
        let text = format!(r#"{{"model_type": "olmoe"{fields}}}"#);
        read(&Config::parse(&text, "c").unwrap()).map_err(|e| e.to_string())
    }

    #[test]
    fn an_empty_config_is_olmoe_1b_7b() {
        let spec = parse("").unwrap();
        let decoder = &spec.model.decoder;
        let attention = spec.model.attention(15).unwrap();
        assert_eq!((attention.num_heads, attention.num_kv_heads, attention.head_dim), (16, 16, 128));
        assert_eq!(
            (attention.qk_norm, attention.qkv_bias, attention.rms_norm_eps),
            (QkNorm::AllHeads, false, 1e-5)
        );
        let moe = decoder.moe.as_ref().unwrap();
        assert_eq!((moe.router.num_experts, moe.router.top_k, moe.intermediate_size), (64, 8, 2048));
        assert!(!moe.router.renormalize && decoder.is_sparse == [true; 16]);
        assert_eq!((decoder.rope[15].theta, decoder.vocab_size), (1e4, 50304));
    }

    #[test]
    fn weights_are_renormalised_where_the_config_asks_for_it() {
        let spec = parse(r#", "norm_topk_prob": true, "attention_bias": true, "clip_qkv": null"#).unwrap();
        assert!(spec.model.decoder.moe.as_ref().unwrap().router.renormalize);
        assert!(spec.model.attention_layers().all(|layer| layer.qkv_bias && layer.o_bias));
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (fields, said) in [
            (r#", "clip_qkv": 8.0"#, "clip_qkv 8"),
            (r#", "sliding_window": 128"#, "sliding_window 128"),
            (
                r#", "head_dim": 64"#,
                "`head_dim`: expected hidden_size = 2048 over num_attention_heads = 16, got 64",
            ),
            (r#", "num_key_value_heads": 3"#, "a divisor of num_attention_heads = 16, got 3"),
        ] {
            let error = parse(fields).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
