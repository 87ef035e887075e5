//! Quantised checkpoints that are loaded as floats: they have the logits of their codes, and the bits of a checkpoint
//! of floats.

use candle_core::DType;
use model_families::ALL;
use model_runtime::{Checkpoint, Geometry};
use moe_comm::ParallelConfig;
use moe_engine::{LoadOptions, MemoryPlan};
use moe_layer::MoePath;
use moe_tests::fixture;
use serde_json::json;

use super::make::make;
use super::{QWEN, distance, gptq, headers, load, load_checkpoint, logits, logits_of, path};
use crate::geometries::{Case, Origin, outcome};

/// A fixture of each method, in each family that has one.
const FIXTURES: [&str; 15] = [
    "quant-auto-round",
    "quant-awq",
    "quant-compressed-fp8",
    "quant-compressed-int4-asym",
    "quant-compressed-nvfp4",
    "quant-fp8-block",
    "quant-gptq-int4-act-order",
    "quant-gptq-int8-channel",
    "quant-modelopt-nvfp4",
    "deepseek-quant-compressed-int8",
    "deepseek-quant-fp8-block",
    "deepseek-quant-gptq-int4",
    "deepseek3-quant-fp8-block",
    "glm4-quant-gptq-int4",
    "gpt-oss-quant-mxfp4",
];

fn open(path: &str) -> Checkpoint {
    Checkpoint::open(path).unwrap().dequantised()
}

/// The logits of a quantised checkpoint that is loaded as floats.
pub fn logits_of_floats(path: &str, dtype: DType) -> Vec<f32> {
    logits_of(load_checkpoint(&open(path), LoadOptions::default(), dtype).0.as_ref())
}

/// The scheme of its experts.
pub fn quant_of_floats(path: &str) -> String {
    let (_, backend) = load_checkpoint(&open(path), LoadOptions::default(), DType::BF16);
    backend["spec"]["quant"].as_str().unwrap().to_string()
}

/// The most likely token of each row.
fn greedy(logits: &[f32], vocab: usize) -> Vec<usize> {
    let largest = |row: &[f32]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
    logits.chunks(vocab).map(largest).collect()
}

/// Each fixture has the logits of its codes in f32, and its tokens.
#[test]
fn fixtures_have_the_logits_of_their_codes() {
    for name in FIXTURES {
        let dir = fixture(name);
        let path = dir.to_str().unwrap();
        let options = || LoadOptions { moe_path: Some(MoePath::Fused), ..LoadOptions::default() };
        let (model, backend) = load(path, options(), DType::F32);
        let (floats, floats_backend) = load_checkpoint(&open(path), options(), DType::F32);
        assert_ne!(backend["spec"]["quant"], "none", "{name}");
        assert_eq!(floats_backend["spec"]["quant"], "none", "{name}");
        let want = logits_of(model.as_ref());
        let got = logits_of(floats.as_ref());
        assert!(distance(&got, &want) < 1e-5, "{name}: {}", distance(&got, &want));
        let vocab = model.info().vocab_size;
        assert_eq!(greedy(&got, vocab), greedy(&want, vocab), "{name}");
    }
}

/// Every format, with every option, has the bits of a checkpoint of floats.
#[test]
fn every_format_has_the_bits_of_its_floats() {
    for (seed, (name, header, _)) in (1u64..).zip(headers()) {
        let made = make(QWEN, &header, seed);
        for way in [MoePath::Fused, MoePath::Legacy] {
            for dtype in [DType::F32, DType::BF16] {
                let want = logits(made.twin, path(way), dtype);
                let floats = load_checkpoint(&open(made.quantised), path(way), dtype).0;
                assert!(logits_of(floats.as_ref()) == want, "{name} {way:?} {dtype:?}: other bits");
            }
        }
    }
}

/// As floats a matrix may be cut anywhere: over numbers of ranks that would cut groups of its codes, too.
#[test]
fn ranks_cut_floats_and_not_groups() {
    let awq =
        json!({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": true, "version": "gemm"});
    let mxfp4 = super::mxfp4();
    for (header, tp) in [(awq, 2), (gptq(4, 32, false, false, "gptq"), 4), (mxfp4, 4)] {
        let made = make(QWEN, &header, 5);
        let parallel = ParallelConfig { tp, ..ParallelConfig::default() };
        let geometry = parallel.geometry(1).unwrap();
        let checkpoint = Checkpoint::open(made.quantised).unwrap();
        let model = ALL.parse(&checkpoint.config).unwrap();
        let layout = model.layout(&geometry, &|name| checkpoint.has(name)).unwrap();
        let refused = layout.check_quantised(checkpoint.quantisation.as_ref().unwrap(), false);
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("cuts through groups") && refused.contains("`dequantise`"), "{refused}");
        let checkpoint = checkpoint.dequantised();
        layout.check_quantised(checkpoint.quantisation.as_ref().unwrap(), false).unwrap();
        let origin = Origin::of(checkpoint);
        for dtype in [DType::F32, DType::BF16] {
            let run = |parallel| {
                let replicas = origin.load(&Case::new(made.quantised, dtype, parallel)).unwrap();
                outcome(&replicas, false).unwrap()
            };
            let ranks = run(parallel);
            assert!(
                ranks == run(ParallelConfig::default()),
                "{header}: tp {tp} has other bits than one rank"
            );
        }
    }
}

/// The plan of a checkpoint that is loaded as floats is the plan of floats, and larger than that of its codes.
#[test]
fn the_plan_counts_floats() {
    for name in FIXTURES {
        let checkpoint = Checkpoint::open(fixture(name)).unwrap();
        let model = ALL.parse(&checkpoint.config).unwrap();
        let plan = |checkpoint: &Checkpoint| {
            MemoryPlan::of(model.as_ref(), &checkpoint.config, checkpoint.quantisation.as_ref()).unwrap()
        };
        let codes = plan(&checkpoint);
        let floats = plan(&checkpoint.clone().dequantised());
        let layout = model.layout(&Geometry::default(), &|name| checkpoint.has(name)).unwrap();
        // Gates may keep their digits.
        let width = |name: &String| if layout.exact.contains(name) { 4 } else { 2 };
        let bytes =
            layout.tensors.iter().map(|spec| width(&spec.name) * spec.shape.iter().product::<usize>());
        assert_eq!(floats.weights, bytes.sum::<usize>() as u64, "{name}");
        assert!(codes.weights < floats.weights, "{name}: {codes:?}, {floats:?}");
        assert_eq!(codes.cache_of_token, floats.cache_of_token);
    }
}
