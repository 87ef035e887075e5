//! Headers that are refused. Each error names the key, its value, and what was expected or would work.

use moe_quant::QuantConfig;
use serde_json::{Value, json};

/// Replaces one value of a valid header. `path` has its keys with dots between them.
fn changed(mut header: Value, path: &str, value: Value) -> Value {
    let mut at = &mut header;
    for part in path.split('.') {
        at = at.as_object_mut().unwrap().entry(part).or_insert(json!({}));
    }
    *at = value;
    header
}

fn refusal(header: &Value) -> String {
    let config = json!({ "quantization_config": header });
    match QuantConfig::from_json(&config) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("accepted: {header}"),
    }
}

/// The key, the value, and parts of the message.
type Fault = (&'static str, Value, &'static [&'static str]);

fn each_is_refused(good: &Value, faults: Vec<Fault>) {
    QuantConfig::from_json(&json!({ "quantization_config": good })).unwrap().unwrap();
    for (path, value, parts) in faults {
        let text = refusal(&changed(good.clone(), path, value));
        for part in parts {
            assert!(text.contains(part), "{path}: {text:?} lacks {part:?}");
        }
    }
}

#[test]
fn methods() {
    for method in ["bitsandbytes", "aqlm", "hqq", "torchao", "exl3", "quip", "eetq"] {
        let text = refusal(&json!({"quant_method": method, "bits": 4}));
        assert!(text.contains(&format!("quantisation method `{method}` (`quantization_config`)")), "{text}");
        assert!(
            text.contains("compressed-tensors, fp8, auto-round, modelopt, quark and mxfp4 work"),
            "{text}"
        );
    }
    assert!(refusal(&json!({})).contains("without `quantization_config.quant_method`"));
    assert!(refusal(&json!({"quant_method": 4})).contains("expected the name of a method, got 4"));
    assert!(refusal(&json!([1])).contains("`quantization_config`: expected an object, got [1]"));
    assert!(refusal(&json!({"quant_method": "x".repeat(500)})).len() < 250);
}

#[test]
fn gptq() {
    let good = json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true, "desc_act": false});
    each_is_refused(
        &good,
        vec![
            (
                "bits",
                json!(2),
                &["GPTQ with 2 bits (`quantization_config.bits`)", "GPTQ with 4 or 8 bits works"],
            ),
            ("bits", json!(3), &["GPTQ with 3 bits", "4 or 8 bits works"]),
            ("bits", json!(16), &["`quantization_config.bits`: expected 4 or 8 bits, got 16"]),
            ("bits", json!("4"), &["`quantization_config.bits`: expected a whole number, got \"4\""]),
            ("bits", json!(4.5), &["expected a whole number, got 4.5"]),
            ("bits", json!(null), &["`quantization_config.bits`: expected the number of bits, got nothing"]),
            (
                "group_size",
                json!(0),
                &["`quantization_config.group_size`: expected the size of a group, or -1", "got 0"],
            ),
            ("group_size", json!(-2), &["got -2"]),
            ("group_size", json!(null), &["`quantization_config.group_size`", "got nothing"]),
            ("group_size", json!(1u64 << 60), &["`quantization_config.group_size`: expected the size"]),
            ("sym", json!("yes"), &["`quantization_config.sym`: expected true or false, got \"yes\""]),
            ("desc_act", json!(1), &["`quantization_config.desc_act`: expected true or false, got 1"]),
            ("lm_head", json!("no"), &["`quantization_config.lm_head`"]),
            (
                "checkpoint_format",
                json!("marlin"),
                &["`quantization_config.checkpoint_format` = \"marlin\"", "gptq or gptq_v2 works"],
            ),
            ("format", json!("gptq_p"), &["`quantization_config.format` = \"gptq_p\""]),
            (
                "is_marlin_format",
                json!(true),
                &["`quantization_config.is_marlin_format` = true is not supported"],
            ),
            ("pack_dtype", json!("int16"), &["`quantization_config.pack_dtype`", "int32 works"]),
            ("rotation", json!("hadamard"), &["`quantization_config.rotation`", "without rotation works"]),
            ("modules_in_block_to_quantize", json!([[1]]), &["expected a list of strings, got [[1]]"]),
            ("dynamic", json!([]), &["`quantization_config.dynamic`: expected an object, got []"]),
            (
                "dynamic",
                json!({"-:(": {}}),
                &["`quantization_config.dynamic.-:(`: expected a regular expression, got \"(\""],
            ),
            ("dynamic", json!({"+:a": 3}), &["`quantization_config.dynamic.+:a`: expected an object, got 3"]),
            (
                "dynamic",
                json!({"a": {"bits": 3}}),
                &["GPTQ with 3 bits (`quantization_config.dynamic.a.bits`)"],
            ),
            (
                "dynamic",
                json!({"a": {"method": "awq"}}),
                &["`quantization_config.dynamic.a.method` = \"awq\""],
            ),
            (
                "dynamic",
                json!({"a": {"format": "gptq_v2"}}),
                &["`quantization_config.dynamic.a.format`", "gptq works"],
            ),
        ],
    );
}

#[test]
fn awq() {
    let good =
        json!({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm"});
    each_is_refused(
        &good,
        vec![
            (
                "version",
                json!("gemv"),
                &["`quantization_config.version` = \"gemv\" is not supported", "gemm works"],
            ),
            ("version", json!("gemv_fast"), &["\"gemv_fast\""]),
            ("version", json!("marlin"), &["\"marlin\""]),
            ("version", json!(1), &["`quantization_config.version` = 1"]),
            ("backend", json!("llm-awq"), &["`quantization_config.backend` = \"llm-awq\"", "autoawq"]),
            ("bits", json!(8), &["AWQ with 8 bits", "AWQ with 4 bits works"]),
            ("group_size", json!("128"), &["expected a whole number"]),
            ("zero_point", json!(0), &["`quantization_config.zero_point`: expected true or false, got 0"]),
            ("modules_to_not_convert", json!({"a": 1}), &["expected a list of strings, got {\"a\":1}"]),
            (
                "dynamic",
                json!({"a": {"bits": 8}}),
                &["AWQ with 8 bits (`quantization_config.dynamic.a.bits`)"],
            ),
            (
                "dynamic",
                json!({"a": {"format": "gemv"}}),
                &["`quantization_config.dynamic.a.format` = \"gemv\""],
            ),
        ],
    );
}

#[test]
fn compressed_tensors() {
    let weights =
        json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": true});
    let good = json!({
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    });
    each_is_refused(
        &good,
        vec![
            (
                "format",
                json!("int-quantized"),
                &["`quantization_config.format` = \"int-quantized\"", "pack-quantized or float-quantized"],
            ),
            ("format", json!("nvfp4-pack-quantized"), &["nvfp4-pack-quantized"]),
            ("format", json!("marlin-24"), &["marlin-24"]),
            (
                "format",
                json!(null),
                &["`quantization_config.format`: expected pack-quantized", "got nothing"],
            ),
            (
                "format",
                json!("float-quantized"),
                &["config_groups.g.weights.type` = int with the format float-quantized"],
            ),
            (
                "quantization_status",
                json!("calibration"),
                &[
                    "`quantization_config.quantization_status` = \"calibration\"",
                    "compressed or frozen works",
                ],
            ),
            (
                "sparsity_config",
                json!({"format": "sparse-24-bitmask"}),
                &["sparsity_config.format", "dense works"],
            ),
            (
                "transform_config",
                json!({"config_groups": {"u": {}}}),
                &["transform_config", "without transforms works"],
            ),
            ("config_groups", json!(null), &["`quantization_config.config_groups`", "got nothing"]),
            (
                "config_groups",
                json!({}),
                &["`quantization_config.config_groups`: expected groups of modules", "at least one, got {}"],
            ),
            ("config_groups.g.targets", json!([]), &["config_groups.g.targets`", "at least one", "got none"]),
            ("config_groups.g.targets", json!(null), &["config_groups.g.targets`", "got nothing"]),
            (
                "config_groups",
                json!({"W4A16": ["Linear"]}),
                &["the preset `quantization_config.config_groups.W4A16`", "spelt out"],
            ),
            (
                "config_groups.g.targets",
                json!([7]),
                &["config_groups.g.targets`: expected a list of strings"],
            ),
            (
                "config_groups.g.targets",
                json!(["re:["]),
                &["config_groups.g.targets`: expected a regular expression"],
            ),
            (
                "config_groups.g.weights.num_bits",
                json!(2),
                &["pack-quantized with 2 bits", "config_groups.g.weights.num_bits"],
            ),
            (
                "config_groups.g.weights.type",
                json!("nf4"),
                &["weights.type`: expected int or float, got \"nf4\""],
            ),
            (
                "config_groups.g.weights.strategy",
                json!("tensor"),
                &["weights.strategy` = tensor with integers", "group or channel works"],
            ),
            ("config_groups.g.weights.group_size", json!(null), &["weights.group_size", "got nothing"]),
            ("config_groups.g.weights.group_size", json!(0), &["weights.group_size", "got 0"]),
            (
                "config_groups.g.weights.actorder",
                json!("random"),
                &["weights.actorder`: expected null, group, weight, dynamic or static"],
            ),
            (
                "config_groups.g.weights.symmetric",
                json!("no"),
                &["weights.symmetric`: expected true or false"],
            ),
            ("config_groups.g.weights.dynamic", json!(true), &["weights.dynamic`: expected false"]),
            ("config_groups.g.format", json!("int-quantized"), &["config_groups.g.format"]),
            ("ignore", json!(["re:*"]), &["`quantization_config.ignore`: expected a regular expression"]),
            ("ignore", json!(5), &["`quantization_config.ignore`: expected a list of strings, got 5"]),
        ],
    );
}

/// Without groups of weights a header says nothing, unless it is of the KV cache alone.
#[test]
fn compressed_tensors_of_the_kv_cache_alone() {
    let header = json!({
        "quant_method": "compressed-tensors", "config_groups": {},
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    });
    let config = QuantConfig::from_json(&json!({ "quantization_config": header })).unwrap().unwrap();
    assert!(config.notes().iter().any(|note| note.contains("KV cache")), "{:?}", config.notes());
}

#[test]
fn compressed_tensors_fp8() {
    let weights = json!({"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": true});
    let good = json!({
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    });
    each_is_refused(
        &good,
        vec![
            ("config_groups.g.weights.num_bits", json!(4), &["float-quantized with 4 bits", "8 bits works"]),
            ("config_groups.g.weights.symmetric", json!(false), &["FP8 has no zero points"]),
            (
                "config_groups.g.weights.strategy",
                json!("group"),
                &["strategy` = group with floats", "tensor, channel or block works"],
            ),
            (
                "config_groups.g.weights.strategy",
                json!("block"),
                &["block_structure`: expected rows and columns", "got nothing"],
            ),
            (
                "config_groups.g.weights",
                json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128]}),
                &["block_structure`: expected two sizes above 0", "got [128]"],
            ),
            ("format", json!("pack-quantized"), &["type` = float with the format pack-quantized"]),
        ],
    );
}

#[test]
fn fp8() {
    let good =
        json!({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"});
    each_is_refused(
        &good,
        vec![
            ("fmt", json!("e5m2"), &["`quantization_config.fmt` = \"e5m2\"", "e4m3 works"]),
            ("activation_scheme", json!("none"), &["activation_scheme", "dynamic or static works"]),
            (
                "weight_block_size",
                json!([128]),
                &["weight_block_size`: expected two sizes above 0", "got [128]"],
            ),
            ("weight_block_size", json!([0, 128]), &["got [0,128]"]),
            ("weight_block_size", json!("128"), &["got \"128\""]),
            ("weight_block_size", json!("128x-1"), &["two sizes above 0", "got \"128x-1\""]),
            ("scale_fmt", json!("e5m2"), &["scale_fmt"]),
            (
                "weight_scale_semantics",
                json!("inverse"),
                &["`quantization_config.weight_scale_semantics` = \"inverse\"", "multiplied by"],
            ),
            ("ignored_layers", json!([null]), &["ignored_layers`: expected a list of strings"]),
        ],
    );
}

#[test]
fn auto_round() {
    let good = json!({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": true});
    each_is_refused(
        &good,
        vec![
            (
                "packing_format",
                json!("auto_round:llm_compressor"),
                &["`quantization_config.packing_format`", "auto_round:auto_gptq"],
            ),
            ("data_type", json!("nv_fp"), &["`quantization_config.data_type` = \"nv_fp\"", "int"]),
            ("act_bits", json!(8), &["`quantization_config.act_bits` = 8", "16 bits for activations works"]),
            ("bits", json!(2), &["2 bits"]),
            ("extra_config", json!({"a.b": {"bits": 3}}), &["quantization_config.extra_config.a.b.bits"]),
            ("extra_config", json!({"a.b": 4}), &["extra_config.a.b`: expected an object, got 4"]),
            (
                "extra_config",
                json!({"(a": {"bits": 4}}),
                &["extra_config.(a`: expected a regular expression"],
            ),
            (
                "block_name_to_quantize",
                json!(7),
                &["block_name_to_quantize`: expected a list of strings, got 7"],
            ),
        ],
    );
    let awq = changed(good, "packing_format", json!("auto_round:auto_awq"));
    let text = refusal(&changed(awq, "extra_config", json!({"a": {"bits": 8}})));
    assert!(text.contains("AWQ with 8 bits (`quantization_config.extra_config.a.bits`)"), "{text}");
}
