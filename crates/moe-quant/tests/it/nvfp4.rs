//! NVFP4 of ModelOpt and of compressed-tensors, and MXFP4 of Quark: headers, tensors and readers, against the
//! definition in f64.

use moe_quant::safetensors::Dtype;
use moe_quant::safetensors::tensor::TensorView;
use moe_quant::{Format, Fp4Tensors, LogicalRows, QuantConfig, QuantRows, Reader, dequantise, layout};
use serde_json::{Value, json};

const MODELOPT: Format = Format::Nvfp4(Fp4Tensors::Plain);
const COMPRESSED: Format = Format::Nvfp4(Fp4Tensors::Packed);
const QUARK: Format = Format::Mxfp4(Fp4Tensors::Plain);
const UP: &str = "model.layers.0.mlp.experts.3.up_proj";

/// Magnitudes of E2M1 codes without their sign.
const MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

fn e2m1(code: u8) -> f64 {
    let magnitude = MAGNITUDES[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

fn e4m3(code: u8) -> f64 {
    let mantissa = f64::from(code & 7);
    let magnitude = match code >> 3 & 15 {
        0 => mantissa / 512.0,
        exponent => (8.0 + mantissa) * 2f64.powi(i32::from(exponent) - 10),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// One tensor of a file.
#[derive(Clone)]
struct Part {
    suffix: &'static str,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// The tensors of a random matrix [n, k] in NVFP4.
fn parts(format: Format, n: usize, k: usize, stored: f32) -> Vec<Part> {
    let mut seed = (n * k) as u64;
    let mut byte = move || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 56) as u8
    };
    let codes = (0..n * k / 2).map(|_| byte()).collect();
    // Every scale but NaN, of both signs, and 0.
    let scales = (0..n * k / 16)
        .map(|i| if i == 0 { 0 } else { byte() })
        .map(|q| if q & 0x7f == 0x7f { 0x38 } else { q });
    let is_packed = format == COMPRESSED;
    let [weight, scale] =
        if is_packed { ["weight_packed", "weight_global_scale"] } else { ["weight", "weight_scale_2"] };
    let of_matrix = if is_packed { vec![1] } else { Vec::new() };
    vec![
        Part { suffix: weight, dtype: Dtype::U8, shape: vec![n, k / 2], bytes: codes },
        Part {
            suffix: "weight_scale",
            dtype: Dtype::F8_E4M3,
            shape: vec![n, k / 16],
            bytes: scales.collect(),
        },
        Part { suffix: scale, dtype: Dtype::F32, shape: of_matrix, bytes: stored.to_le_bytes().to_vec() },
    ]
}

fn open(format: Format, (n, k): (usize, usize), parts: &[Part]) -> Result<Reader<'_>, String> {
    let find = |suffix: &str| {
        let part = parts.iter().find(|part| part.suffix == suffix)?;
        TensorView::new(part.dtype, part.shape.clone(), &part.bytes).ok()
    };
    Reader::new("m", format, (n, k), find).map_err(|error| error.to_string())
}

#[test]
fn weights_are_their_definition() {
    for (format, stored) in [(MODELOPT, 3.1e-4f32), (COMPRESSED, 2571.3)] {
        let factor = if format == COMPRESSED { 1.0 / f64::from(stored) } else { f64::from(stored) };
        for (n, k) in [(1, 16), (7, 48), (33, 160)] {
            let parts = parts(format, n, k, stored);
            let reader = open(format, (n, k), &parts).unwrap();
            reader.check_finite().unwrap();
            assert_eq!(reader.scheme().to_string(), "fp4 group 16 with fp8 scales");
            let all = dequantise(&reader).unwrap();
            for (at, got) in all.iter().enumerate() {
                let code = parts[0].bytes[at / 2] >> (4 * (at % 2)) & 15;
                let want = e2m1(code) * e4m3(parts[1].bytes[at / 16]) * factor;
                // Two roundings to f32, three where the factor is a reciprocal.
                assert!((f64::from(*got) - want).abs() <= 2e-7 * want.abs(), "{format:?} {at}: {got} {want}");
            }
            for tp in format.tp_sizes(k) {
                let columns = k / tp * (tp - 1)..k;
                let part = dequantise(&reader.clone().columns(columns.clone()).unwrap()).unwrap();
                let want: Vec<f32> =
                    all.chunks(k).flat_map(|row| row[columns.clone()].iter().copied()).collect();
                assert_eq!(part, want);
            }
        }
    }
}

#[test]
fn columns_are_cut_between_blocks() {
    for format in [MODELOPT, COMPRESSED] {
        assert_eq!(format.tp_sizes(160), [1, 2, 5, 10]);
        let parts = parts(format, 2, 48, 0.5);
        let error = open(format, (2, 48), &parts).unwrap().columns(8..48).unwrap_err().to_string();
        assert!(
            error.contains("cut a group of 16 in two; tensor-parallel sizes that work: 1, 3;"),
            "{error}"
        );
    }
}

/// Kernels keep a byte for each group and a float for each row: their product is the scale.
#[test]
fn rows_come_with_both_levels() {
    let parts = parts(MODELOPT, 6, 64, 0.25);
    let mut rows = LogicalRows::default();
    let reader = open(MODELOPT, (6, 64), &parts).unwrap().rows(2..5).unwrap().columns(16..64).unwrap();
    reader.read(0..3, &mut rows).unwrap();
    assert_eq!((rows.scale.len(), rows.scale_levels.factor.len()), (9, 9));
    assert_eq!(rows.scale_levels.shared, [0.25; 3]);
    for (i, scale) in rows.scale.iter().enumerate() {
        let byte = parts[1].bytes[(2 + i / 3) * 4 + 1 + i % 3];
        assert_eq!((rows.scale_levels.factor[i], f64::from(*scale)), (byte, 0.25 * e4m3(byte)));
    }
}

#[test]
fn damaged_tensors_are_refused() {
    let shape = (4, 48);
    let fault = |format: Format, change: &dyn Fn(&mut Vec<Part>)| -> String {
        let mut parts = parts(format, 4, 48, 0.5);
        change(&mut parts);
        match open(format, shape, &parts) {
            Err(error) => error,
            Ok(reader) => dequantise(&reader).unwrap_err().to_string(),
        }
    };
    for (at, names) in
        [["weight", "weight_packed"], ["weight_scale"; 2], ["weight_scale_2", "weight_global_scale"]]
            .into_iter()
            .enumerate()
    {
        for (format, name) in [MODELOPT, COMPRESSED].into_iter().zip(names) {
            let error = fault(format, &|parts| drop(parts.remove(at)));
            assert!(error.starts_with(&format!("m.{name}: the checkpoint has no such tensor")), "{error}");
        }
    }
    let error = fault(MODELOPT, &|parts| parts[0].dtype = Dtype::F8_E4M3);
    assert_eq!(error, "m.weight: expected dtype U8, got F8_E4M3");
    let error = fault(MODELOPT, &|parts| parts[1].dtype = Dtype::U8);
    assert_eq!(error, "m.weight_scale: expected dtype F8_E4M3, got U8");
    let error = fault(COMPRESSED, &|parts| parts[1].shape = vec![3, 4]);
    assert_eq!(error, "m.weight_scale: expected shape [4, 3], got [3, 4]");
    let error = fault(COMPRESSED, &|parts| {
        parts[2].shape = vec![2];
        parts[2].bytes = vec![0; 8];
    });
    assert_eq!(error, "m.weight_global_scale: expected shape [1] or [], got [2]");
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        for (format, name) in [(MODELOPT, "weight_scale_2"), (COMPRESSED, "weight_global_scale")] {
            let error = fault(format, &|parts| parts[2].bytes = bad.to_le_bytes().to_vec());
            let start = format!("m.{name}: expected a finite number above 0, got {bad}; the file is damaged");
            assert!(error.starts_with(&start), "{error}");
        }
    }
    // The reciprocal of a subnormal is infinite.
    let error = fault(COMPRESSED, &|parts| parts[2].bytes = 1e-45f32.to_le_bytes().to_vec());
    assert!(error.contains("expected a finite number above 0"), "{error}");
    for nan in [0x7f, 0xff] {
        let error = fault(MODELOPT, &|parts| parts[1].bytes[7] = nan);
        assert!(error.starts_with("m: the scale of row 2, group 1 is NaN; the file is damaged"), "{error}");
    }
    let problem = layout(MODELOPT, 4, 24).unwrap_err().to_string();
    assert!(problem.contains("blocks of 16 columns do not divide 24"), "{problem}");
}

fn read(header: &Value) -> Result<QuantConfig, String> {
    QuantConfig::from_header("q", header).map_err(|error| error.to_string())
}

fn changed(header: &Value, pointer: &str, value: Value) -> String {
    let mut header = header.clone();
    *header.pointer_mut(pointer).unwrap() = value;
    read(&header).unwrap_err()
}

#[test]
fn modelopt_says_it_in_either_file() {
    let in_config = json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
        "ignore": ["lm_head", "model.layers.*.self_attn*", "*mlp.gate"], "kv_cache_scheme": {"num_bits": 8}});
    let of_its_own = json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "nvfp4",
        "group_size": 16, "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head", "model.layers.*.self_attn*", "*mlp.gate"]}});
    for header in [&in_config, &of_its_own] {
        let config = read(header).unwrap();
        assert_eq!((config.method(), config.format_of(UP)), ("modelopt", Ok(MODELOPT)));
        for plain in ["lm_head", "model.layers.0.self_attn.q_proj", "model.layers.7.mlp.gate"] {
            assert_eq!(config.format_of(plain), Ok(Format::Plain), "{plain}");
        }
        // A whole name, not the beginning of one.
        assert_eq!(config.format_of("model.layers.7.mlp.gate_proj"), Ok(MODELOPT));
        let notes = config.notes().join("; ");
        assert!(notes.contains("quantised activations") && notes.contains("KV cache"), "{notes}");
        let bytes = config.bytes_per_weight(UP, 2048).unwrap().unwrap();
        assert_eq!(8.0 * bytes, 4.0 + 8.0 / 16.0 + 32.0 / 2048.0);
    }
    for (algorithm, format) in [
        ("W4A16_NVFP4", "fp4 group 16 with fp8 scales"),
        ("FP8", "fp8 per tensor"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "fp8 per channel"),
    ] {
        let config = read(&json!({"quant_method": "modelopt", "quant_algo": algorithm})).unwrap();
        assert_eq!(config.scheme_of(UP).unwrap().to_string(), format);
        assert_eq!(config.notes().is_empty(), algorithm == "W4A16_NVFP4", "{algorithm}");
    }
    for algorithm in ["NVFP4_AWQ", "FP8_PB_WO", "W4A8_AWQ", "MXFP8", "INT4_AWQ"] {
        let error = changed(&in_config, "/quant_algo", json!(algorithm));
        assert!(error.contains(&format!("ModelOpt's algorithm {algorithm} (`q.quant_algo`)")), "{error}");
        assert!(error.contains("NVFP4, W4A16_NVFP4, FP8, FP8_PER_CHANNEL_PER_TOKEN"), "{error}");
    }
    let error = changed(&of_its_own, "/quantization/group_size", json!(32));
    assert_eq!(error, "`q.quantization.group_size`: expected 16, the block of NVFP4, got 32");
    let error = changed(&in_config, "/quant_algo", Value::Null);
    assert!(error.starts_with("`q.quant_algo`: expected the name of an algorithm"), "{error}");
    let error = changed(&in_config, "/ignore", json!([4]));
    assert_eq!(error, "`q.ignore`: expected a list of strings, got [4]");
}

#[test]
fn modelopt_may_give_each_module_its_algorithm() {
    let header = json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
    "ignore": ["model.layers.0.mlp.experts.5*"],
    "quantized_layers": {
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
    }});
    let config = read(&header).unwrap();
    let scheme = |module: &str| config.scheme_of(module).unwrap().to_string();
    assert_eq!(scheme(UP), "fp4 group 16 with fp8 scales");
    assert_eq!(scheme("model.layers.0.self_attn.q_proj"), "fp8 per tensor");
    for plain in ["model.layers.0.self_attn.k_proj", "model.layers.0.mlp.experts.5.up_proj", "lm_head"] {
        assert_eq!(scheme(plain), "none", "{plain}");
    }
    let error = changed(&header, "/quantized_layers", Value::Null);
    assert!(error.starts_with("`q.quantized_layers`: expected modules with their `quant_algo`"), "{error}");
    let error = changed(&header, "/quantized_layers/model.layers.0.mlp.experts/quant_algo", json!("W4A8"));
    assert!(error.contains("W4A8 (`q.quantized_layers.model.layers.0.mlp.experts.quant_algo`)"), "{error}");
}

#[test]
fn compressed_tensors_says_it() {
    let header = json!({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head"], "config_groups": {"g": {"targets": ["Linear"],
            "input_activations": {"num_bits": 4, "type": "float", "dynamic": "local"},
            "weights": {"num_bits": 4, "type": "float", "symmetric": true, "strategy": "tensor_group",
                        "group_size": 16, "scale_dtype": "torch.float8_e4m3fn", "dynamic": false}}}});
    let config = read(&header).unwrap();
    assert_eq!(config.format_of(UP), Ok(COMPRESSED));
    assert_eq!(config.format_of("lm_head"), Ok(Format::Plain));
    assert!(config.notes()[0].contains("activations in float4"), "{:?}", config.notes());
    for (key, value, problem) in [
        ("num_bits", json!(8), "nvfp4-pack-quantized with 4 bits works"),
        ("group_size", json!(32), "blocks of 16 columns work"),
        ("strategy", json!("group"), "tensor_group works"),
        ("scale_dtype", json!("torch.uint8"), "torch.float8_e4m3fn or float8_e4m3fn works"),
        ("symmetric", json!(false), "NVFP4 has no zero points"),
        ("type", json!("int"), "nvfp4-pack-quantized works"),
    ] {
        let error = changed(&header, &format!("/config_groups/g/weights/{key}"), value);
        assert!(error.contains(problem), "{key}: {error}");
    }
}

#[test]
fn quark_says_mxfp4() {
    let weight = json!({"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1,
                        "scale_format": "e8m0", "is_dynamic": false});
    let header = json!({"quant_method": "quark",
        "exclude": ["lm_head", "model.layers.0.self_attn", "re:.*shared_expert.*", "*.mlp.gate"],
        "global_quant_config": {"weight": weight, "input_tensors": {"dtype": "fp4"}},
        "layer_quant_config": {"model.layers.2.*": {"weight": null}, "*.down_proj": {"weight": weight}},
        "layer_type_quant_config": {},
        "export": {"weight_format": "real_quantized", "pack_method": "reorder", "kv_cache_group": ["*k_proj"]}});
    let config = read(&header).unwrap();
    assert_eq!((config.method(), config.format_of(UP)), ("quark", Ok(QUARK)));
    assert_eq!(config.format_of("model.layers.1.mlp.down_proj"), Ok(QUARK));
    for plain in [
        "lm_head",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.shared_expert.up_proj",
        "model.layers.1.mlp.gate",
        "model.layers.2.mlp.down_proj",
    ] {
        assert_eq!(config.format_of(plain), Ok(Format::Plain), "{plain}");
    }
    let notes = config.notes().join("; ");
    assert!(notes.contains("quantised activations") && notes.contains("KV cache"), "{notes}");
    for (pointer, value, problem) in [
        (
            "/global_quant_config/weight/dtype",
            json!("fp8_e4m3"),
            "`q.global_quant_config.weight.dtype` = \"fp8_e4m3\"",
        ),
        ("/global_quant_config/weight/qscheme", json!("per_tensor"), "qscheme` = \"per_tensor\""),
        ("/global_quant_config/weight/scale_format", Value::Null, "scale_format` = null"),
        ("/global_quant_config/weight/group_size", json!(16), "group_size` that is not 32"),
        ("/global_quant_config/weight/is_dynamic", json!(true), "is_dynamic` = true"),
        (
            "/global_quant_config/weight",
            json!([weight, weight]),
            "`q.global_quant_config.weight` in 2 levels",
        ),
        ("/global_quant_config", Value::Null, "`q.global_quant_config`: expected settings"),
        ("/layer_type_quant_config", json!({"Linear": {}}), "`q.layer_type_quant_config`"),
        ("/export/weight_format", json!("fake_quantized"), "real_quantized works"),
        ("/exclude", json!(["re:("]), "expected a regular expression"),
    ] {
        let error = changed(&header, pointer, value);
        assert!(error.contains(problem), "{pointer}: {error}");
    }
}

/// ModelOpt's and Quark's codes have the name of floats: the dtype tells them apart.
#[test]
fn a_weight_in_a_float_dtype_is_taken_as_it_is() {
    let config = read(&json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["a"]})).unwrap();
    let in_file = |module: &str, dtype: Dtype| {
        config.format_in_file(module, |suffix| (suffix == "weight").then_some(dtype)).unwrap()
    };
    assert_eq!(in_file("b", Dtype::BF16), Format::Plain);
    assert_eq!(in_file("b", Dtype::U8), MODELOPT);
    assert_eq!(in_file("a", Dtype::U8), MODELOPT);
    assert!(config.is_left_out("a", MODELOPT).unwrap());
}
