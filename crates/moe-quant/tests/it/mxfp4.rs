//! compressed-tensors' `mxfp4-pack-quantized`: headers, layout and reader, against the definition in f64.

use moe_quant::safetensors::Dtype;
use moe_quant::safetensors::tensor::TensorView;
use moe_quant::{Format, Fp4Tensors, QuantConfig, QuantRows, Reader, dequantise, layout};
use serde_json::{Value, json};

const MXFP4: Format = Format::Mxfp4(Fp4Tensors::Packed);

/// Magnitudes of E2M1 codes without their sign.
const MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Random bytes of a matrix [n, k]: two codes in each, and the exponents of its scales.
struct Stored {
    n: usize,
    k: usize,
    codes: Vec<u8>,
    exponents: Vec<u8>,
}

impl Stored {
    fn new(n: usize, k: usize, mut seed: u64) -> Self {
        let mut byte = move || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 56) as u8
        };
        let codes = (0..n * k / 2).map(|_| byte()).collect();
        // All exponents but that of NaN, the one of a subnormal f32 among them.
        let exponents = (0..n * k / 32).map(|i| if i == 0 { 0 } else { byte().min(200) }).collect();
        Self { n, k, codes, exponents }
    }

    fn reader(&self) -> Reader<'_> {
        let find = |suffix: &str| {
            let (shape, bytes) = match suffix {
                "weight_packed" => (vec![self.n, self.k / 2], &self.codes),
                "weight_scale" => (vec![self.n, self.k / 32], &self.exponents),
                _ => return None,
            };
            TensorView::new(Dtype::U8, shape, bytes).ok()
        };
        Reader::new("m", MXFP4, (self.n, self.k), find).unwrap()
    }

    fn weight(&self, row: usize, column: usize) -> f64 {
        let at = row * self.k + column;
        let code = self.codes[at / 2] >> (4 * (at % 2)) & 15;
        let magnitude = MAGNITUDES[usize::from(code & 7)];
        let value = if code & 8 == 0 { magnitude } else { -magnitude };
        value * 2f64.powi(i32::from(self.exponents[at / 32]) - 127)
    }
}

#[test]
fn weights_are_their_definition() {
    for (n, k) in [(1, 32), (7, 96), (33, 160)] {
        let stored = Stored::new(n, k, n as u64);
        let reader = stored.reader();
        reader.check_finite().unwrap();
        assert_eq!(reader.scheme().to_string(), "fp4 group 32");
        let all = dequantise(&reader).unwrap();
        for (at, got) in all.iter().enumerate() {
            assert_eq!(f64::from(*got), stored.weight(at / k, at % k), "[{n}, {k}] {at}");
        }
        assert!(dequantise(&stored.reader().rows(0..0).unwrap()).unwrap().is_empty());
        // Every size that is named cuts whole blocks.
        for tp in MXFP4.tp_sizes(k) {
            for rank in 0..tp {
                let columns = rank * k / tp..(rank + 1) * k / tp;
                let part = dequantise(&stored.reader().columns(columns.clone()).unwrap()).unwrap();
                let want: Vec<f32> =
                    all.chunks(k).flat_map(|row| row[columns.clone()].iter().copied()).collect();
                assert_eq!(part, want);
            }
        }
        assert!(stored.reader().columns(16..k).unwrap_err().to_string().contains("cut a group of 32"));
    }
}

#[test]
fn a_scale_that_is_nan_is_found() {
    let mut stored = Stored::new(2, 64, 3);
    stored.exponents[3] = 255;
    let problem = stored.reader().check_finite().unwrap_err().to_string();
    assert!(problem.contains("row 1, group 1"), "{problem}");
}

#[test]
fn rows_are_whole_blocks() {
    let problem = layout(MXFP4, 4, 48).unwrap_err().to_string();
    assert!(problem.contains("blocks of 32 columns do not divide 48"), "{problem}");
}

fn header(change: impl FnOnce(&mut Value)) -> Result<QuantConfig, String> {
    let mut weights = json!({"num_bits": 4, "type": "float", "symmetric": true, "strategy": "group",
                             "group_size": 32, "scale_dtype": "torch.uint8", "dynamic": false});
    change(&mut weights);
    let header = json!({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
                        "ignore": ["lm_head"],
                        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}});
    QuantConfig::from_header("quantization_config", &header).map_err(|error| error.to_string())
}

#[test]
fn a_header_says_it() {
    let config = header(|_| {}).unwrap();
    assert_eq!(config.format_of("model.layers.0.mlp.up_proj"), Ok(MXFP4));
    assert_eq!(config.format_of("lm_head"), Ok(Format::Plain));
    let bytes = config.bytes_per_weight("model.layers.0.mlp.up_proj", 64).unwrap();
    assert_eq!(bytes, Some((4.0 + 16.0 / 32.0) / 8.0));
    for (key, value, problem) in [
        ("num_bits", json!(8), "mxfp4-pack-quantized with 4 bits works"),
        ("group_size", json!(16), "blocks of 32 columns work"),
        ("strategy", json!("tensor_group"), "group works"),
        ("scale_dtype", json!("torch.float8_e4m3fn"), "torch.uint8 or uint8 works"),
        ("symmetric", json!(false), "MXFP4 has no zero points"),
        ("type", json!("int"), "mxfp4-pack-quantized or nvfp4-pack-quantized works"),
    ] {
        let error = header(|weights| weights[key] = value).unwrap_err();
        assert!(error.contains(problem), "{key}: {error}");
    }
}

#[test]
fn rows_that_take_turns_are_matrices_of_their_own() {
    let stored = Stored::new(6, 64, 9);
    for (first, step) in [(0, 2), (1, 2), (2, 3), (0, 1)] {
        let reader = stored.reader().turns(first, step).unwrap();
        assert_eq!(reader.shape(), (6 / step, 64));
        let part = reader.clone().rows(1..reader.shape().0).unwrap().columns(32..64).unwrap();
        for (reader, from_row, columns) in [(reader, 0, 0..64), (part, 1, 32..64)] {
            let got = dequantise(&reader).unwrap();
            let rows = got.chunks(columns.len()).enumerate();
            for (row, got) in rows {
                let want = columns
                    .clone()
                    .map(|column| stored.weight(first + (from_row + row) * step, column) as f32);
                assert_eq!(got, want.collect::<Vec<_>>(), "row {row} of turn {first} of {step}");
            }
        }
    }
    for (first, step) in [(2, 2), (0, 4)] {
        let refused = stored.reader().turns(first, step).unwrap_err().to_string();
        assert!(refused.contains(&format!("turn {first} of {step}")), "{refused}");
    }
}

#[test]
fn the_header_of_gpt_oss_quantises_experts_alone() {
    let header =
        json!({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]});
    let config = QuantConfig::from_json(&json!({"quantization_config": header})).unwrap().unwrap();
    assert_eq!(config.method(), QuantConfig::PACKED_EXPERTS);
    let format = |module: &str| config.format_of(module).unwrap();
    assert_eq!(format("model.layers.3.mlp.experts.7.gate_proj"), MXFP4);
    for plain in
        ["model.layers.3.self_attn.q_proj", "model.layers.3.mlp.router", "lm_head", "model.embed_tokens"]
    {
        assert_eq!(format(plain), Format::Plain, "{plain}");
    }
    let left_out = json!({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.0.mlp.experts"]});
    let config = QuantConfig::from_header("q", &left_out).unwrap();
    assert_eq!(config.format_of("model.layers.0.mlp.experts.1.up_proj").unwrap(), Format::Plain);
    assert_eq!(config.format_of("model.layers.1.mlp.experts.1.up_proj").unwrap(), MXFP4);
}
