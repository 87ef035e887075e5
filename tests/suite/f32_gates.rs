//! Gates that a checkpoint in bf16 stores in f32. Their digits choose the experts that transformers chooses, on any
//! number of ranks.
//!
//! The experts of these fixtures come in pairs whose rows of the gate are equal in bf16, so rounded gates choose other
//! experts.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor, safetensors};
use model_runtime::Checkpoint;
use moe_comm::{EpBackend, ParallelConfig};
use moe_engine::engine::{EngineConfig, Request};
use moe_layer::{MoePath, PlanStep};
use moe_tests::fixture;

use crate::geometries::{Case, Origin, check};
use crate::running::{Done, run};

const FIXTURES: [&str; 4] = ["deepseek-f32-gate", "deepseek3-f32-gate", "ernie-f32-gate", "glm4-f32-gate"];

fn tensors(file: &Path) -> HashMap<String, Tensor> {
    safetensors::load(file, &Device::Cpu).unwrap()
}

/// Continues the prompt of a fixture's reference with a checkpoint in a dtype. Also returns the reference's tokens.
fn continued(name: &'static str, checkpoint: Checkpoint, dtype: DType) -> (Done, Vec<u32>) {
    let reference = tensors(&fixture(name).join("reference.safetensors"));
    let ids = |name: &str| -> Vec<u32> {
        let ids = reference[name].flatten_all().unwrap().to_vec1::<i64>().unwrap();
        ids.into_iter().map(|id| u32::try_from(id).unwrap()).collect()
    };
    let expected = ids("generated");
    let case = Case::new(name, dtype, ParallelConfig::default());
    let replicas = Origin::of(checkpoint).load(&case).unwrap();
    let request = Request {
        max_tokens: Some(expected.len()),
        capture_routing: true,
        ignore_eos: true,
        ..Request::new(ids("input_ids"))
    };
    let mut done = run(replicas[0].model.as_ref(), &[request], &EngineConfig::default());
    (done.remove(0), expected)
}

/// The experts of the prompt's tokens, without an order among the experts of a token.
fn experts(done: &Done) -> Vec<Vec<u32>> {
    let routed = done.routed.as_ref().unwrap();
    let slots = routed.layers() * routed.top_k();
    let sorted = |ids: &[u32]| {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids
    };
    let prompt = routed.tokens() + 1 - done.tokens.len();
    routed.ids().chunks(slots).take(prompt).map(sorted).collect()
}

/// A copy of a fixture with its gates in bf16.
fn rounded(name: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    std::fs::copy(fixture(name).join("config.json"), copy.path().join("config.json")).unwrap();
    let mut all = tensors(&fixture(name).join("model.safetensors"));
    for (name, tensor) in &mut all {
        if name.ends_with(".gate.weight") {
            assert_eq!(tensor.dtype(), DType::F32, "{name}");
            *tensor = tensor.to_dtype(DType::BF16).unwrap();
        }
    }
    safetensors::save(&all, copy.path().join("model.safetensors")).unwrap();
    copy
}

#[test]
fn digits_of_a_gate_choose_the_experts_of_transformers() {
    let mut changed = 0;
    for name in FIXTURES {
        let open = || Checkpoint::open(fixture(name)).unwrap();
        let (exact, expected) = continued(name, open(), DType::F32);
        assert_eq!(exact.tokens, expected, "{name} in f32");
        let (kept, _) = continued(name, open(), DType::BF16);
        assert_eq!(kept.tokens, expected, "{name}");
        assert_eq!(experts(&kept), experts(&exact), "{name}");
        let copy = rounded(name);
        let (other, _) = continued(name, Checkpoint::open(copy.path()).unwrap(), DType::BF16);
        assert_ne!(experts(&other), experts(&exact), "{name}: the rounded gate chooses the same experts");
        changed += usize::from(other.tokens != expected);
    }
    assert!(changed > 0, "the rounded gates give the same tokens");
}

#[test]
fn ranks_choose_by_all_digits_too() {
    let base = ParallelConfig::default();
    let with = |tp, dp, backend: EpBackend| ParallelConfig {
        tp,
        dp,
        enable_expert_parallel: true,
        backend: backend.into(),
        ..base
    };
    let ranks = [
        base,
        ParallelConfig { tp: 2, ..base },
        with(1, 2, EpBackend::AllgatherReducescatter),
        with(2, 1, EpBackend::LocalAllreduce),
        with(2, 2, EpBackend::DeepEp),
    ];
    let mut cases = Vec::new();
    for model in FIXTURES {
        for parallel in ranks {
            let chunk = Some(5).filter(|_| cases.len().is_multiple_of(2));
            let path = Some(MoePath::Fused);
            cases.push(Case { chunk, path, ..Case::new(model, DType::BF16, parallel) });
        }
    }
    assert_eq!(check(&cases).len(), FIXTURES.len());
}

/// In f32 the gate has the dtype of the model, and nothing is said.
#[test]
fn the_plan_names_a_gate_in_f32() {
    for name in FIXTURES {
        let notes = |dtype| {
            let case = Case::new(name, dtype, ParallelConfig::default());
            let replicas = Origin::open(name).load(&case).unwrap();
            let model = replicas[0].model.as_ref();
            let layers = model.plan(&PlanStep::decode(1), &moe_layer::Machine::default());
            let stages = layers.into_iter().flat_map(|layer| layer.mlp);
            stages.filter(|stage| stage.note.as_deref() == Some("the gate in f32")).count()
        };
        assert_eq!((notes(DType::BF16), notes(DType::F32)), (1, 0), "{name}");
    }
}
