//! GGUF files as whole models: every family and every type of tensors has the logits of a twin in floats, on one rank
//! and on several.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use candle_nn::var_builder::SimpleBackend;
use model_families::ALL;
use model_runtime::{Config, DummyWeights, Geometry, is_gate_up_pack};
use moe_comm::ParallelConfig;
use moe_engine::{LoadOptions, MemoryPlan};
use moe_quant::safetensors::tensor::TensorView;
use moe_quant::safetensors::{Dtype, serialize_to_file};
use moe_quant::{Format, GgmlBlock, GgmlType};
use serde_json::Value;

use crate::geometries::{Case, check};
use crate::gguf_configs::{
    DEEPSEEK_V2, DEEPSEEK_V3, GLM4, GPT_OSS, MIXTRAL, OLMOE, QWEN2, QWEN3_NEXT, qwen3, qwen35,
};
use crate::gguf_names::{COMMON, architecture, place};
use crate::gguf_orders::{in_checkpoint, in_file, join_up_projections};
use crate::quantised::dequantised::{logits_of_floats, quant_of_floats};
use crate::quantised::{WORKS, distance, logits, usual_distance};
use writer::{Meta, Tensor, Writer};

#[allow(dead_code)] // Other tests write other values.
#[path = "../gguf/writer.rs"]
pub mod writer;

const F32: u32 = 0;

/// A GGUF file, and a folder with the weights that it stands for.
struct Made {
    dir: tempfile::TempDir,
    file: PathBuf,
}

impl Made {
    fn twin(&self) -> &Path {
        self.dir.path()
    }
}

/// A tensor of the checkpoint that a tensor of the file is made of: its values, its shape and its name.
struct Part {
    values: Vec<f32>,
    shape: Vec<usize>,
    name: String,
}

/// Writes a random model whose matrices have these types in turn; the experts of one product have one type.
fn make(config: &str, types: &[GgmlType], seed: u64) -> Made {
    make_split(config, types, seed, false)
}

/// [`make`]. If `split`, what most files have in one tensor is in several: in latent attention the up-projections of
/// keys and values, in other models the experts.
fn make_split(config: &str, types: &[GgmlType], seed: u64, split: bool) -> Made {
    let raw: Value = serde_json::from_str(config).unwrap();
    let model_type = raw["model_type"].as_str().unwrap();
    let (architecture, keys) = architecture(model_type);
    let model = ALL.parse(&Config::parse(config, "config.json").unwrap()).unwrap();
    let is_latent = raw["kv_lora_rank"].is_u64();
    let one_by_one = |name: &str| {
        let is_whole = name.ends_with("kv_b_proj.weight") && split;
        let is_grouped = name.ends_with("in_proj_qkvz.weight")
            || name.ends_with("in_proj_ba.weight") && architecture == "qwen35moe";
        !is_whole && !is_grouped && !name.contains("gate_up_proj") && !name.starts_with("lm_head")
    };
    let specs = model.layout(&Geometry::default(), &one_by_one).unwrap().tensors;
    let weights = DummyWeights::new(specs.clone(), seed);
    let mut stored: BTreeMap<String, Vec<Part>> = BTreeMap::new();
    for spec in &specs {
        let values = weights.get_unchecked(&spec.name, DType::F32, &Device::Cpu).unwrap();
        let values: Vec<f32> = values.flatten_all().unwrap().to_vec1().unwrap();
        let (name, expert) = match place(&spec.name, architecture) {
            (name, Some(expert)) if split && !is_latent => {
                (name.replace("_exps.", &format!(".{expert}.")), None)
            }
            placed => placed,
        };
        let parts = stored.entry(name).or_default();
        assert_eq!(expert.unwrap_or(0), parts.len());
        parts.push(Part { values, shape: spec.shape.clone(), name: spec.name.clone() });
    }
    let mut file = Writer::default();
    file.put("general.architecture", Meta::Text(architecture.into()));
    let prefixed = |key: &str| format!("{architecture}.{key}");
    for (from, to) in COMMON.iter().chain(keys) {
        let value = match &raw[from] {
            Value::Null => continue,
            Value::Bool(flag) => Meta::Bool(*flag),
            number if number.is_u64() => Meta::U32(number.as_u64().unwrap() as u32),
            number => Meta::F32(number.as_f64().unwrap() as f32),
        };
        file.put(&prefixed(to), value);
    }
    if let Some(part) = raw["partial_rotary_factor"].as_f64() {
        let rotated = raw["head_dim"].as_u64().unwrap() as f64 * part;
        file.put(&prefixed("rope.dimension_count"), Meta::U32(rotated as u32));
    }
    if let Some(factor) = raw["rope_scaling"]["factor"].as_f64() {
        let original = raw["rope_scaling"]["original_max_position_embeddings"].as_u64().unwrap();
        file.put(&prefixed("rope.scaling.type"), Meta::Text("yarn".into()));
        file.put(&prefixed("rope.scaling.factor"), Meta::F32(factor as f32));
        file.put(&prefixed("rope.scaling.original_context_length"), Meta::U32(original as u32));
        if let Some(mscale) = raw["rope_scaling"]["mscale_all_dim"].as_f64() {
            file.put(&prefixed("rope.scaling.yarn_log_multiplier"), Meta::F32(0.1 * mscale as f32));
        }
    }
    if let Some(plain) = raw["qk_nope_head_dim"].as_u64() {
        let size = |key: &str| raw[key].as_u64().unwrap() as u32;
        let keys = if split { size("kv_lora_rank") } else { plain as u32 } + size("qk_rope_head_dim");
        file.put(&prefixed("attention.key_length"), Meta::U32(keys));
        file.put(&prefixed("attention.key_length_mla"), Meta::U32(plain as u32 + size("qk_rope_head_dim")));
        let gating = if raw["scoring_func"] == "sigmoid" { 2 } else { 1 };
        file.put(&prefixed("expert_gating_func"), Meta::U32(gating));
    }
    if let Some(width) = raw["linear_value_head_dim"].as_u64() {
        let together = width * raw["linear_num_value_heads"].as_u64().unwrap();
        file.put(&prefixed("ssm.inner_size"), Meta::U32(together as u32));
    }
    let mut twin = HashMap::new();
    for (turn, (name, parts)) in stored.into_iter().enumerate() {
        let columns = parts[0].shape.last().copied().unwrap_or(0);
        let fits = |ggml: &GgmlType| columns.is_multiple_of(ggml.columns());
        let ggml = Some(types[turn % types.len()]).filter(fits).unwrap_or(GgmlType::Q8_0);
        let mut bytes = Vec::new();
        let mut kind = F32;
        let count = parts.len();
        let mut shape = parts[0].shape.clone();
        for Part { values, shape, name: name_here } in parts {
            let is_float = shape.len() != 2 || name.contains("ffn_gate_inp");
            let meant = if is_float {
                bytes.extend(values.iter().flat_map(|x| in_file(architecture, &name, *x).to_le_bytes()));
                values
            } else {
                kind = ggml.id();
                let (blocks, meant) = random_blocks(ggml, &shape, turn as u64 + seed);
                bytes.extend(blocks);
                meant
            };
            let meant = in_checkpoint(architecture, &name, &raw, &meant, &shape);
            let bytes = meant.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
            twin.insert(name_here, (shape, bytes));
        }
        if count > 1 {
            shape.insert(0, count);
        }
        if name.contains("attn_k_b") || name.contains("attn_v_b") {
            let heads = raw["num_attention_heads"].as_u64().unwrap() as usize;
            shape = vec![heads, shape[0] / heads, shape[1]];
        }
        if name.ends_with("ffn_gate_inp_shexp.weight") {
            shape = vec![shape[1]];
        }
        if name.ends_with("ssm_conv1d.weight") {
            shape = vec![shape[0], shape[2]];
        }
        file.tensors.push(Tensor { name, shape, kind, bytes });
    }
    if split && is_latent {
        join_up_projections(&mut twin, raw["num_attention_heads"].as_u64().unwrap() as usize);
    }
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("model.gguf");
    file.save(&to);
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    let views = twin.iter().map(|(name, (shape, bytes))| {
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
    Made { dir, file: to }
}

/// Random blocks of a matrix with weights of about 0.02, and what they stand for.
fn random_blocks(ggml: GgmlType, shape: &[usize], seed: u64) -> (Vec<u8>, Vec<f32>) {
    let mut random = crate::quantised::make::Random(seed * 7919 + ggml.id() as u64);
    let blocks = shape[0] * shape[1] / ggml.columns();
    let mut bytes: Vec<u8> = (0..blocks * ggml.bytes()).map(|_| random.below(256) as u8).collect();
    // Scales in f16 so that weights have about one size in all types.
    let halves: &[(usize, f32)] = match ggml {
        GgmlType::Q4_0 => &[(0, 0.004)],
        GgmlType::Q4_1 => &[(0, 0.004), (2, -0.03)],
        GgmlType::Q5_0 => &[(0, 0.002)],
        GgmlType::Q5_1 => &[(0, 0.002), (2, -0.03)],
        GgmlType::Q8_0 => &[(0, 0.0003)],
        GgmlType::Q2K => &[(80, 0.002), (82, 0.003)],
        GgmlType::Q3K => &[(108, 0.0005)],
        GgmlType::Q4K => &[(0, 0.0001), (2, 0.0008)],
        GgmlType::Q5K => &[(0, 0.00005), (2, 0.0008)],
        GgmlType::Q6K => &[(208, 0.00001)],
        GgmlType::Iq4Nl => &[(0, 0.0003)],
        GgmlType::Iq4Xs => &[(0, 0.00002)],
        GgmlType::Mxfp4 => &[],
        other => panic!("no scales of {other:?} here"),
    };
    for block in bytes.chunks_mut(ggml.bytes()) {
        for (at, scale) in halves {
            let scale = half::f16::from_f32(scale * (0.75 + random.below(64) as f32 / 128.0));
            block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
        if ggml == GgmlType::Mxfp4 {
            block[0] = 119 + random.below(3) as u8;
        }
    }
    let mut meant = Vec::new();
    let mut block = GgmlBlock::default();
    let scheme = ggml.scheme();
    let group = scheme.group_size(shape[1]);
    for bytes in bytes.chunks(ggml.bytes()) {
        ggml.decode(bytes, &mut block);
        for (at, code) in block.codes[..ggml.columns()].iter().enumerate() {
            let value = scheme.value(*code) - f32::from(scheme.middle());
            let minimum = if scheme.has_minima() { block.minima[at / group] } else { 0.0 };
            meant.push(block.scales[at / group] * value - minimum);
        }
    }
    (bytes, meant)
}

fn compare(config: &str, types: &[GgmlType], seed: u64) {
    compare_made(make(config, types, seed), types);
}

fn compare_made(made: Made, types: &[GgmlType]) {
    let names: Vec<_> = types.iter().map(|ggml| ggml.name()).collect();
    let run = |path: &Path, dtype| logits(path.to_str().unwrap(), LoadOptions::default(), dtype);
    let want = run(made.twin(), DType::F32);
    let got = run(&made.file, DType::F32);
    assert!(want.iter().all(|x| x.is_finite()) && want.iter().any(|x| *x != 0.0));
    let off = distance(&got, &want);
    assert!(off < 1e-4, "{names:?}: {off}");
    // Loaded as floats, the file has the logits of its twin.
    let floats = logits_of_floats(made.file.to_str().unwrap(), DType::F32);
    let off = distance(&floats, &want);
    assert!(off < 1e-5, "{names:?} as floats: {off}");
    assert_eq!(quant_of_floats(made.file.to_str().unwrap()), "none", "{names:?}");
    // In bf16 the file may be as far from f32 as the floats are.
    let noise = usual_distance(&run(made.twin(), DType::BF16), &want);
    let error = usual_distance(&run(&made.file, DType::BF16), &want);
    assert!(error < 2.0 * noise + 1e-3, "{names:?}: bf16 {error}, the floats {noise}");
}

/// Types that experts, attention and vocabulary projection have, each alone and in mixtures.
#[test]
fn every_type_has_the_logits_of_its_floats() {
    for (seed, ggml) in (1..).zip(GgmlType::all()) {
        compare(&qwen3(), &[ggml], seed);
    }
}

#[test]
fn every_family_has_the_logits_of_its_floats() {
    use GgmlType::{Iq4Nl, Mxfp4, Q2K, Q4_0, Q4K, Q5_1, Q5K, Q6K, Q8_0};
    for (seed, config) in (1..).zip([&qwen3(), QWEN2, OLMOE, MIXTRAL, GLM4, GPT_OSS, QWEN3_NEXT, &qwen35()]) {
        compare(config, &[Q4K, Q6K, Q5K], seed);
        compare(config, &[Q8_0, Iq4Nl, Q4_0, Q2K, Mxfp4, Q5_1, Q4K], seed + 10);
    }
}

/// The memory plan counts the matrices that a layer loads as floats in bf16, and the others as the file has them.
#[test]
fn the_plan_counts_floats_as_floats() {
    let rotated = ["q_proj", "k_proj", "v_proj"];
    let linear = ["q_proj", "k_proj", "v_proj", "in_proj_qkvz", "in_proj_ba"];
    let reordered = ["q_proj", "k_proj", "v_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"];
    let cases: [(&str, &[&str]); 4] =
        [(QWEN2, &[]), (GLM4, &rotated), (QWEN3_NEXT, &linear), (&qwen35(), &reordered)];
    for (config, floats) in cases {
        let made = make(config, &[GgmlType::Q4K], 5);
        let checkpoint = model_runtime::Checkpoint::open(&made.file).unwrap();
        let model = ALL.parse(&checkpoint.config).unwrap();
        let layout = model.layout(&Geometry::default(), &|name| !is_gate_up_pack(name)).unwrap();
        let quantisation = checkpoint.quantisation.as_ref().unwrap();
        let mut expected = 0;
        let mut more = 0;
        for spec in &layout.tensors {
            let elements: usize = spec.shape.iter().product();
            let bytes = match (spec.name.strip_suffix(".weight"), spec.shape.as_slice()) {
                // Gates keep their digits.
                _ if layout.exact.contains(&spec.name) => 4 * elements,
                (Some(module), &[n, k]) => {
                    let stored = quantisation.scheme_of(module).unwrap().matrix_bytes((n, k), DType::BF16);
                    let is_float = floats.iter().any(|name| module.ends_with(name));
                    more += if is_float { 2 * elements - stored } else { 0 };
                    if is_float { 2 * elements } else { stored }
                }
                _ => 2 * elements,
            };
            expected += bytes as u64;
        }
        let plan = MemoryPlan::of(model.as_ref(), &checkpoint.config, Some(quantisation)).unwrap();
        assert_eq!(plan.weights, expected, "{config}");
        assert_eq!(more > 0, !floats.is_empty(), "{config}");
    }
}

/// The up-projections of keys and values are in one matrix, or in two.
#[test]
fn latent_attention_has_the_logits_of_its_floats() {
    use GgmlType::{Q4_0, Q4K, Q6K};
    for (seed, config) in (1..).zip([DEEPSEEK_V2, DEEPSEEK_V3]) {
        for split in [false, true] {
            compare_made(make_split(config, &[Q4K, Q6K, Q4_0], seed, split), &[Q4K, Q6K, Q4_0]);
        }
    }
}

/// Files of 2023 have the experts one by one.
#[test]
fn experts_with_their_own_tensors_have_the_logits_of_their_floats() {
    use GgmlType::{Q4K, Q6K};
    compare_made(make_split(MIXTRAL, &[Q4K], 3, true), &[Q4K]);
    compare_made(make_split(MIXTRAL, &[Q4K, Q6K, Q4K], 4, true), &[Q4K, Q6K]);
}

/// Files have the value heads of Qwen3.5 in another order. A rank takes its own heads in the order of the checkpoint.
#[test]
fn ranks_find_their_value_heads() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/gguf/qwen3_5-text.gguf");
    let parallel = ParallelConfig { tp: 2, ..ParallelConfig::default() };
    check(&[DType::BF16, DType::F32].map(|dtype| Case::new(path, dtype, parallel)));
}

/// Any parallelism gives the bits of one rank. A cut through a group is refused, and the error names the numbers of
/// ranks that work.
#[test]
fn ranks_have_the_bits_of_one() {
    let made = make(&qwen3(), &[GgmlType::Q4K, GgmlType::Q6K, GgmlType::Q8_0], 3);
    let path: &'static str = Box::leak(made.file.to_str().unwrap().to_string().into_boxed_str());
    let cases = [
        ParallelConfig { tp: 2, ..ParallelConfig::default() },
        ParallelConfig { dp: 2, enable_expert_parallel: true, ..ParallelConfig::default() },
    ];
    check(&cases.map(|parallel| Case::new(path, DType::BF16, parallel)));
}

/// Types that no kernel of a GPU reads are refused by name before weights are read.
#[test]
fn types_without_kernels_on_a_gpu_are_refused_by_name() {
    for (ggml, named) in [
        (GgmlType::Q4_1, "int4 group 32 with minima"),
        (GgmlType::Q5K, "int5 group 32 of 256 with minima"),
        (GgmlType::Iq4Xs, "iq4_nl group 32"),
        (GgmlType::Q6K, "int6 group 16 of 256"),
    ] {
        let made = make(&qwen3(), &[ggml], 1);
        let checkpoint = model_runtime::Checkpoint::open(&made.file).unwrap();
        let model = ALL.parse(&checkpoint.config).unwrap();
        let layout = model.layout(&Geometry::default(), &|name| checkpoint.has(name)).unwrap();
        let quantisation = checkpoint.quantisation.as_ref().unwrap();
        assert!(matches!(quantisation.format_of("lm_head").unwrap(), Format::Ggml(found) if found == ggml));
        layout.check_quantised(quantisation, false).unwrap();
        let problem = layout.check_quantised(quantisation, true).unwrap_err().to_string();
        assert!(problem.contains(named) && problem.contains(WORKS), "{problem}");
    }
}
