//! Headers of all makers, and the format that each module gets.

use moe_quant::safetensors::Dtype;
use moe_quant::{Format, GptqZeros, QuantConfig, QuantGroup, QuantScheme};
use serde_json::{Value, json};

pub fn read(header: Value) -> QuantConfig {
    QuantConfig::from_json(&json!({ "quantization_config": header })).unwrap().unwrap()
}

fn scheme(config: &QuantConfig, module: &str) -> String {
    config.scheme_of(module).unwrap().to_string()
}

const UP: &str = "model.layers.1.mlp.experts.10.up_proj";
const GATE: &str = "model.layers.1.mlp.gate";
const GATE_PROJ: &str = "model.layers.1.mlp.gate_proj";
const Q: &str = "model.layers.1.self_attn.q_proj";

#[test]
fn a_config_without_a_header_is_not_quantised() {
    for config in
        [json!({}), json!({"quantization_config": null}), json!({"compression_config": null}), json!(3)]
    {
        assert!(QuantConfig::from_json(&config).unwrap().is_none());
    }
}

#[test]
fn the_header_may_lie_in_text_config() {
    let header = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    for config in [
        json!({"text_config": {"quantization_config": header}}),
        json!({"compression_config": header}),
        json!({"quantization_config": header}),
    ] {
        assert_eq!(QuantConfig::from_json(&config).unwrap().unwrap().method(), "fp8");
    }
}

#[test]
fn gptq_with_overrides() {
    let config = read(json!({
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true, "desc_act": true,
        "checkpoint_format": "gptq", "pack_dtype": "int32", "damp_percent": 0.01, "true_sequential": true,
        "dynamic": {
            r"-:.*\.mlp\.gate$": {},
            r"+:.*experts\.(1|2)\..*": {"bits": 8, "group_size": 64},
            r".*experts\.10\.down_proj": {"desc_act": false, "sym": false},
            r".*experts.*": {"group_size": -1},
        },
    }));
    assert_eq!(config.method(), "gptq");
    assert_eq!(scheme(&config, Q), "int4 group 128 with act-order");
    assert_eq!(scheme(&config, GATE), "none");
    assert_eq!(scheme(&config, GATE_PROJ), "int4 group 128 with act-order");
    assert_eq!(scheme(&config, "lm_head"), "none");
    assert_eq!(scheme(&config, "model.layers.0.mlp.experts.2.up_proj"), "int8 group 64 with act-order");
    assert_eq!(scheme(&config, "model.layers.0.mlp.experts.10.down_proj"), "int4 group 128 with zero points");
    // If the group is the whole row, columns cannot be in an order by group.
    assert_eq!(scheme(&config, UP), "int4 per channel");
}

#[test]
fn gptq_versions_heads_and_blocks() {
    let config = read(json!({
        "quant_method": "gptq", "w_bit": 8, "q_group_size": 32, "sym": false, "lm_head": true, "format": "gptq_v2",
        "modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.gate_proj"]],
    }));
    let Format::Gptq { int, zeros: GptqZeros::V2 } = config.format_of(Q).unwrap() else { panic!() };
    assert_eq!((int.bits, int.group, int.zero_point, int.act_order), (8, QuantGroup::Size(32), true, false));
    assert_eq!(scheme(&config, GATE_PROJ), "int8 group 32 with zero points");
    assert_eq!(scheme(&config, UP), "none");
    let config = read(json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "lm_head": true}));
    assert_eq!(scheme(&config, "lm_head"), "int4 group 32");
}

#[test]
fn older_gptq_headers_stand_alone() {
    let header = json!({"bits": 4, "group_size": 128, "desc_act": false, "sym": true});
    let config = QuantConfig::from_header("quantize_config.json", &header).unwrap();
    assert_eq!(scheme(&config, Q), "int4 group 128");
}

#[test]
fn awq_leaves_out_whole_segments() {
    let config = read(json!({
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "GEMM",
        "modules_to_not_convert": ["gate", "model.layers.0."],
    }));
    assert_eq!(scheme(&config, UP), "int4 group 128 with zero points");
    assert_eq!(scheme(&config, GATE), "none");
    assert_eq!(scheme(&config, GATE_PROJ), "int4 group 128 with zero points");
    assert_eq!(scheme(&config, "model.layers.0.self_attn.q_proj"), "none");
    assert_eq!(scheme(&config, "lm_head"), "none");
}

#[test]
fn awq_of_gptqmodel_with_overrides() {
    let config = read(json!({
        "quant_method": "awq", "method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm",
        "format": "gemm", "checkpoint_format": "gemm", "pack_dtype": "int32", "desc_act": false, "lm_head": false,
        // Patterns that keep modules in floats count first, wherever they are in the list.
        "dynamic": {"+:.*experts.*": {"group_size": 32, "sym": true}, r"-:.*experts\.10\..*": {}},
    }));
    assert_eq!(scheme(&config, Q), "int4 group 128 with zero points");
    assert_eq!(scheme(&config, "model.layers.1.mlp.experts.9.up_proj"), "int4 group 32");
    assert_eq!(scheme(&config, UP), "none");
}

#[test]
fn compressed_tensors_prefers_names_to_patterns_to_classes() {
    let group = |targets: Value, bits: u8, extra: Value| {
        let mut weights = json!({"num_bits": bits, "type": "int", "symmetric": true, "strategy": "channel"});
        weights.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        json!({"targets": targets, "weights": weights, "input_activations": null})
    };
    let config = read(json!({
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "config_groups": {
            "a": group(json!(["Linear"]), 8, json!({})),
            "b": group(json!(["re:.*experts.*"]), 4, json!({"strategy": "group", "group_size": 32, "actorder": "group"})),
            "c": group(json!([UP]), 4, json!({"symmetric": false})),
            "d": {"targets": ["re:.*k_proj"], "weights": null},
        },
    }));
    assert_eq!(scheme(&config, Q), "int8 per channel");
    assert_eq!(scheme(&config, "model.layers.0.mlp.experts.3.up_proj"), "int4 group 32 with act-order");
    assert_eq!(scheme(&config, UP), "int4 per channel with zero points");
    assert_eq!(scheme(&config, GATE), "none");
    assert_eq!(scheme(&config, "lm_head"), "none");
    assert!(config.notes().is_empty());
}

#[test]
fn actorder_by_any_name() {
    for (value, ordered) in [
        (json!(null), false),
        (json!("group"), true),
        (json!("dynamic"), true),
        (json!(true), true),
        (json!("weight"), false),
        (json!("static"), false),
        (json!(false), false),
    ] {
        let weights = json!({"num_bits": 4, "group_size": 128, "actorder": value});
        let config = read(json!({
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
        }));
        let expected = QuantScheme::int(4, QuantGroup::Size(128)).with_act_order(ordered);
        assert_eq!(config.scheme_of(Q).unwrap(), expected, "{value}");
    }
}

#[test]
fn fp8_of_compressed_tensors_is_announced_as_weight_only() {
    let config = read(json!({
        "config_groups": {"g": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true, "dynamic": false},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": true},
        }},
        "format": "float-quantized", "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8},
    }));
    assert_eq!(config.format_of(Q).unwrap(), Format::Fp8 { scales: QuantGroup::Channel, scale_inv: false });
    let notes = config.notes().join("\n");
    assert!(
        notes.contains("activations in float8; here only the weights") && notes.contains("KV cache"),
        "{notes}"
    );
}

#[test]
fn compressed_tensors_of_2024() {
    let config = read(json!({
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "frozen",
        "global_compression_ratio": 1.5, "ignore": ["lm_head"], "kv_cache_scheme": null,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights":
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x64", "dynamic": false}}},
    }));
    let expected = Format::Fp8 { scales: QuantGroup::Block { n: 128, k: 64 }, scale_inv: false };
    assert_eq!(config.format_of(UP).unwrap(), expected);
}

#[test]
fn compressed_tensors_of_several_formats() {
    let config = read(json!({
        "quant_method": "compressed-tensors", "format": "mixed-precision", "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["re:.*experts.*"], "format": "pack-quantized",
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}},
            "group_1": {"targets": ["re:.*self_attn.*"], "format": "float-quantized",
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
        },
    }));
    assert_eq!(scheme(&config, UP), "int4 group 128");
    assert_eq!(scheme(&config, Q), "fp8 per channel");
    assert_eq!(scheme(&config, GATE_PROJ), "none");
}

#[test]
fn fp8_of_qwen_and_deepseek() {
    let config = read(json!({
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    }));
    let block = Format::Fp8 { scales: QuantGroup::Block { n: 128, k: 128 }, scale_inv: true };
    assert_eq!(config.format_of(UP).unwrap(), block);
    assert_eq!(config.format_of(GATE).unwrap(), Format::Plain);
    assert_eq!(config.format_of(GATE_PROJ).unwrap(), block);
    assert!(config.notes()[0].contains("activations keep their dtype"));
    let config = read(json!({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": [Q]}));
    assert_eq!(scheme(&config, UP), "fp8 per tensor");
    assert_eq!(scheme(&config, Q), "none");
}

#[test]
fn auto_round_with_layers_of_their_own() {
    let config = read(json!({
        "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": true, "data_type": "int", "act_bits": 16,
        "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers",
        "extra_config": {
            GATE: {"bits": 16, "data_type": "float"},
            r".*self_attn\.[qk]_proj": {"bits": 8, "group_size": 32, "sym": false},
            "experts.3": {"bits": 16},
        },
    }));
    assert_eq!(scheme(&config, UP), "int4 group 128");
    assert_eq!(scheme(&config, GATE), "none");
    assert_eq!(scheme(&config, GATE_PROJ), "int4 group 128");
    assert_eq!(scheme(&config, Q), "int8 group 32 with zero points");
    assert_eq!(scheme(&config, "model.layers.0.mlp.experts.3.up_proj"), "none");
    assert_eq!(scheme(&config, "visual.blocks.0.up_proj"), "none");
    assert_eq!(scheme(&config, "lm_head"), "none");
    for (name, zeros) in [
        ("auto_round:gptq:exllamav2", GptqZeros::V1),
        ("gptq:exllamav2", GptqZeros::V1),
        ("auto_round:tritonv2", GptqZeros::V2),
        ("auto_round:gptqmodel", GptqZeros::V2),
    ] {
        let config =
            read(json!({"quant_method": "intel/auto-round", "bits": 4, "group_size": 32, "sym": false,
            "backend": name}));
        let Format::Gptq { zeros: found, .. } = config.format_of(UP).unwrap() else { panic!("{name}") };
        assert_eq!(found, zeros, "{name}");
    }
    let config = read(json!({"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": false,
        "packing_format": "auto_round:auto_awq", "extra_config": {"lm_head": {"bits": 4}}}));
    assert!(matches!(config.format_of(UP).unwrap(), Format::Awq { .. }));
    assert_eq!(scheme(&config, "lm_head"), "int4 group 32 with zero points");
}

#[test]
fn the_file_decides_what_the_header_leaves_open() {
    let config = read(json!({"quant_method": "gptq", "bits": 4, "group_size": 128}));
    let in_file = |module: &str, suffix: &'static str, dtype| {
        config.format_in_file(module, move |asked| (asked == suffix).then_some(dtype))
    };
    // Routers stay in floats although the header does not say so.
    assert_eq!(in_file(GATE, "weight", Dtype::BF16).unwrap(), Format::Plain);
    assert!(matches!(in_file(UP, "qweight", Dtype::I32).unwrap(), Format::Gptq { .. }));
    assert_eq!(in_file("lm_head", "weight", Dtype::F16).unwrap(), Format::Plain);
    let head = in_file("lm_head", "qweight", Dtype::I32).unwrap();
    assert!(matches!(head, Format::Gptq { .. }));
    assert!(config.is_left_out("lm_head", head).unwrap() && !config.is_left_out(UP, head).unwrap());
    // A module in another format than the header's cannot be read, because its settings are unknown.
    let error = in_file("lm_head", "weight_packed", Dtype::I32).unwrap_err().to_string();
    assert!(error.contains("lm_head: the header (gptq) says that it is not quantised"), "{error}");
    assert!(error.contains("modules_in_block_to_quantize"), "{error}");
    // The scales of FP8 have two possible names.
    let blocks = read(json!({"quant_method": "fp8", "weight_block_size": [128, 128]}));
    for (config, scales) in [
        (read(json!({"quant_method": "fp8"})), QuantGroup::Tensor),
        (blocks, QuantGroup::Block { n: 128, k: 128 }),
    ] {
        for (name, scale_inv) in [("weight_scale", false), ("weight_scale_inv", true)] {
            let dtype_of = |suffix: &str| match suffix {
                "weight" => Some(Dtype::F8_E4M3),
                _ => (suffix == name).then_some(Dtype::F32),
            };
            assert_eq!(config.format_in_file(UP, dtype_of).unwrap(), Format::Fp8 { scales, scale_inv });
        }
    }
}

/// A module that the header keeps in floats but the file stores quantised has the format of the other modules.
#[test]
fn names_in_the_file_count_more_than_lists_in_the_header() {
    let attention = "model.layers.0.self_attn.q_proj";
    let qweight = Dtype::I32;
    let listed = json!([["mlp.experts.0.up_proj"]]);
    let left_out = json!(["self_attn"]);
    for (header, suffix, dtype) in [
        (
            json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "modules_in_block_to_quantize": listed}),
            "qweight",
            qweight,
        ),
        (
            json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*self_attn.*": {}}}),
            "qweight",
            qweight,
        ),
        (
            json!({"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": left_out}),
            "qweight",
            qweight,
        ),
        (json!({"quant_method": "fp8", "modules_to_not_convert": left_out}), "weight", Dtype::F8_E4M3),
    ] {
        let config = read(header.clone());
        assert_eq!(config.format_of(attention).unwrap(), Format::Plain);
        let in_file = |module| config.format_in_file(module, |asked| (asked == suffix).then_some(dtype));
        let format = in_file(attention).unwrap();
        assert_eq!(format, in_file("model.layers.0.mlp.experts.0.up_proj").unwrap(), "{header}");
        assert!(format != Format::Plain && config.is_left_out(attention, format).unwrap(), "{header}");
    }
}
