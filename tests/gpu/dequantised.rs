//! Quantised checkpoints that are loaded as floats on a CUDA device: every matrix and every part of a rank has the bits
//! of the CPU, and whole models have its logits, also in formats that GPUs have no kernels for.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device};
use model_families::{ALL, qwen3_moe};
use model_runtime::{Checkpoint, Geometry, ParallelConfig};
use moe_engine::{LoadOptions, ModelSpec};
use moe_kernels::Exec;
use moe_layer::BlockContext;
use moe_tests::{Schedule, all_logits, fixture};

use crate::common::{FLOATS, Rng, cuda};
use crate::load::bits;
use writer::{Meta, Tensor, Writer};

#[allow(dead_code)] // Other tests write other values.
#[path = "../gguf/writer.rs"]
mod writer;

const FIXTURES: [&str; 8] = [
    "quant-modelopt-nvfp4",
    "quant-compressed-nvfp4",
    "gpt-oss-quant-mxfp4",
    "quant-awq",
    "quant-gptq-int4-act-order",
    "quant-compressed-fp8",
    "deepseek-quant-fp8-block",
    "glm4-quant-gptq-int4",
];

/// Q6_K and Q4_K: their numbers, the bytes of a block of 256 weights, and where it has scales in f16.
const TYPES: [(u32, usize, &[usize]); 2] = [(14, 210, &[208]), (12, 144, &[0, 2])];

const HIDDEN: usize = 256;
const VOCAB: usize = 96;
const EXPERTS: usize = 4;

/// A Qwen3-MoE of random blocks in types of ggml, which take turns.
fn gguf(dir: &Path) -> PathBuf {
    let mut file = Writer::default();
    file.put("general.architecture", Meta::Text("qwen3moe".into()));
    for (key, value) in [
        ("block_count", 2),
        ("context_length", 512),
        ("embedding_length", HIDDEN as u32),
        ("feed_forward_length", 512),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 64),
        ("expert_count", EXPERTS as u32),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 256),
    ] {
        file.put(&format!("qwen3moe.{key}"), Meta::U32(value));
    }
    file.put("qwen3moe.attention.layer_norm_rms_epsilon", Meta::F32(1e-6));
    file.put("qwen3moe.rope.freq_base", Meta::F32(1e6));
    let mut random = Rng::new();
    let mut matrix = |name: String, shape: &[usize]| {
        let (kind, size, scales) = TYPES[file.tensors.len() % TYPES.len()];
        let blocks = shape.iter().product::<usize>() / 256;
        let mut bytes: Vec<u8> = (0..blocks * size).map(|_| random.bits() as u8).collect();
        for block in bytes.chunks_mut(size) {
            for at in scales {
                let scale = half::f16::from_f32(0.00004 * (1.5 + random.float()));
                block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
            }
        }
        file.tensors.push(Tensor { name, shape: shape.to_vec(), kind, bytes });
    };
    matrix("token_embd.weight".into(), &[VOCAB, HIDDEN]);
    matrix("output.weight".into(), &[VOCAB, HIDDEN]);
    for layer in 0..2 {
        let named = |name: &str| format!("blk.{layer}.{name}.weight");
        matrix(named("attn_q"), &[256, HIDDEN]);
        matrix(named("attn_k"), &[128, HIDDEN]);
        matrix(named("attn_v"), &[128, HIDDEN]);
        matrix(named("attn_output"), &[HIDDEN, 256]);
        for name in ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"] {
            matrix(named(name), &[EXPERTS, 256, HIDDEN]);
        }
    }
    let mut floats = |name: String, shape: &[usize], value: &mut dyn FnMut() -> f32| {
        let bytes = (0..shape.iter().product()).flat_map(|_: usize| value().to_le_bytes()).collect();
        file.tensors.push(Tensor { name, shape: shape.to_vec(), kind: 0, bytes });
    };
    floats("output_norm.weight".into(), &[HIDDEN], &mut || 1.0);
    for layer in 0..2 {
        for (name, width) in
            [("attn_norm", HIDDEN), ("ffn_norm", HIDDEN), ("attn_q_norm", 64), ("attn_k_norm", 64)]
        {
            floats(format!("blk.{layer}.{name}.weight"), &[width], &mut || 1.0);
        }
        floats(format!("blk.{layer}.ffn_gate_inp.weight"), &[EXPERTS, HIDDEN], &mut || 0.1 * random.float());
    }
    let path = dir.join("model.gguf");
    file.save(&path);
    path
}

/// The fixtures and the GGUF file.
fn models(dir: &Path) -> Vec<PathBuf> {
    FIXTURES.iter().map(|name| fixture(name)).chain([gguf(dir)]).collect()
}

#[test]
fn every_matrix_has_the_bits_of_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    for path in models(dir.path()) {
        let checkpoint = Checkpoint::open(&path).unwrap().dequantised();
        let model = ALL.parse(&checkpoint.config).unwrap();
        let has = |name: &str| checkpoint.has(name);
        let expected = model.layout(&Geometry::default(), &has).unwrap().tensors;
        for tp in [1, 2] {
            let geometry = ParallelConfig { tp, ..ParallelConfig::default() }.geometry(tp - 1).unwrap();
            for dtype in FLOATS {
                let on = |device: &Device| {
                    let slices = model.layout(&geometry, &has).unwrap().slices_for(&Device::Cpu);
                    checkpoint.rank_view(&expected, slices).var_builder(dtype, device)
                };
                let cpu = on(&Device::Cpu);
                let gpu = on(cuda().device());
                for spec in expected.iter().filter(|spec| cpu.contains_tensor(&spec.name)) {
                    let want = cpu.get_unchecked(&spec.name).unwrap();
                    let got = gpu.get_unchecked(&spec.name).unwrap();
                    let what = format!("{} {} {dtype:?} tp {tp}", path.display(), spec.name);
                    assert!(got.device().is_cuda(), "{what}");
                    assert_eq!((want.dims(), want.dtype()), (got.dims(), got.dtype()), "{what}");
                    assert!(bits(&want) == bits(&got), "{what}: other bits");
                }
            }
        }
    }
}

/// The logits of a checkpoint that is loaded as floats.
fn logits(path: &Path, dtype: DType, mut ex: Exec) -> Vec<f32> {
    let checkpoint = Checkpoint::open(path).unwrap().dequantised();
    let model = ALL.parse(&checkpoint.config).unwrap();
    let layout = model.layout(&Geometry::default(), &|name| checkpoint.has(name)).unwrap();
    layout.check_quantised(checkpoint.quantisation.as_ref().unwrap(), true).unwrap();
    let expected = layout.tensors.clone();
    let view = checkpoint.rank_view(&expected, layout.slices_for(ex.device()));
    let context = BlockContext { quant: Some(Arc::new(view.clone())), ..BlockContext::default() };
    let options = LoadOptions { context, ..LoadOptions::default() };
    let loaded = model.load(&options, view.var_builder(dtype, ex.device())).unwrap();
    let vocab = loaded.model.info().vocab_size as u32;
    let prompt = |(len, seed): (u32, u32)| (0..len).map(|i| (i * i * 7 + i * seed) % vocab).collect();
    let prompts: Vec<Vec<u32>> = [(23, 1), (5, 2)].map(prompt).into();
    let schedule = Schedule { chunk: 7, block_size: 16, together: true };
    all_logits(loaded.model.as_ref(), &prompts, schedule, &mut ex).unwrap().concat()
}

#[test]
fn whole_models_have_the_logits_of_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    for path in models(dir.path()) {
        let want = logits(&path, DType::F32, Exec::cpu());
        let largest = want.iter().fold(0f32, |most, x| most.max(x.abs()));
        assert!(largest.is_finite() && largest > 0.0, "{}", path.display());
        let got = logits(&path, DType::F32, cuda());
        let off = want.iter().zip(&got).fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest;
        assert!(off < 1e-3, "{}: {off}", path.display());
    }
}

/// Without the setting, the file is refused before weights are read, and the refusal names the setting.
#[test]
fn a_file_without_kernels_is_refused_with_what_works() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(gguf(dir.path())).unwrap();
    let model = qwen3_moe::read(&checkpoint.config).unwrap();
    let layout = model.layout(&Geometry::default(), &|name| checkpoint.has(name)).unwrap();
    let refused = layout.check_quantised(checkpoint.quantisation.as_ref().unwrap(), true).unwrap_err();
    assert!(refused.to_string().contains("or set `dequantise` to load it as floats ("), "{refused}");
}
