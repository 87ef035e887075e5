//! Compares the per-expert loop with the grouped experts, bit for bit, and tests what it refuses.

use std::collections::HashMap;
use std::sync::Arc;

use candle_nn::VarBuilder;
use moe_layer::candle::{Result, Tensor};
use moe_layer::legacy::{ExpertLoop, ExpertMlp};
use moe_layer::{
    Activation, BlockContext, BlockOptions, CpuIsa, DType, Device, Exec, MoePath, NO_EXPERT, RoutedExperts,
    SparseMoeBlock, StepContext, load_layer_on,
};
use proptest::prelude::*;

use crate::loading::{checkpoint, options};
use crate::reference::{Problem, example, problem, problems};
use crate::{bits, message, run, run_in};

fn expert(p: &Problem, e: usize) -> Result<ExpertMlp> {
    let w13 = p.weights()?.w13().to_tensor()?.get(e)?;
    let w2 = p.weights()?.w2().to_tensor()?.get(e)?;
    Ok(ExpertMlp {
        gate: w13.narrow(0, 0, p.width)?.force_contiguous()?,
        up: w13.narrow(0, p.width, p.width)?.force_contiguous()?,
        down: w2.force_contiguous()?,
    })
}

fn experts(p: &Problem) -> Result<Vec<ExpertMlp>> {
    (0..p.packed()).map(|e| expert(p, e)).collect()
}

fn looped(p: &Problem, experts: Vec<ExpertMlp>) -> Result<ExpertLoop> {
    ExpertLoop::new(experts, p.weights()?.shape(), Activation::SwiGlu)
}

fn legacy(p: &Problem) -> Result<SparseMoeBlock> {
    p.standard_with(Box::new(looped(p, experts(p)?)?))
}

fn isas() -> impl Iterator<Item = CpuIsa> {
    CpuIsa::ALL.into_iter().filter(|isa| isa.is_supported())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn both_paths_give_the_same_bits(p in problems(), threads in 1usize..4) {
        let x = p.rows().unwrap();
        let fused = p.standard().unwrap();
        let legacy = legacy(&p).unwrap();
        for isa in isas() {
            let mut ex = Exec::cpu().with_isa(isa).unwrap().with_threads(threads).unwrap();
            for dtype in [p.dtype, DType::F32] {
                let want = run(&fused, &x, dtype, &mut ex).unwrap();
                let got = run(&legacy, &x, dtype, &mut ex).unwrap();
                prop_assert_eq!(bits(&got), bits(&want), "{:?} {:?}", isa, dtype);
            }
        }
    }
}

#[test]
fn slots_without_an_expert_add_nothing() -> Result<()> {
    let p = example(DType::F32);
    let fused = p.standard()?;
    let legacy = legacy(&p)?;
    let x = p.rows()?;
    let mut replay = RoutedExperts::empty(p.tokens, 1, 2)?;
    replay.set(0, 0, &[3, NO_EXPERT])?;
    replay.set(2, 0, &[5, 0])?;
    let mut ex = Exec::cpu();
    let replay = Some(Arc::new(replay));
    let mut context = StepContext { replay, ..StepContext::default() };
    let want = bits(&run_in(&mut context, &fused, &x, DType::F32, &mut ex)?);
    assert_eq!(bits(&run_in(&mut context, &legacy, &x, DType::F32, &mut ex)?), want);
    assert_ne!(want, bits(&fused.forward(&x)?), "the replay counts");
    let none = Tensor::zeros((2, 0, p.hidden), DType::F32, &Device::Cpu)?;
    assert_eq!(legacy.forward(&none)?.dims(), [2, 0, p.hidden]);
    Ok(())
}

#[test]
fn a_frozen_workspace_that_served_one_step_serves_the_next() -> Result<()> {
    let p = problem((6, 24, 16, 5), example(DType::BF16).config, Some((8, true)), DType::BF16, 9);
    let x = p.rows()?;
    let block = legacy(&p)?;
    let mut ex = Exec::cpu();
    let first = bits(&run(&block, &x, DType::BF16, &mut ex)?);
    ex.workspace().freeze(true);
    assert_eq!(bits(&run(&block, &x, DType::BF16, &mut ex)?), first);
    Ok(())
}

/// The checkpoint of a problem with its experts packed, under the same prefix.
fn packed(p: &Problem) -> Result<HashMap<String, Tensor>> {
    let mut tensors = checkpoint(p)?;
    tensors.retain(|name, _| !name.starts_with("mlp.experts."));
    tensors.insert("mlp.experts.gate_up_proj".into(), p.weights()?.w13().to_tensor()?);
    tensors.insert("mlp.experts.down_proj".into(), p.weights()?.w2().to_tensor()?);
    Ok(tensors)
}

#[test]
fn both_layouts_load_on_both_paths() -> Result<()> {
    let p = example(DType::BF16);
    let want = bits(&p.standard()?.forward(&p.rows()?)?);
    for tensors in [checkpoint(&p)?, packed(&p)?] {
        let vb = VarBuilder::from_tensors(tensors, DType::BF16, &Device::Cpu).pp("mlp");
        for (path, chosen) in [(MoePath::Fused, true), (MoePath::Legacy, false)] {
            let gate = vb.pp("gate");
            let experts = vb.pp("experts");
            let (block, selection) =
                load_layer_on(path, &options(&p), &BlockContext::default(), gate, experts)?;
            assert_eq!(selection.is_some(), chosen);
            assert_eq!(bits(&block.forward(&p.rows()?)?), want, "{path:?}");
        }
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let p = example(DType::F32);
    let new = |experts: Vec<ExpertMlp>| message(looped(&p, experts));
    let few = new(experts(&p)?[..5].to_vec());
    assert!(few.contains("expected 6 experts, got 5"), "{few}");
    let mut wrong = experts(&p)?;
    wrong[3].down = wrong[3].gate.clone();
    let wrong = new(wrong);
    assert!(
        wrong.contains("down of expert 3 with dims [24, 16] of dtype f32, got [16, 24] of f32"),
        "{wrong}"
    );
    let mut mixed = experts(&p)?;
    mixed[1].up = mixed[1].up.to_dtype(DType::F16)?;
    let mixed = new(mixed);
    assert!(mixed.contains("up of expert 1") && mixed.contains("of f16"), "{mixed}");
    let shared =
        problem((6, 23, 16, 5), p.config.clone(), Some((8, false)), DType::F32, 1).shared_experts()?;
    let shared = message(legacy(&p)?.with_shared_experts(shared.unwrap()));
    assert!(shared.contains("hidden size 24") && shared.contains("got 23"), "{shared}");

    let vb = VarBuilder::from_tensors(checkpoint(&p)?, DType::F32, &Device::Cpu).pp("mlp");
    let load = |options: &BlockOptions, vb: &VarBuilder| {
        let gate = vb.pp("gate");
        let experts = vb.pp("experts");
        message(load_layer_on(MoePath::Legacy, options, &BlockContext::default(), gate, experts))
    };
    let backend = load(&BlockOptions { backend: Some("cpu".into()), ..options(&p) }, &vb);
    assert!(backend.contains("no backends") && backend.contains("cpu"), "{backend}");
    let mut tensors = checkpoint(&p)?;
    tensors.remove("mlp.experts.4.up_proj.weight");
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu).pp("mlp");
    let missing = load(&options(&p), &vb);
    assert!(missing.contains("mlp.experts.4.up_proj.weight"), "{missing}");
    assert_eq!("legacy".parse(), Ok(MoePath::Legacy));
    assert!("fast".parse::<MoePath>().unwrap_err().contains("\"fast\"; expected fused or legacy"));
    Ok(())
}
