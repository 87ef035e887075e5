//! Tests of the configs of published models, in both styles.

use candle_core::DType;
use model_runtime::config::Config;
use model_runtime::{Geometry, MlaForm, TensorSpec};
use moe_engine::ModelSpec;
use moe_layer::RouterSelection;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::read;
use crate::latent::LatentSpec;

fn config(value: Value) -> LatentSpec {
    read(&Config::parse(&value.to_string(), "config.json").unwrap()).unwrap()
}

/// The tensors of a checkpoint whose experts are packed, or stored one by one.
fn tensors(config: &LatentSpec, packed: bool) -> Vec<TensorSpec> {
    config.layout(&Geometry::default(), &|_| packed).unwrap().tensors
}

/// DeepSeek-V2-Lite's config.json, without keys that have no effect here.
fn v2_lite() -> Value {
    json!({"model_type": "deepseek_v2", "attention_bias": false, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": null, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40,
        "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "tie_word_embeddings": false,
        "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 102400})
}

fn with(changes: Value) -> LatentSpec {
    let mut value = v2_lite();
    value.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    config(value)
}

#[test]
fn v2_lite_and_v2_come_to_their_published_sizes() {
    let lite = config(v2_lite());
    let decoder = &lite.decoder;
    assert_eq!(decoder.is_sparse, [vec![false], vec![true; 26]].concat());
    assert_eq!(
        (decoder.shared_intermediate_size(), decoder.num_experts(), lite.attention.q_lora_rank),
        (2816, 64, None)
    );
    let router = &decoder.moe.as_ref().unwrap().router;
    assert_eq!((router.top_k, router.renormalize, &router.selection), (6, false, &RouterSelection::TopK));
    assert_eq!((decoder.max_context_len(), lite.dtype), (163840, Some(DType::BF16)));
    assert!(lite.ignored_by_transformers.is_empty());
    // The value is 192^-1/2 times (0.1 * 0.707 * ln 40 + 1)^2.
    assert!((lite.attention.softmax_scale - 0.114_721_386).abs() < 1e-8, "{}", lite.attention.softmax_scale);
    let weights = |config: &LatentSpec| -> usize {
        let specs = tensors(config, false);
        specs.iter().map(|t| t.shape.iter().product::<usize>()).sum()
    };
    assert_eq!(weights(&lite), 15_706_484_224);

    let v2 = with(json!({"hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "n_group": 8, "n_routed_experts": 160, "num_attention_heads": 128, "num_hidden_layers": 60,
        "num_key_value_heads": 128, "q_lora_rank": 1536, "routed_scaling_factor": 16.0, "topk_group": 3,
        "topk_method": "group_limited_greedy"}));
    assert_eq!(weights(&v2), 235_741_434_880);
    let router = &v2.decoder.moe.as_ref().unwrap().router;
    assert_eq!(router.selection, RouterSelection::Grouped { num_expert_group: 8, topk_group: 3 });
    assert_eq!(router.routed_scaling_factor, 16.0);
    let kv =
        |form| v2.mla(form).kv_layout(DType::BF16).layers(v2.decoder.num_layers()).bytes_per_token().unwrap();
    assert_eq!(kv(MlaForm::Absorbed), 60 * 2 * (512 + 64));
    assert_eq!(kv(MlaForm::Naive), 60 * 2 * 128 * (128 + 64 + 128));
}

#[test]
fn noaux_tc_takes_its_bias_from_the_checkpoint() {
    let biased =
        with(json!({"topk_method": "noaux_tc", "n_group": 8, "topk_group": 3, "norm_topk_prob": true}));
    let router = &biased.decoder.moe.as_ref().unwrap().router;
    assert!(
        router.correction_bias && matches!(router.selection, RouterSelection::Grouped { .. }),
        "{router:?}"
    );
    let bias = "model.layers.1.mlp.gate.e_score_correction_bias";
    let shape = |config| tensors(config, false).into_iter().find(|t| t.name == bias).map(|t| t.shape);
    assert_eq!((shape(&biased), shape(&config(v2_lite()))), (Some(vec![64]), None));
    assert!(biased.ignored_by_transformers.iter().any(|option| option.contains("noaux_tc")));
}

#[test]
fn what_is_left_out_has_the_defaults_of_transformers() {
    let config = config(json!({"model_type": "deepseek_v2", "num_experts_per_tok": 6}));
    let decoder = &config.decoder;
    let mla = &config.attention;
    let moe = decoder.moe.as_ref().unwrap();
    assert_eq!((decoder.vocab_size, decoder.hidden_size, decoder.intermediate_size), (102400, 4096, 11008));
    assert_eq!((decoder.num_layers(), mla.num_heads, moe.intermediate_size), (32, 32, 1407));
    assert_eq!((mla.q_lora_rank, mla.kv_lora_rank, mla.v_head_dim), (Some(1536), 512, 128));
    assert_eq!((moe.shared_intermediate_size, moe.router.num_experts), (2 * 1407, 64));
    assert_eq!(decoder.is_sparse, [true; 32]);
    assert_eq!((mla.bias, decoder.tie_word_embeddings, decoder.rms_norm_eps), (false, false, 1e-6));
    assert!((mla.softmax_scale - 192f64.powf(-0.5)).abs() < 1e-12);
}

#[test]
fn explicit_nulls_mean_none_as_in_published_configs() {
    let config =
        with(json!({"n_routed_experts": null, "n_shared_experts": null, "num_experts_per_tok": null}));
    assert!(config.decoder.moe.is_none() && config.decoder.moe_layers().is_empty());
    let none = with(json!({"n_shared_experts": null}));
    assert_eq!((none.decoder.shared_intermediate_size(), none.decoder.num_experts()), (0, 64));
    assert!(with(json!({"topk_method": null, "n_group": null, "topk_group": null})).decoder.moe.is_some());
}

#[test]
fn layers_follow_first_k_dense_replace_and_moe_layer_freq() {
    let sparse = |first: usize, every: usize| -> Vec<usize> {
        let changes =
            json!({"first_k_dense_replace": first, "moe_layer_freq": every, "num_hidden_layers": 7});
        with(changes).decoder.moe_layers()
    };
    assert_eq!(sparse(0, 1), [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(sparse(3, 1), [3, 4, 5, 6]);
    assert_eq!(sparse(0, 2), [0, 2, 4, 6]);
    assert_eq!(sparse(3, 2), [4, 6]);
    assert_eq!(sparse(1, 0), [1, 2, 3, 4, 5, 6]);
    assert_eq!(sparse(9, 1), [] as [usize; 0]);
}

#[test]
fn options_that_transformers_ignores_are_collected() {
    let ignored = |changes| with(changes).ignored_by_transformers;
    assert_eq!(ignored(json!({"norm_topk_prob": true})), ["norm_topk_prob true"]);
    let all = json!({"norm_topk_prob": true, "scoring_func": "sigmoid", "moe_layer_freq": 3});
    assert_eq!(ignored(all), ["norm_topk_prob true", "scoring_func \"sigmoid\"", "moe_layer_freq 3"]);
    assert!(ignored(json!({"n_routed_experts": null, "moe_layer_freq": 3})).is_empty());
}

#[test]
fn both_styles_say_the_same() {
    let hub = with(json!({"rope_theta": 50000.0}));
    let mut value = v2_lite();
    let object = value.as_object_mut().unwrap();
    let mut rope = object.remove("rope_scaling").unwrap();
    rope["rope_theta"] = json!(50000.0);
    rope["rope_type"] = rope["type"].take();
    object.remove("rope_theta");
    object.remove("torch_dtype");
    object.extend(
        json!({"rope_parameters": rope, "dtype": "bfloat16", "head_dim": 64, "qk_head_dim": 192})
            .as_object()
            .unwrap()
            .clone(),
    );
    let saved = config(value);
    assert_eq!((saved.decoder.rope, saved.attention), (hub.decoder.rope, hub.attention));
    assert_eq!(saved.dtype, hub.dtype);
}

#[test]
fn mscale_scales_the_softmax_of_every_scaled_rope() {
    let scale = |rope: Value| with(json!({"rope_scaling": rope})).attention.softmax_scale * 192f64.sqrt();
    let mscale = |factor: f64, all: f64| (0.1 * all * factor.ln() + 1.0).powi(2);
    let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
    close(scale(json!(null)), 1.0);
    close(scale(json!({"type": "yarn", "factor": 4})), 1.0);
    close(scale(json!({"type": "yarn", "factor": 4, "mscale": 2.0})), 1.0);
    close(scale(json!({"type": "yarn", "factor": 4, "mscale_all_dim": 0.9})), mscale(4.0, 0.9));
    close(scale(json!({"type": "linear", "factor": 2.5, "mscale_all_dim": 0.5})), mscale(2.5, 0.5));
    close(scale(json!({"type": "linear", "factor": 1, "mscale_all_dim": 0.5})), 1.0);
}

/// Generates values that occur in real configs and in malicious ones.
fn value() -> impl Strategy<Value = Value> {
    let number =
        prop_oneof![0u64..9, Just(64u64), Just(1 << 20), Just((1 << 20) + 1), Just(1 << 46), Just(u64::MAX)];
    prop_oneof![
        number.prop_map(|n| json!(n)),
        prop_oneof![Just(-1.0), Just(0.5), Just(1e-300), Just(1e300)].prop_map(|x| json!(x)),
        prop_oneof![Just("greedy"), Just("group_limited_greedy"), Just("sigmoid"), Just("yarn"), Just("x")]
            .prop_map(|s| json!(s)),
        any::<bool>().prop_map(|b| json!(b)),
        Just(json!(null)),
        Just(json!([1])),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every config is either refused with a message, or has sizes and scales that can be used.
    #[test]
    fn absurd_configs_are_refused_or_usable(
        changes in proptest::collection::vec((0usize..60, value()), 1..4),
        rope in proptest::collection::vec((0usize..9, value()), 0..3),
    ) {
        let mut config = v2_lite();
        let keys: Vec<String> = config.as_object().unwrap().keys().cloned().collect();
        let rope_keys: Vec<String> = config["rope_scaling"].as_object().unwrap().keys().cloned().collect();
        for (key, value) in rope {
            config["rope_scaling"][&rope_keys[key % rope_keys.len()]] = value;
        }
        for (key, value) in changes {
            let key = &keys[key % keys.len()];
            if key != "model_type" {
                config[key] = value;
            }
        }
        let text = config.to_string();
        let config = match read(&Config::parse(&text, "config.json").unwrap()) {
            Ok(config) => config,
            Err(e) => {
                prop_assert!(e.to_string().contains("config.json"), "{e}");
                return Ok(());
            }
        };
        let scale = config.attention.softmax_scale as f32;
        prop_assert!(scale.is_finite() && scale > 0.0, "{scale}");
        let layers = config.decoder.num_layers();
        for form in [MlaForm::Absorbed, MlaForm::Naive] {
            prop_assert!(config.mla(form).kv_layout(DType::F32).layers(layers).bytes_per_token().is_ok());
        }
        if layers * config.decoder.num_experts().max(1) <= 4096 {
            let count = |packed| tensors(&config, packed).len();
            prop_assert!(count(true) <= count(false) + 3 * layers);
        }
    }
}
