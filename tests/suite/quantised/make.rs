//! Small random checkpoints in any quantised format, each with a twin that holds the floats which its integers mean.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device};
use candle_nn::var_builder::SimpleBackend;
use model_families::ALL;
use model_runtime::{Config, DummyWeights, Geometry};
use moe_quant::safetensors::tensor::TensorView;
use moe_quant::safetensors::{Dtype, serialize_to_file};
use moe_quant::{Format, Fp4Tensors, IntFormat, QuantConfig, QuantGroup, e4m3};
use serde_json::Value;

use super::pack::{Matrix, Tensor, pack};

/// The folders of a checkpoint and of its twin.
pub struct Made {
    _dir: tempfile::TempDir,
    /// The checkpoint with integers or FP8.
    pub quantised: &'static str,
    /// The twin, with the floats that these stand for.
    pub twin: &'static str,
    /// The number of quantised matrices.
    pub matrices: usize,
}

/// Random numbers (Knuth's linear congruential generator, its upper bits).
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % bound.max(1)
    }
}

/// Makes a checkpoint of this config with this `quantization_config`. Matrices that the header names are quantised,
/// except for routers and embeddings, which real checkpoints keep in floats although the header does not say so.
pub fn make(config: &str, header: &Value, seed: u64) -> Made {
    let mut raw: Value = serde_json::from_str(config).unwrap();
    let plain = ALL.parse(&Config::parse(config, "config.json").unwrap()).unwrap();
    // Experts are stored one by one, so no name is the name of a pack.
    let one_by_one = |name: &str| !name.ends_with("gate_up_proj");
    let specs = plain.layout(&Geometry::default(), &one_by_one).unwrap().tensors;
    raw["quantization_config"] = header.clone();
    let quant = QuantConfig::from_json(&raw).unwrap().unwrap();
    let weights = DummyWeights::new(specs.clone(), seed);
    let mut stored = HashMap::new();
    let mut floats = HashMap::new();
    let mut matrices = 0;
    for spec in &specs {
        let values = weights.get_unchecked(&spec.name, DType::F32, &Device::Cpu).unwrap();
        let values: Vec<f32> = values.flatten_all().unwrap().to_vec1().unwrap();
        let module = spec.name.strip_suffix(".weight").unwrap_or(&spec.name);
        let is_plain = spec.shape.len() != 2 || module.ends_with("embed_tokens") || module.ends_with(".gate");
        let format = if is_plain { Format::Plain } else { quant.format_of(module).unwrap() };
        if format == Format::Plain {
            stored.insert(spec.name.clone(), float(&values, &spec.shape));
            floats.insert(spec.name.clone(), float(&values, &spec.shape));
            continue;
        }
        matrices += 1;
        let n = spec.shape[0];
        let k = spec.shape[1];
        let (tensors, meant) = match format {
            Format::Fp8 { scales, scale_inv } => fp8(&values, n, k, scales, scale_inv),
            Format::Mxfp4(tensors) => mxfp4(&values, n, k, tensors),
            Format::Nvfp4(tensors) => nvfp4(&values, n, k, tensors),
            _ => {
                // Modules with the same input share an order, because they share a Hessian. With `seed` 0 each module
                // has its own order.
                let input =
                    if seed == 0 { module } else { module.rsplit_once('.').map_or(module, |(of, _)| of) };
                let letters = input.bytes().fold(seed, |sum, b| sum.wrapping_mul(31).wrapping_add(b.into()));
                let matrix = round(&values, n, k, format.int().unwrap(), &mut Random(letters ^ k as u64));
                (pack(format, &matrix), matrix.weights())
            }
        };
        let int = format.int();
        let is_wanted = |suffix: &str| match suffix {
            "weight_zero_point" => int.is_some_and(|int| int.zero_point),
            "weight_g_idx" => int.is_some_and(|int| int.act_order),
            _ => true,
        };
        for tensor in tensors.into_iter().filter(|tensor| is_wanted(tensor.suffix)) {
            stored.insert(format!("{module}.{}", tensor.suffix), tensor);
        }
        // AutoGPTQ gives every layer a bias; here it contains zeros of both signs.
        if header["static_groups"].is_boolean() {
            stored.insert(format!("{module}.bias"), float(&[0.0, -0.0].repeat(n / 2), &[n]));
        }
        if header["activation_scheme"] == "static" {
            stored.insert(format!("{module}.input_scale"), float(&[0.5], &[1]));
        }
        floats.insert(spec.name.clone(), float(&meant, &spec.shape));
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| -> &'static str { dir.path().join(name).display().to_string().leak() };
    let quantised = path("quantised");
    let twin = path("twin");
    write(quantised, &raw, &stored);
    raw.as_object_mut().unwrap().remove("quantization_config");
    write(twin, &raw, &floats);
    Made { _dir: dir, quantised, twin, matrices }
}

fn float(values: &[f32], shape: &[usize]) -> Tensor {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Tensor { suffix: "weight", dtype: Dtype::F32, shape: shape.to_vec(), bytes }
}

fn write(dir: &str, config: &Value, tensors: &HashMap<String, Tensor>) {
    fs::create_dir(dir).unwrap();
    fs::write(Path::new(dir).join("config.json"), config.to_string()).unwrap();
    let views: Vec<(&String, TensorView)> = tensors.iter().map(|(name, t)| (name, t.view())).collect();
    serialize_to_file(views, None, &Path::new(dir).join("model.safetensors")).unwrap();
}

/// Rounds to the nearest integers of the format; with act-order columns belong to groups at random.
fn round(values: &[f32], n: usize, k: usize, int: IntFormat, random: &mut Random) -> Matrix {
    let size = int.group.columns(k);
    let groups = k / size;
    let mut g_idx: Vec<u32> = (0..k).map(|column| (column / size) as u32).collect();
    if int.act_order {
        (1..k).rev().for_each(|at| g_idx.swap(at, random.below(at + 1)));
    }
    let most = ((1u32 << int.bits) - 1) as f32;
    let mut codes = vec![0u8; n * k];
    let mut zeros = vec![int.middle(); n * groups];
    let mut scales = vec![0.0; n * groups];
    for row in 0..n {
        for group in 0..groups {
            let of_group = (0..k).filter(|&column| g_idx[column] as usize == group);
            let (low, high) = of_group.fold((0f32, 0f32), |(low, high), column| {
                let v = values[row * k + column];
                (low.min(v), high.max(v))
            });
            let at = row * groups + group;
            if int.zero_point {
                scales[at] = (high - low).max(1e-6) / most;
                zeros[at] = (-low / scales[at]).round().clamp(0.0, most) as u8;
            } else {
                scales[at] = 2.0 * high.max(-low).max(1e-6) / most;
            }
            // Some scales that f16 holds and some that it does not.
            if row % 2 == 0 {
                scales[at] = moe_kernels::half::f16::from_f32(scales[at]).to_f32();
            }
        }
        for column in 0..k {
            let at = row * groups + g_idx[column] as usize;
            let q = (values[row * k + column] / scales[at]).round() + f32::from(zeros[at]);
            codes[row * k + column] = q.clamp(0.0, most) as u8;
        }
    }
    Matrix { n, k, codes, zeros, scales, g_idx }
}

/// Rounds to the nearest E4M3 floats, with the largest value of a scale's weights at 448.
fn fp8(values: &[f32], n: usize, k: usize, scales: QuantGroup, scale_inv: bool) -> (Vec<Tensor>, Vec<f32>) {
    let (rows, columns, shape) = match scales {
        QuantGroup::Block { n: rows, k: columns } => {
            (rows, columns, vec![n.div_ceil(rows), k.div_ceil(columns)])
        }
        QuantGroup::Size(size) => (1, size, vec![n, k.div_ceil(size)]),
        QuantGroup::Channel => (1, k, vec![n, 1]),
        QuantGroup::Tensor => (n, k, vec![1]),
    };
    let across = k.div_ceil(columns);
    let mut factors = vec![1e-6f32; n.div_ceil(rows) * across];
    let block = |at: usize| at / k / rows * across + at % k / columns;
    for (at, v) in values.iter().enumerate() {
        factors[block(at)] = factors[block(at)].max(v.abs() / 448.0);
    }
    let nearest = |v: f32| {
        let finite = (0..=255u8).filter(|q| q & 0x7f != 0x7f);
        finite.min_by(|a, b| (e4m3(*a) - v).abs().total_cmp(&(e4m3(*b) - v).abs())).unwrap_or(0)
    };
    let codes: Vec<u8> = values.iter().enumerate().map(|(at, v)| nearest(v / factors[block(at)])).collect();
    let meant = codes.iter().enumerate().map(|(at, q)| factors[block(at)] * e4m3(*q)).collect();
    let weight = Tensor { suffix: "weight", dtype: Dtype::F8_E4M3, shape: vec![n, k], bytes: codes };
    let suffix = if scale_inv { "weight_scale_inv" } else { "weight_scale" };
    (vec![weight, Tensor { suffix, ..float(&factors, &shape) }], meant)
}

/// The value of an E2M1 code.
fn e2m1(q: u8) -> f32 {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let magnitude = MAGNITUDES[usize::from(q & 7)];
    if q & 8 == 0 { magnitude } else { -magnitude }
}

/// The nearest E2M1 codes of a block with this scale, two to a byte, and what they mean.
fn fp4_block(block: &[f32], scale: f32, codes: &mut Vec<u8>, meant: &mut Vec<f32>) {
    let nearest = |v: f32| {
        let distance = |q: &u8| (e2m1(*q) * scale - v).abs();
        (0..16u8).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0)
    };
    for pair in block.chunks(2) {
        let [low, high] = [nearest(pair[0]), nearest(pair[1])];
        codes.push(low | high << 4);
        meant.extend([low, high].map(|q| scale * e2m1(q)));
    }
}

fn fp4_codes(tensors: Fp4Tensors, n: usize, k: usize, bytes: Vec<u8>) -> Tensor {
    let suffix = if tensors == Fp4Tensors::Packed { "weight_packed" } else { "weight" };
    Tensor { suffix, dtype: Dtype::U8, shape: vec![n, k / 2], bytes }
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(1e-20f32, |most, v| most.max(v.abs()))
}

/// Rounds to the nearest E2M1 floats, with a power of two for 32 columns that leaves the largest value between 4 and 8.
fn mxfp4(values: &[f32], n: usize, k: usize, tensors: Fp4Tensors) -> (Vec<Tensor>, Vec<f32>) {
    let mut codes = Vec::new();
    let mut exponents = Vec::new();
    let mut meant = Vec::new();
    for block in values.chunks(32) {
        let exponent = largest(block).log2().floor() as i32 - 2;
        exponents.push((exponent + 127) as u8);
        fp4_block(block, 2f32.powi(exponent), &mut codes, &mut meant);
    }
    let scales =
        Tensor { suffix: "weight_scale", dtype: Dtype::U8, shape: vec![n, k / 32], bytes: exponents };
    (vec![fp4_codes(tensors, n, k, codes), scales], meant)
}

/// Rounds to the nearest E2M1 floats, with an E4M3 float for 16 columns, of which the largest is 448, and one float for
/// the matrix.
fn nvfp4(values: &[f32], n: usize, k: usize, tensors: Fp4Tensors) -> (Vec<Tensor>, Vec<f32>) {
    let wanted = largest(values) / (6.0 * 448.0);
    let is_packed = tensors == Fp4Tensors::Packed;
    let (suffix, stored) =
        if is_packed { ("weight_global_scale", 1.0 / wanted) } else { ("weight_scale_2", wanted) };
    let factor = if is_packed { 1.0 / stored } else { stored };
    let mut codes = Vec::new();
    let mut scales = Vec::new();
    let mut meant = Vec::new();
    for block in values.chunks(16) {
        let wanted = largest(block) / 6.0 / factor;
        let distance = |q: &u8| (e4m3(*q) - wanted).abs();
        let scale = (0..0x7f).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0);
        scales.push(scale);
        fp4_block(block, e4m3(scale) * factor, &mut codes, &mut meant);
    }
    let groups =
        Tensor { suffix: "weight_scale", dtype: Dtype::F8_E4M3, shape: vec![n, k / 16], bytes: scales };
    let of_matrix = Tensor { suffix, ..float(&[stored], if is_packed { &[1] } else { &[] }) };
    (vec![fp4_codes(tensors, n, k, codes), groups, of_matrix], meant)
}
