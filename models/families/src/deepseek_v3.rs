//! DeepSeek-V3 and models with the same network: latent attention, sigmoid scores with a correction bias, groups of
//! experts, shared experts, dense first layers.

use model_runtime::config::{Config, ConfigError, limits};
use model_runtime::{DecoderConfig, MoeConfig, TensorNames};
use moe_engine::ModelFamily;

use crate::fixed_keys::check_noaux_routing;
use crate::latent::LatentSpec;
use crate::latent_config::{Sizes, attention, check_interleaved, or_null, rope};

/// DeepSeek-V3, R1, V3.1 and Moonlight.
pub const FAMILY: ModelFamily = ModelFamily {
    model_type: "deepseek_v3",
    architecture: "DeepseekV3ForCausalLM",
    example: "moonshotai/Moonlight-16B-A3B",
    parse: |config| Ok(Box::new(read(config)?)),
};

/// Kimi K2: the network of DeepSeek-V3 with another `model_type`, for which transformers has no class.
pub const KIMI_K2: ModelFamily = ModelFamily {
    model_type: "kimi_k2",
    architecture: "DeepseekV3ForCausalLM",
    example: "moonshotai/Kimi-K2-Instruct",
    parse: |config| Ok(Box::new(read(&config.with("model_type", FAMILY.model_type))?)),
};

const SIZES: Sizes = Sizes {
    hidden_size: 7168,
    num_heads: 128,
    q_lora_rank: 1536,
    qk_nope_head_dim: 128,
    v_head_dim: 128,
    max_position_embeddings: 4096,
};

/// Reads and validates a config, with the defaults of transformers 5.17.
///
/// # Errors
/// Values of another type or out of bounds; another routing than DeepSeek-V3's; dense layers after sparse ones.
pub fn read(config: &Config) -> Result<LatentSpec, ConfigError> {
    config.quantisation()?;
    check_noaux_routing(config)?;
    for key in ["rope_interleave", "norm_topk_prob"] {
        // transformers reads null as false.
        if config.object().get(key).is_some_and(|value| value.is_null()) {
            return Err(config.unsupported(format!("{key} null"), "; say true, or leave the key out"));
        }
    }
    check_interleaved(config)?;
    let every = config.size_or(&["moe_layer_freq"], 1, 0..=*limits::LAYERS.end())?;
    if every != 1 {
        let advice = "; every layer from first_k_dense_replace on has experts";
        return Err(config.unsupported(format!("moe_layer_freq {every}"), advice));
    }
    let width = |key: &str, default| config.size_or(&[key], default, limits::WIDTH);
    let rope = rope(config, &SIZES)?;
    let attention = attention(config, &rope, &SIZES)?;
    config.size_or(&["n_routed_experts", "num_experts", "num_local_experts"], 256, limits::EXPERTS)?;
    let intermediate_size = width("moe_intermediate_size", 2048)?;
    let shared = or_null(config, "n_shared_experts", 1, 0..=*limits::EXPERTS.end())?.unwrap_or(0);
    let layers = config.size_or(&["num_hidden_layers"], 61, limits::LAYERS)?;
    let dense = config.size_or(&["first_k_dense_replace"], 3, 0..=*limits::LAYERS.end())?;
    let decoder = DecoderConfig {
        names: TensorNames { shared_experts: Some("shared_experts"), ..TensorNames::USUAL },
        vocab_size: config.size_or(&["vocab_size"], 129280, limits::VOCAB)?,
        hidden_size: attention.hidden_size,
        intermediate_size: width("intermediate_size", 18432)?,
        activation: config.activation()?,
        rms_norm_eps: config.rms_norm_eps()?,
        zero_centred_norms: false,
        tie_word_embeddings: config.bool_or(&["tie_word_embeddings"], false)?,
        rope: vec![rope; layers],
        moe: Some(MoeConfig {
            shared_intermediate_size: shared * intermediate_size,
            ..MoeConfig::new(config.router()?, intermediate_size)
        }),
        is_sparse: (0..layers).map(|layer| layer >= dense).collect(),
    };
    LatentSpec::new(config, decoder, attention)
}

#[cfg(test)]
mod tests {
    use moe_layer::RouterSelection;

    use super::*;
    use crate::ALL;

    fn parse(fields: &str) -> Result<LatentSpec, String> {
        let text = format!(r#"{{"model_type": "deepseek_v3"{fields}}}"#);
        read(&Config::parse(&text, "c").unwrap()).map_err(|e| e.to_string())
    }

    #[test]
    fn an_empty_config_is_deepseek_v3() {
        let spec = parse("").unwrap();
        let decoder = &spec.decoder;
        let attention = &spec.attention;
        assert_eq!(
            (attention.num_heads, attention.q_lora_rank, attention.kv_lora_rank),
            (128, Some(1536), 512)
        );
        assert_eq!(
            (attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim),
            (128, 64, 128)
        );
        assert_eq!((attention.norm_eps, attention.bias), (1e-6, false));
        let moe = decoder.moe.as_ref().unwrap();
        assert_eq!((moe.router.num_experts, moe.router.top_k, moe.shared_intermediate_size), (256, 8, 2048));
        assert_eq!(moe.router.selection, RouterSelection::Grouped { num_expert_group: 8, topk_group: 4 });
        assert_eq!((moe.router.routed_scaling_factor, moe.router.scoring.name()), (2.5, "sigmoid"));
        assert!(moe.router.correction_bias && moe.router.renormalize);
        assert!(decoder.is_sparse[..3] == [false; 3] && decoder.is_sparse[3..] == [true; 58]);
        assert_eq!((decoder.vocab_size, decoder.max_context_len()), (129280, 4096));
    }

    #[test]
    fn null_means_none_and_yarn_scales_the_scores() {
        let spec = parse(r#", "q_lora_rank": null, "n_shared_experts": null"#).unwrap();
        assert_eq!((spec.attention.q_lora_rank, spec.decoder.shared_intermediate_size()), (None, 0));
        let yarn = r#", "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}"#;
        let scale = parse(yarn).unwrap().attention.softmax_scale * 192f64.sqrt();
        assert!((scale - (0.1 * 40f64.ln() + 1.0).powi(2)).abs() < 1e-12, "{scale}");
    }

    #[test]
    fn kimi_k2_is_the_same_network() {
        let kimi = Config::parse(r#"{"model_type": "kimi_k2", "n_group": 1, "topk_group": 1}"#, "c").unwrap();
        let spec = ALL.parse(&kimi).unwrap();
        let router = &spec.decoder().moe.as_ref().unwrap().router;
        assert_eq!(
            (router.num_experts, router.scoring.name(), router.correction_bias),
            (256, "sigmoid", true)
        );
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (fields, said) in [
            (r#", "topk_method": "greedy""#, "topk_method \"greedy\" is not supported"),
            (r#", "scoring_func": "softmax""#, "scoring_func \"softmax\" is not supported"),
            (r#", "moe_layer_freq": 2"#, "moe_layer_freq 2 is not supported"),
            (r#", "rope_interleave": false"#, "rope_interleave false is not supported"),
            (r#", "partial_rotary_factor": 0.5"#, "partial_rotary_factor 0.5 is not supported"),
            (r#", "num_key_value_heads": 8"#, "`num_key_value_heads`: expected num_attention_heads = 128"),
            (r#", "qk_rope_head_dim": 7"#, "`qk_rope_head_dim`: expected an even number"),
        ] {
            let error = parse(fields).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
