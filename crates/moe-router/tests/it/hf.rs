//! Tests of from_hf: the dialects, the precedence, and each fault.

use moe_router::{RouterConfig, RoutingMethod, Scoring, Selection};
use serde_json::{Value, json};

use crate::message;

fn from_hf(config: Value) -> RouterConfig {
    RouterConfig::from_hf(&config).unwrap_or_else(|e| panic!("{config}: {e}"))
}

fn grouped(num_expert_group: usize, topk_group: usize) -> Selection {
    Selection::Grouped { num_expert_group, topk_group }
}

#[test]
fn published_configurations() {
    let qwen3_30b = json!({"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": []});
    let want = RouterConfig { renormalize: true, ..RouterConfig::new(128, 8) };
    assert_eq!(from_hf(qwen3_30b), want);
    assert_eq!(want.routing_method(), RoutingMethod::RenormalizeNaive);

    let v2_lite = json!({"model_type": "deepseek_v2", "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "scoring_func": "softmax", "norm_topk_prob": false, "routed_scaling_factor": 1.0});
    let lite = RouterConfig { f32_gate: true, ..RouterConfig::new(64, 6) };
    assert_eq!(from_hf(v2_lite), lite);

    // transformers' default of topk_method for this model type is greedy, whatever the groups are.
    let v2_silent = json!({"model_type": "deepseek_v2", "n_routed_experts": 64, "num_experts_per_tok": 6,
        "n_group": 8, "topk_group": 3});
    assert_eq!(from_hf(v2_silent), lite);

    let v2 = json!({"model_type": "deepseek_v2", "n_routed_experts": 160, "num_experts_per_tok": 6,
        "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy", "scoring_func": "softmax",
        "norm_topk_prob": false, "routed_scaling_factor": 16.0});
    let want =
        RouterConfig { selection: grouped(8, 3), routed_scaling_factor: 16.0, num_experts: 160, ..lite };
    assert_eq!(from_hf(v2), want);

    let v3 = RouterConfig {
        scoring: Scoring::Sigmoid,
        selection: grouped(8, 4),
        correction_bias: true,
        renormalize: true,
        routed_scaling_factor: 2.5,
        f32_gate: true,
        ..RouterConfig::new(256, 8)
    };
    let published = json!({"model_type": "deepseek_v3", "n_routed_experts": 256, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "norm_topk_prob": true, "routed_scaling_factor": 2.5});
    assert_eq!(from_hf(published), v3);
    assert_eq!(v3.routing_method(), RoutingMethod::DeepSeekV3);

    // An unknown model type is accepted if it names its method. What is not in the configuration is then not known.
    let kimi_k2 = json!({"model_type": "kimi_k2", "n_routed_experts": 384, "num_experts_per_tok": 8,
        "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "norm_topk_prob": true, "routed_scaling_factor": 2.827});
    let want = RouterConfig {
        selection: grouped(1, 1),
        routed_scaling_factor: 2.827,
        num_experts: 384,
        f32_gate: false,
        ..v3
    };
    assert_eq!(from_hf(kimi_k2), want);

    let deepseek_v4 = json!({"model_type": "deepseek_v4", "n_routed_experts": 256, "num_experts_per_tok": 6,
        "topk_method": "noaux_tc", "scoring_func": "sqrtsoftplus", "norm_topk_prob": true,
        "routed_scaling_factor": 1.5, "num_hash_layers": 2, "vocab_size": 129280});
    let learned = RouterConfig {
        scoring: Scoring::SqrtSoftplus,
        correction_bias: true,
        renormalize: true,
        routed_scaling_factor: 1.5,
        ..RouterConfig::new(256, 6)
    };
    assert_eq!(RouterConfig::from_hf_layer(&deepseek_v4, 2), Ok(learned.clone()));
    assert_eq!(learned.routing_method(), RoutingMethod::DeepSeekV4);
    let selection = Selection::Hash { vocab_size: 129280 };
    let hash = RouterConfig { selection, correction_bias: false, ..learned };
    assert_eq!(RouterConfig::from_hf_layer(&deepseek_v4, 1), Ok(hash));

    let llama4 = json!({"model_type": "llama4", "text_config": {"model_type": "llama4_text",
        "num_local_experts": 16, "num_experts_per_tok": 1}});
    let want = RouterConfig {
        scoring: Scoring::Sigmoid,
        selection: Selection::RawLogits,
        apply_router_weight_on_input: true,
        ..RouterConfig::new(16, 1)
    };
    assert_eq!(from_hf(llama4), want);
    assert_eq!(want.routing_method(), RoutingMethod::Llama4);
}

/// Returns InfiniLM's keys, without a model type.
fn infinilm(extra: Value) -> Value {
    let mut config = json!({"num_experts": 16, "num_experts_per_tok": 4});
    let (Value::Object(config_map), Value::Object(extra)) = (&mut config, extra) else { unreachable!() };
    config_map.extend(extra);
    config
}

#[test]
fn infinilm_keys_and_their_precedence() {
    let base = RouterConfig::new(16, 4);
    let sigmoid = RouterConfig { scoring: Scoring::Sigmoid, ..base.clone() };
    let noaux = RouterConfig { selection: grouped(4, 2), correction_bias: true, ..sigmoid.clone() };
    let groups = json!({"n_group": 4, "topk_group": 2});
    let with_groups = |mut extra: Value| {
        for (key, value) in groups.as_object().expect("groups") {
            extra[key] = value.clone();
        }
        infinilm(extra)
    };
    let table = [
        (infinilm(json!({})), base.clone()),
        (infinilm(json!({"moe_router_backend": "softmax"})), base.clone()),
        (infinilm(json!({"moe_router_backend": ""})), base.clone()),
        (infinilm(json!({"moe_router_backend": null, "scoring_func": ""})), base.clone()),
        (infinilm(json!({"moe_router_backend": "topksoftmax"})), base.clone()),
        (infinilm(json!({"scoring_func": "sigmoid"})), sigmoid.clone()),
        (infinilm(json!({"moe_router_backend": "sigmoid"})), sigmoid.clone()),
        // The backend has priority over both other keys, and topk_method over scoring_func.
        (with_groups(json!({"moe_router_backend": "sigmoid", "topk_method": "noaux_tc"})), sigmoid.clone()),
        (with_groups(json!({"moe_router_backend": "softmax", "scoring_func": "sigmoid"})), base.clone()),
        (with_groups(json!({"moe_router_backend": "fused_gate", "topk_method": "greedy"})), noaux.clone()),
        (with_groups(json!({"moe_router_backend": "noaux_tc"})), noaux.clone()),
        (with_groups(json!({"topk_method": "noaux_tc"})), noaux.clone()),
        (
            with_groups(json!({"topk_method": "noaux_tc", "scoring_func": "softmax"})),
            RouterConfig { scoring: Scoring::Softmax, ..noaux.clone() },
        ),
        (with_groups(json!({"topk_method": "greedy", "scoring_func": "sigmoid"})), sigmoid.clone()),
        (
            with_groups(json!({"topk_method": "group_limited_greedy"})),
            RouterConfig { selection: grouped(4, 2), ..base.clone() },
        ),
        (infinilm(json!({"topk_method": "noaux_tc", "num_expert_group": 4, "topk_group": 2})), noaux.clone()),
        // This is biased plain top-k, under both spellings.
        (
            infinilm(json!({"scoring_func": "sigmoid", "e_score_correction_bias": true})),
            RouterConfig { correction_bias: true, ..sigmoid.clone() },
        ),
        (
            infinilm(json!({"moe_router_use_correction_bias": true})),
            RouterConfig { correction_bias: true, ..base.clone() },
        ),
        (
            with_groups(json!({"moe_router_backend": "fused_gate", "num_fused_shared_experts": 1,
                "norm_topk_prob": true, "routed_scaling_factor": 2, "apply_routed_scaling_factor_on_output": true})),
            RouterConfig {
                top_k: 3,
                num_fused_shared_experts: 1,
                renormalize: true,
                routed_scaling_factor: 2.0,
                ..noaux
            },
        ),
        // The scaling factor is always applied.
        (
            infinilm(json!({"moe_router_backend": "softmax", "routed_scaling_factor": 2.5})),
            RouterConfig { routed_scaling_factor: 2.5, ..base.clone() },
        ),
        (infinilm(json!({"moe_softcapping": 0})), base.clone()),
        (
            infinilm(json!({"moe_softcapping": 30.0})),
            RouterConfig { softcapping: Some(30.0), ..base.clone() },
        ),
        (infinilm(json!({"num_local_experts": 16})), base.clone()),
        (
            infinilm(json!({"num_experts_per_tok": 1, "apply_router_weight_on_input": true})),
            RouterConfig { top_k: 1, apply_router_weight_on_input: true, ..base },
        ),
    ];
    for (config, want) in table {
        assert_eq!(from_hf(config.clone()), want, "{config}");
    }
}

#[test]
fn every_fault_has_its_message() {
    let table = [
        (json!([1]), "the model's configuration must be a JSON object, got [1]"),
        (
            infinilm(json!({"moe_router_backend": "topk"})),
            "unknown moe_router_backend `topk`; expected one of softmax, topksoftmax, legacy_softmax, sigmoid, \
             fused_gate, noaux_tc",
        ),
        (
            infinilm(json!({"topk_method": "lossy"})),
            "unknown topk_method `lossy`; expected one of greedy, group_limited_greedy, noaux_tc",
        ),
        (
            infinilm(json!({"scoring_func": "relu"})),
            "unknown scoring_func `relu`; expected one of softmax, sigmoid, sqrtsoftplus",
        ),
        // The scoring name is checked even if the backend has priority.
        (
            infinilm(json!({"moe_router_backend": "softmax", "scoring_func": "relu"})),
            "unknown scoring_func `relu`; expected one of softmax, sigmoid, sqrtsoftplus",
        ),
        (
            infinilm(json!({"model_type": "llama"})),
            "model_type `llama` is unknown to the router and the configuration does not say how it routes; set \
             moe_router_backend, topk_method or scoring_func",
        ),
        (
            json!({"num_experts_per_tok": 2}),
            "the model's configuration lacks num_experts or num_local_experts or n_routed_experts or moe_num_experts",
        ),
        (
            json!({"model_type": "deepseek_v2"}),
            "the model's configuration lacks num_experts_per_tok or moe_topk or moe_k",
        ),
        (infinilm(json!({"num_experts": "16"})), "num_experts must be a non-negative integer, got \"16\""),
        (
            infinilm(json!({"num_experts_per_tok": -1})),
            "num_experts_per_tok must be a non-negative integer, got -1",
        ),
        (
            infinilm(json!({"num_experts_per_tok": 2.5})),
            "num_experts_per_tok must be a non-negative integer, got 2.5",
        ),
        (infinilm(json!({"norm_topk_prob": 1})), "norm_topk_prob must be true or false, got 1"),
        (
            infinilm(json!({"routed_scaling_factor": "1"})),
            "routed_scaling_factor must be a number, got \"1\"",
        ),
        (infinilm(json!({"scoring_func": 3})), "scoring_func must be a string, got 3"),
        (
            infinilm(json!({"n_routed_experts": 8})),
            "num_experts = 16 contradicts n_routed_experts = 8; keep one of the two",
        ),
        (
            infinilm(
                json!({"topk_method": "noaux_tc", "num_expert_group": 4, "n_group": 2, "topk_group": 1}),
            ),
            "num_expert_group = 4 contradicts n_group = 2; keep one of the two",
        ),
        (infinilm(json!({"num_experts": 0})), "num_experts must be at least 1, got 0"),
        (infinilm(json!({"num_experts_per_tok": 0})), "num_experts_per_tok must be at least 1, got 0"),
        (
            infinilm(json!({"num_experts_per_tok": 17})),
            "num_experts_per_tok = 17 exceeds the 16 experts of the router",
        ),
        // The key that gave the number is named, in the spelling of the config.
        (
            json!({"scoring_func": "softmax", "n_routed_experts": 4, "moe_topk": 5}),
            "moe_topk = 5 exceeds the 4 experts of the router",
        ),
        (
            json!({"scoring_func": "softmax", "n_routed_experts": 4, "moe_k": 0}),
            "moe_k must be at least 1, got 0",
        ),
        (
            json!({"scoring_func": "softmax", "moe_num_experts": 0, "moe_k": 1}),
            "moe_num_experts must be at least 1, got 0",
        ),
        (
            infinilm(json!({"num_experts_per_tok": 19, "num_fused_shared_experts": 2})),
            "num_experts_per_tok - num_fused_shared_experts = 17 exceeds the 16 experts of the router",
        ),
        (
            infinilm(json!({"num_experts": 9_000_000_000u64})),
            "9000000000 experts, 0 zero experts and 0 fused shared experts are more than the 2147483647 that \
             expert ids can name",
        ),
        (
            infinilm(json!({"routed_scaling_factor": 0.0})),
            "routed_scaling_factor must be finite and above 0, got 0",
        ),
        (
            infinilm(json!({"routed_scaling_factor": 1e300})),
            "routed_scaling_factor must be finite and above 0, got inf",
        ),
        (infinilm(json!({"moe_softcapping": -1})), "softcapping must be finite and above 0, got -1"),
        (
            infinilm(json!({"topk_method": "noaux_tc"})),
            "fused_gate (noaux_tc) routing requires num_expert_group (n_group) and topk_group, both non-zero, got \
             None and None",
        ),
        (
            infinilm(json!({"moe_router_backend": "fused_gate", "n_group": 0, "topk_group": 2})),
            "fused_gate (noaux_tc) routing requires num_expert_group (n_group) and topk_group, both non-zero, got \
             Some(0) and Some(2)",
        ),
        (
            infinilm(json!({"topk_method": "group_limited_greedy", "n_group": 4})),
            "group_limited_greedy routing requires num_expert_group (n_group) and topk_group, both non-zero, got \
             Some(4) and None",
        ),
        (
            infinilm(json!({"topk_method": "noaux_tc", "n_group": 5, "topk_group": 2})),
            "16 experts do not divide into 5 groups",
        ),
        (
            infinilm(json!({"topk_method": "noaux_tc", "n_group": 4, "topk_group": 5})),
            "topk_group = 5 exceeds num_expert_group = 4",
        ),
        (
            infinilm(json!({"topk_method": "noaux_tc", "n_group": 8, "topk_group": 1})),
            "num_experts_per_tok = 4 exceeds the 2 experts that 1 groups of 2 leave",
        ),
        (
            infinilm(json!({"topk_method": "noaux_tc", "n_group": 16, "topk_group": 8})),
            "with a correction bias a group is scored by its two best experts, so each of the 16 groups needs at \
             least 2 experts, got 1",
        ),
        (
            infinilm(
                json!({"topk_method": "noaux_tc", "n_group": 4, "topk_group": 2, "e_score_correction_bias": false}),
            ),
            "fused_gate (noaux_tc) routing requires a correction bias, but e_score_correction_bias is false",
        ),
        (
            infinilm(
                json!({"topk_method": "noaux_tc", "n_group": 4, "topk_group": 2, "num_fused_shared_experts": 4}),
            ),
            "num_experts_per_tok = 4 counts the fused shared experts and must exceed num_fused_shared_experts = 4",
        ),
        (
            infinilm(json!({"n_group": 4, "topk_group": 2})),
            "num_expert_group = 4 is set, but nothing says whether routing uses groups; set topk_method (greedy, \
             group_limited_greedy or noaux_tc)",
        ),
        (
            infinilm(json!({"apply_router_weight_on_input": true})),
            "apply_router_weight_on_input is only implemented for top_k = 1, got 4 slots per token (4 routed, 0 fused \
             shared)",
        ),
        (
            infinilm(json!({"zero_expert_num": 4})),
            "4 zero experts need plain top-k selection with a correction bias, got top-k selection with \
             correction_bias = false",
        ),
        (
            json!({"model_type": "longcat_flash", "zero_expert_type": "copy"}),
            "unsupported zero_expert_type `copy`; only `identity` is defined",
        ),
        (
            json!({"model_type": "gpt_oss", "e_score_correction_bias": true}),
            "a correction bias has no effect on raw-logit selection; remove one of the two",
        ),
    ];
    for (config, want) in table {
        assert_eq!(message(RouterConfig::from_hf(&config)), want, "{config}");
    }
}

#[test]
fn layer_types_are_checked() {
    let v4 = |extra: Value| {
        let mut config = json!({"model_type": "deepseek_v4", "vocab_size": 10});
        config["mlp_layer_types"] = extra;
        message(RouterConfig::from_hf_layer(&config, 1))
    };
    assert_eq!(v4(json!(["moe", "dense"])), "unknown mlp_layer_types `dense`; expected one of hash_moe, moe");
    assert_eq!(
        v4(json!(["moe"])),
        "mlp_layer_types must be an array with a string for every layer, got [\"moe\"]"
    );
    let no_vocabulary = json!({"model_type": "deepseek_v4"});
    let e = message(RouterConfig::from_hf_layer(&no_vocabulary, 0));
    assert_eq!(e, "the model's configuration lacks vocab_size");
    assert!(RouterConfig::from_hf_layer(&no_vocabulary, 3).is_ok());
}

#[test]
fn long_values_are_cut_in_messages() {
    let e = message(RouterConfig::from_hf(&json!({"num_experts_per_tok": "é".repeat(500)})));
    assert!(e.len() < 250 && e.ends_with("..."), "{e}");
}

#[test]
fn the_configuration_round_trips_through_json() -> Result<(), serde_json::Error> {
    let config = RouterConfig {
        scoring: Scoring::SqrtSoftplus,
        selection: Selection::Simulated { strategy: "uniform_random".to_owned(), seed: u64::MAX },
        softcapping: Some(30.0),
        ..RouterConfig::new(8, 2)
    };
    let text = serde_json::to_string(&config)?;
    assert!(text.contains("\"sqrtsoftplus\""), "{text}");
    assert_eq!(serde_json::from_str::<RouterConfig>(&text)?, config);
    Ok(())
}
