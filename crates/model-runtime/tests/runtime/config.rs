//! Configs: both styles, defaults, bounds and refusals.

use candle_core::DType;
use model_runtime::config::{Config, ConfigError, RopeConfig, RopeScaling, Yarn, checked_product, limits};
use model_runtime::sampling::SamplingParams;
use proptest::prelude::*;

use crate::message;

fn config(text: &str) -> Config {
    Config::parse(text, "config.json").unwrap()
}

#[test]
fn sizes_are_typed_and_bounded() {
    let c = config(
        r#"{"a": 3, "f": 4.0, "neg": -1, "big": 1e30, "frac": 1.5, "s": "7", "nil": null, "huge": 99999999999999999999999}"#,
    );
    const B: std::ops::RangeInclusive<usize> = 1..=1000;
    assert_eq!(c.size(&["a"], B).unwrap(), 3);
    assert_eq!(c.size(&["f"], B).unwrap(), 4);
    assert_eq!(c.size_or(&["nil"], 9, B).unwrap(), 9);
    assert_eq!(c.opt_size(&["absent"], B).unwrap(), None);
    for (key, shown) in [("neg", "-1"), ("big", "1e+30"), ("frac", "1.5"), ("s", "\"7\""), ("huge", "1e+23")]
    {
        let e = message(c.size(&[key], B));
        let want = format!("config.json: `{key}`: expected an integer from 1 to 1000, got {shown}");
        assert_eq!(e, want);
    }
    let e = message(c.size(&["num_experts", "num_local_experts"], B));
    assert!(
        e.contains("`num_experts` or `num_local_experts` is missing; expected an integer from 1 to 1000"),
        "{e}"
    );
    assert!(message(c.size(&["a"], 1..=2)).contains("from 1 to 2, got 3"));
}

#[test]
fn what_all_families_refuse_alike() {
    assert_eq!(config(r#"{"rms_norm_eps": 1e-5}"#).rms_norm_eps().unwrap(), 1e-5);
    assert_eq!(config("{}").rms_norm_eps().unwrap(), 1e-6);
    let e = message(config(r#"{"rms_norm_eps": -1e-6}"#).rms_norm_eps());
    assert_eq!(e, "config.json: `rms_norm_eps`: expected a number of at least 0, got -0.000001");
    let named = config(r#"{"architectures": ["A", "B"], "odd": ["A", 1]}"#);
    assert_eq!(named.strings(&["architectures"]).unwrap(), ["A", "B"]);
    assert!(named.strings(&["absent"]).unwrap().is_empty());
    assert!(message(named.strings(&["odd"])).contains("`odd`: expected a list of strings"));
}

#[test]
fn aliases_must_agree() {
    let same = config(r#"{"num_experts": 8, "num_local_experts": 8}"#);
    assert_eq!(same.size(&["num_experts", "num_local_experts"], limits::EXPERTS).unwrap(), 8);
    let e = message(
        config(r#"{"num_experts": 8, "num_local_experts": 6}"#)
            .size(&["num_experts", "num_local_experts"], limits::EXPERTS),
    );
    assert!(e.contains("`num_experts` and `num_local_experts` are the same setting but differ"), "{e}");
}

#[test]
fn absurd_sizes_are_refused_before_any_allocation() {
    for key in ["hidden_size", "vocab_size", "num_hidden_layers", "num_experts"] {
        let bounds = match key {
            "vocab_size" => limits::VOCAB,
            "num_hidden_layers" => limits::LAYERS,
            "num_experts" => limits::EXPERTS,
            _ => limits::WIDTH,
        };
        for value in ["0", "4294967296000", "18446744073709551615", "-5", "1e300", "[]", "true"] {
            let c = config(&format!(r#"{{"{key}": {value}}}"#));
            let e = message(c.size(&[key], bounds.clone()));
            assert!(e.contains(&format!("`{key}`: expected an integer from 1 to")), "{value}: {e}");
        }
    }
    let c = config("{}");
    assert_eq!(checked_product(&c, "elements", &[], 1).unwrap(), 1);
    assert_eq!(checked_product(&c, "elements", &[1 << 20, 1 << 26], limits::WEIGHTS).unwrap(), 1 << 46);
    for factors in [vec![1 << 40, 1 << 40], vec![(1 << 46) + 1]] {
        let e = message(checked_product(&c, "the number of weights", &factors, limits::WEIGHTS));
        assert!(e.contains("the number of weights of [") && e.contains("above the limit"), "{e}");
    }
}

#[test]
fn other_getters() {
    let c = config(
        r#"{"b": true, "x": 1e-6, "l": [0, 2], "bad": [1, "x"], "name": "silu", "o": {"p": {"q": 1}}}"#,
    );
    assert!(c.bool_or(&["b"], false).unwrap() && c.bool_or(&["absent"], true).unwrap());
    assert!(message(c.bool_or(&["x"], false)).contains("expected true or false, got 1e-6"));
    assert_eq!(c.float(&["x"]).unwrap(), 1e-6);
    assert!(message(c.float(&["name"])).contains("expected a finite number, got \"silu\""));
    assert!(message(c.positive_float_or(&["b"], 1.0)).contains("above 0"));
    assert_eq!(c.sizes(&["l"], 0..=2).unwrap(), [0, 2]);
    assert!(c.sizes(&["absent"], 0..=2).unwrap().is_empty());
    assert!(message(c.sizes(&["l"], 0..=1)).contains("a list, each an integer from 0 to 1"));
    assert!(c.sizes(&["bad"], 0..=9).is_err());
    assert_eq!(c.string(&["name"]).unwrap(), "silu");
    assert!(message(c.string(&["model_type"])).contains("`model_type` is missing"));
    // A nested key is named with its path.
    let nested = c.section(&["o"]).unwrap().unwrap().section(&["p"]).unwrap().unwrap();
    assert!(message(nested.string(&["q"])).contains("`o.p.q`: expected a string, got 1"));
    assert!(message(c.section(&["l"])).contains("expected an object"));
}

#[test]
fn files_that_are_no_objects() {
    assert!(
        message(Config::parse("[1]", "config.json")).contains("config.json: expected a JSON object, got [1]")
    );
    assert!(message(Config::parse("{", "config.json")).contains("not valid JSON"));
    assert!(
        message(Config::read(std::path::Path::new("/absent/config.json"))).contains("cannot read /absent")
    );
    // Deep nesting is an error of the parser, not a stack overflow.
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(message(Config::parse(&deep, "config.json")).contains("not valid JSON"));
    let long = format!("[{}]", "1,".repeat(500) + "1");
    assert!(message(Config::parse(&long, "config.json")).len() < 250);
}

#[test]
fn dtypes_and_token_ids() {
    let dtype = |text: &str| config(text).dtype();
    assert_eq!(dtype(r#"{"torch_dtype": "bfloat16"}"#).unwrap(), Some(DType::BF16));
    assert_eq!(dtype(r#"{"dtype": "float16"}"#).unwrap(), Some(DType::F16));
    assert_eq!(dtype(r#"{"dtype": "torch.float32"}"#).unwrap(), Some(DType::F32));
    assert_eq!(dtype("{}").unwrap(), None);
    assert!(message(dtype(r#"{"dtype": "float8_e4m3fn"}"#)).contains("got \"float8_e4m3fn\""));
    let ids = |text: &str| config(text).token_ids(&["eos_token_id"]);
    assert_eq!(ids(r#"{"eos_token_id": 2}"#).unwrap(), Some(vec![2]));
    assert_eq!(ids(r#"{"eos_token_id": [2, 3]}"#).unwrap(), Some(vec![2, 3]));
    assert_eq!(ids(r#"{"eos_token_id": null}"#).unwrap(), None);
    for bad in ["-1", "4294967296", "\"2\"", "[2, -1]", "1.5"] {
        assert!(ids(&format!(r#"{{"eos_token_id": {bad}}}"#)).is_err(), "{bad}");
    }
}

#[test]
fn headers_of_quantised_checkpoints_are_read_or_refused_by_name() {
    let read = |text: &str| config(text).quantisation();
    assert!(read("{}").unwrap().is_none() && read(r#"{"quantization_config": null}"#).unwrap().is_none());
    let header = r#"{"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": false, "sym": true}"#;
    let read_header = read(&format!(r#"{{"quantization_config": {header}}}"#)).unwrap().unwrap();
    assert_eq!(read_header.method(), "gptq");
    let dir = tempfile::tempdir().unwrap();
    let read_in = || config("{}").quantisation_in(dir.path());
    assert!(read_in().unwrap().is_none());
    std::fs::write(dir.path().join("quantize_config.json"), header).unwrap();
    assert_eq!(read_in().unwrap().unwrap().method(), "gptq");
    std::fs::write(dir.path().join("quantize_config.json"), r#"{"quant_method": "gptq", "bits": 2}"#)
        .unwrap();
    let e = message(read_in());
    assert!(e.contains("quantize_config.json") && e.contains("quantize_config.bits"), "{e}");
    std::fs::remove_file(dir.path().join("quantize_config.json")).unwrap();
    let modelopt = |algorithm: &str| {
        let header = format!(r#"{{"producer": {{}}, "quantization": {{"quant_algo": "{algorithm}"}}}}"#);
        std::fs::write(dir.path().join("hf_quant_config.json"), header).unwrap();
        read_in()
    };
    assert_eq!(modelopt("NVFP4").unwrap().unwrap().method(), "modelopt");
    let e = message(modelopt("W4A8_AWQ"));
    assert!(
        e.contains("hf_quant_config.json") && e.contains("hf_quant_config.quantization.quant_algo"),
        "{e}"
    );
    let e = message(read(r#"{"quantization_config": {"quant_method": "gptq", "bits": 3}}"#));
    assert!(e.contains("quantization_config.bits") && e.contains("config.json"), "{e}");
    let e = message(read(r#"{"quantization_config": {"quant_method": "quip"}}"#));
    assert!(e.contains("quip") && e.contains("original float dtype"), "{e}");
    let e = message(read(r#"{"quantization_config": {}}"#));
    assert!(e.contains("quantization_config.quant_method"), "{e}");
}

fn rope(text: &str) -> Result<RopeConfig, ConfigError> {
    RopeConfig::from_config(&config(text), 16, 64)
}

#[test]
fn rope_of_both_styles() {
    let plain =
        |theta, scaling| RopeConfig { theta, dim: 16, head_dim: 16, max_position_embeddings: 64, scaling };
    assert_eq!(rope("{}").unwrap(), plain(1e4, RopeScaling::Default));
    assert_eq!(rope(r#"{"rope_theta": 1000000}"#).unwrap(), plain(1e6, RopeScaling::Default));
    assert_eq!(
        rope(r#"{"rope_theta": 5e5, "rope_scaling": null}"#).unwrap(),
        plain(5e5, RopeScaling::Default)
    );
    let linear = RopeScaling::Linear { factor: 2.5 };
    for text in [
        r#"{"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2.5}}"#,
        r#"{"rope_theta": 1e5, "rope_scaling": {"rope_type": "linear", "factor": 2.5}}"#,
        r#"{"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 100000.0}}"#,
        r#"{"rope_theta": 1, "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e5}}"#,
    ] {
        assert_eq!(rope(text).unwrap(), plain(1e5, linear.clone()), "{text}");
    }
    assert_eq!(
        rope(r#"{"rope_scaling": {"rope_type": "dynamic", "factor": 4}}"#).unwrap().scaling,
        RopeScaling::Dynamic { factor: 4.0 }
    );
    assert_eq!(
        rope(r#"{"rope_parameters": {"rope_type": "default", "rope_theta": 7}}"#).unwrap(),
        plain(7.0, RopeScaling::Default)
    );
}

#[test]
fn yarn_defaults_and_overrides() {
    let scaling = |text: &str| match rope(text).unwrap().scaling {
        RopeScaling::Yarn(yarn) => yarn,
        other => panic!("{other:?}"),
    };
    let base = Yarn {
        factor: 4.0,
        original_max_position_embeddings: 64,
        attention_factor: 0.1 * 4f64.ln() + 1.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
    };
    assert_eq!(scaling(r#"{"rope_scaling": {"type": "yarn", "factor": 4}}"#), base);
    let full = scaling(
        r#"{"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "beta_fast": 8,
            "beta_slow": 0, "truncate": false, "mscale": 1.2, "mscale_all_dim": 0.6}}"#,
    );
    let ratio = (0.12 * 4f64.ln() + 1.0) / (0.06 * 4f64.ln() + 1.0);
    assert!((full.attention_factor - ratio).abs() < 1e-12);
    assert_eq!((full.original_max_position_embeddings, full.beta_fast, full.beta_slow), (16, 8.0, 1.0));
    assert!(!full.truncate);
    let given =
        scaling(r#"{"rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": 0.8, "mscale": 2}}"#);
    assert_eq!(given.attention_factor, 0.8);
    // Without a factor it is the ratio of the context lengths; a value at the top level wins.
    let ratio = scaling(
        r#"{"original_max_position_embeddings": 32, "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 8}}"#,
    );
    assert_eq!((ratio.factor, ratio.original_max_position_embeddings), (2.0, 32));
}

#[test]
fn what_rope_refuses() {
    for (text, words) in [
        (r#"{"rope_scaling": {"type": "longrope", "factor": 2}}"#, "RoPE type `longrope` is not supported"),
        (r#"{"rope_scaling": {"rope_type": "llama3", "factor": 8}}"#, "RoPE type `llama3`"),
        (r#"{"rope_scaling": {"type": "linear"}}"#, "`rope_scaling.factor` is missing"),
        (r#"{"rope_scaling": {"type": "linear", "factor": 0.5}}"#, "from 1 to 1000000, got 0.5"),
        (
            r#"{"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 2}}"#,
            "beta_fast >= beta_slow",
        ),
        (r#"{"rope_scaling": "yarn"}"#, "`rope_scaling`: expected an object"),
        (r#"{"rope_theta": 0}"#, "above 0, got 0"),
        (r#"{"rope_theta": 1e300}"#, "from 1 to 1e15"),
        (
            r#"{"rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": -1}}"#,
            "above 0 and up to 1000000, got -1",
        ),
        (
            r#"{"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 128}}"#,
            "`max_position_embeddings`: expected 1 to 1000000 times original_max_position_embeddings = 128, as YaRN without \
             a factor extends one context to the other, got 64",
        ),
        (r#"{"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}}"#, "above 1 for YaRN"),
        (r#"{"partial_rotary_factor": 0.5}"#, "partial_rotary_factor 0.5"),
        (r#"{"rope_parameters": {"full_attention": {"rope_type": "default"}}}"#, "each layer type"),
    ] {
        let e = message(rope(text));
        assert!(e.contains(words), "{text}: {e}");
    }
    assert!(message(RopeConfig::from_config(&config("{}"), 15, 64)).contains("even number"));
    let dynamic = config(r#"{"rope_scaling": {"type": "dynamic", "factor": 2}}"#);
    assert!(message(RopeConfig::from_config(&dynamic, 2, 64)).contains("at least 4"));
}

#[test]
fn context_length_of_each_scaling() {
    let len = |text: &str, max| RopeConfig::from_config(&config(text), 16, max).unwrap().max_context_len();
    assert_eq!(len("{}", 40960), 40960);
    assert_eq!(len(r#"{"rope_scaling": {"type": "linear", "factor": 2.5}}"#, 100), 250);
    assert_eq!(len(r#"{"rope_scaling": {"type": "dynamic", "factor": 4}}"#, 32), 128);
    let yarn =
        r#"{"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}}"#;
    assert_eq!(len(yarn, 40960), 131072);
    // A config whose max_position_embeddings already includes the factor is not stretched again.
    assert_eq!(len(yarn, 131072), 131072);
}

#[test]
fn sampling_defaults_of_a_generation_config() {
    let params = |text: &str| SamplingParams::from_generation_config(&config(text));
    assert!(params("{}").unwrap().is_greedy());
    let qwen = params(r#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95}"#).unwrap();
    assert_eq!((qwen.temperature, qwen.top_k, qwen.top_p, qwen.min_p), (0.6, 20, 0.95, 0.0));
    assert!(params(r#"{"do_sample": false, "temperature": 0.6}"#).unwrap().is_greedy());
    assert_eq!(params(r#"{"do_sample": true}"#).unwrap().temperature, 1.0);
    assert_eq!(params(r#"{"temperature": 0.7}"#).unwrap().temperature, 0.7);
    assert!(message(params(r#"{"temperature": -1}"#)).contains("temperature must be"));
    assert_eq!(params(r#"{"repetition_penalty": 1.05}"#).unwrap().repetition_penalty, 1.05);
    assert_eq!(params("{}").unwrap().repetition_penalty, 1.0);
    assert!(message(params(r#"{"repetition_penalty": 0}"#)).contains("repetition_penalty must be"));
    assert!(message(params(r#"{"top_p": 0}"#)).contains("top_p must be above 0 and at most 1, got 0"));
}

/// JSON values that no honest config holds.
fn hostile() -> impl Strategy<Value = serde_json::Value> {
    let number = prop_oneof![
        any::<f64>().prop_map(|x| serde_json::json!(x)),
        any::<i64>().prop_map(|x| serde_json::json!(x)),
        prop::sample::select(vec![0.0, 1.0, 1.5, 4.0, 1e-300, 1e308, -0.0])
            .prop_map(|x| serde_json::json!(x)),
    ];
    let kind = prop::sample::select(vec!["default", "linear", "dynamic", "yarn", "", "llama3"]);
    prop_oneof![
        6 => number,
        2 => kind.prop_map(|s| serde_json::json!(s)),
        1 => Just(serde_json::Value::Null),
        1 => any::<bool>().prop_map(|b| serde_json::json!(b)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    /// Whatever a config says, it is refused or it works: no panic.
    #[test]
    fn hostile_rope_settings_do_not_panic(
        kind in prop::sample::select(vec!["default", "linear", "dynamic", "yarn"]),
        values in prop::collection::vec((prop::sample::select(vec![
            "factor", "rope_theta", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
            "mscale", "mscale_all_dim", "truncate", "partial_rotary_factor",
        ]), hostile()), 0..6),
        theta in hostile(),
        max in prop_oneof![Just(1usize), Just(64), Just(1 << 31)],
    ) {
        let mut section: serde_json::Map<String, serde_json::Value> = values.into_iter().map(|(k, v)| (k.to_string(), v)).collect();
        section.insert("rope_type".into(), kind.into());
        let text = serde_json::json!({ "rope_theta": theta, "rope_scaling": section }).to_string();
        if let Ok(rope) = RopeConfig::from_config(&config(&text), 16, max) {
            prop_assert!(rope.max_context_len() >= max);
            let positions = [0u32, 5, 1 << 20];
            let lens = [1u32, 70, u32::MAX];
            let rows = model_runtime::Rope::new(rope).rows(
                model_runtime::View::new(&positions, &[3]).unwrap(),
                model_runtime::View::new(&lens, &[3]).unwrap(),
                &mut model_runtime::Exec::cpu(),
            );
            let rows = rows.unwrap();
            prop_assert!(rows.cos().cpu::<f32>().unwrap().iter().chain(rows.sin().cpu::<f32>().unwrap()).all(|x| x.is_finite()));
        }
    }

    #[test]
    fn hostile_values_do_not_panic_any_getter(value in hostile()) {
        let c = config(&serde_json::json!({ "k": value, "eos_token_id": value, "dtype": value, "top_p": value, "temperature": value, "repetition_penalty": value }).to_string());
        let _ = (c.size(&["k"], limits::WIDTH), c.float(&["k"]), c.positive_float_or(&["k"], 1.0), c.bool_or(&["k"], true));
        let _ = (c.string(&["k"]), c.sizes(&["k"], limits::WIDTH), c.section(&["k"]), c.token_ids(&["eos_token_id"]), c.dtype());
        let _ = SamplingParams::from_generation_config(&c);
    }
}

#[test]
fn the_keys_of_a_text_part_are_read_at_the_root_unless_it_has_layers_itself() {
    let text = r#""text_config": {"model_type": "part", "num_hidden_layers": 3, "hidden_size": 8, "dtype": "float16",
        "tie_word_embeddings": true}"#;
    let config = |root: &str| Config::parse(&format!("{{{root}, {text}}}"), "c").unwrap();
    let whole = config(r#""model_type": "whole", "hidden_size": 16"#);
    assert_eq!(whole.opt_string(&["model_type"]).unwrap(), Some("whole"));
    let size = |config: &Config, key: &str| config.opt_size(&[key], 1..=99).unwrap();
    assert_eq!((size(&whole, "num_hidden_layers"), size(&whole, "hidden_size")), (Some(3), Some(8)));
    // As in transformers, the root says nothing about the network of the text part.
    let root =
        config(r#""vocab_size": 7, "rms_norm_eps": 1.0, "torch_dtype": "bfloat16", "eos_token_id": 5"#);
    assert_eq!((root.opt_string(&["model_type"]).unwrap(), size(&root, "vocab_size")), (None, None));
    assert_eq!((root.dtype().unwrap(), root.has("rms_norm_eps")), (Some(DType::F16), false));
    assert_eq!(root.token_ids(&["eos_token_id"]).unwrap(), Some(vec![5]));
    let tied = |config: Config| config.bool_or(&["tie_word_embeddings"], false).unwrap();
    assert!(tied(root) && !tied(config(r#""tie_word_embeddings": false"#)));
    let layers = config(r#""num_hidden_layers": 2"#);
    assert_eq!((size(&layers, "num_hidden_layers"), size(&layers, "hidden_size")), (Some(2), None));
}
