//! The per-expert loop against the fused block, bit for bit, and what it refuses.

use std::collections::HashMap;
use std::sync::Arc;

use candle_nn::VarBuilder;
use moe_layer::candle::{Result, Tensor};
use moe_layer::legacy::{ExpertMlp, MoeMlp};
use moe_layer::{
    Activation, BlockOptions, Buffer, CpuIsa, DType, Device, Exec, MoePath, NO_EXPERT, RoutedExperts, Router,
    RouterConfig, RouterParams, SparseLayer, StepContext, TensorView,
};
use proptest::prelude::*;

use crate::loading::{checkpoint, options};
use crate::reference::{Problem, example, problem, problems};
use crate::{bits, message, run, run_in};

fn expert(p: &Problem, e: usize) -> Result<ExpertMlp> {
    let (w13, w2) = (p.weights()?.w13().get(e)?, p.weights()?.w2().get(e)?);
    Ok(ExpertMlp {
        gate: w13.narrow(0, 0, p.width)?.force_contiguous()?,
        up: w13.narrow(0, p.width, p.width)?.force_contiguous()?,
        down: w2.force_contiguous()?,
    })
}

fn experts(p: &Problem) -> Result<Vec<ExpertMlp>> {
    (0..p.packed()).map(|e| expert(p, e)).collect()
}

fn legacy(p: &Problem) -> Result<MoeMlp> {
    let block = MoeMlp::new(p.gate_weight()?, p.router()?, experts(p)?, Activation::SwiGlu, 0)?;
    match p.shared_experts()? {
        Some(shared) => block.with_shared_experts(shared),
        None => Ok(block),
    }
}

fn run_legacy(block: &MoeMlp, x: &Tensor, dtype: DType, ex: &mut Exec) -> Result<Tensor> {
    run_legacy_in(&mut StepContext::default(), block, x, dtype, ex)
}

fn run_legacy_in(
    context: &mut StepContext,
    block: &MoeMlp,
    x: &Tensor,
    dtype: DType,
    ex: &mut Exec,
) -> Result<Tensor> {
    let mut out = Buffer::zeros(dtype, x.dims())?;
    block.forward_into(TensorView::new(x)?.view()?, out.view_mut(), context, ex)?;
    out.into_tensor()
}

fn isas() -> impl Iterator<Item = CpuIsa> {
    CpuIsa::ALL.into_iter().filter(|isa| isa.is_supported())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn both_paths_give_the_same_bits(p in problems(), threads in 1usize..4) {
        let only_fused = p.config.num_zero_experts > 0
            || p.config.num_fused_shared_experts > 0
            || p.config.apply_router_weight_on_input;
        if only_fused {
            let e = message(legacy(&p));
            prop_assert!(e.contains("the legacy expert path does not support"), "{e}");
            return Ok(());
        }
        let (x, fused, legacy) = (p.rows().unwrap(), p.standard().unwrap(), legacy(&p).unwrap());
        for isa in isas() {
            let mut ex = Exec::cpu().with_isa(isa).unwrap().with_threads(threads).unwrap();
            for dtype in [p.dtype, DType::F32] {
                let want = run(&fused, &x, dtype, &mut ex).unwrap();
                let got = run_legacy(&legacy, &x, dtype, &mut ex).unwrap();
                prop_assert_eq!(bits(&got), bits(&want), "{:?} {:?}", isa, dtype);
            }
        }
    }
}

#[test]
fn slots_without_an_expert_add_nothing() -> Result<()> {
    let p = example(DType::F32);
    let (fused, legacy, x) = (p.standard()?, legacy(&p)?, p.rows()?);
    let mut replay = RoutedExperts::empty(p.tokens, 1, 2)?;
    replay.set(0, 0, &[3, NO_EXPERT])?;
    replay.set(2, 0, &[5, 0])?;
    let (mut ex, replay) = (Exec::cpu(), Some(Arc::new(replay)));
    let mut context = StepContext { replay, ..StepContext::default() };
    let want = bits(&run_in(&mut context, &fused, &x, DType::F32, &mut ex)?);
    assert_eq!(bits(&run_legacy_in(&mut context, &legacy, &x, DType::F32, &mut ex)?), want);
    assert_ne!(want, bits(&fused.forward(&x)?), "the replay counts");
    let none = Tensor::zeros((2, 0, p.hidden), DType::F32, &Device::Cpu)?;
    assert_eq!(legacy.forward(&none)?.dims(), [2, 0, p.hidden]);
    Ok(())
}

#[test]
fn a_frozen_workspace_that_served_one_step_serves_the_next() -> Result<()> {
    let p = problem((6, 24, 16, 5), example(DType::BF16).config, Some((8, true)), DType::BF16, 9);
    let (x, block) = (p.rows()?, legacy(&p)?);
    let mut ex = Exec::cpu();
    let first = bits(&run_legacy(&block, &x, DType::BF16, &mut ex)?);
    ex.workspace().freeze(true);
    assert_eq!(bits(&run_legacy(&block, &x, DType::BF16, &mut ex)?), first);
    Ok(())
}

/// The checkpoint of a problem with its experts packed, under the same prefix.
fn packed(p: &Problem) -> Result<HashMap<String, Tensor>> {
    let mut tensors = checkpoint(p)?;
    tensors.retain(|name, _| !name.starts_with("mlp.experts."));
    tensors.insert("mlp.experts.gate_up_proj".into(), p.weights()?.w13().clone());
    tensors.insert("mlp.experts.down_proj".into(), p.weights()?.w2().clone());
    Ok(tensors)
}

#[test]
fn both_layouts_load_on_both_paths() -> Result<()> {
    let p = example(DType::BF16);
    let want = bits(&p.standard()?.forward(&p.rows()?)?);
    for tensors in [checkpoint(&p)?, packed(&p)?] {
        let vb = VarBuilder::from_tensors(tensors, DType::BF16, &Device::Cpu).pp("mlp");
        for (path, chosen) in [(MoePath::Fused, true), (MoePath::Legacy, false)] {
            let (layer, selection) =
                SparseLayer::load(path, &options(&p), vb.pp("gate"), vb.pp("experts"), None)?;
            assert_eq!(selection.is_some(), chosen);
            assert_eq!(layer.router().config(), &p.config);
            let mut out = Buffer::zeros(DType::BF16, &[p.tokens, p.hidden])?;
            let (x, mut seen) = (p.rows()?, 0);
            layer.forward_as_into(
                moe_layer::MoeForm::Modular,
                TensorView::new(&x)?.view()?,
                out.view_mut(),
                &mut |logits| {
                    seen += logits.elem_count();
                    Ok(())
                },
                &mut StepContext::default(),
                &mut Exec::cpu(),
            )?;
            assert_eq!((bits(&out.into_tensor()?), seen), (want.clone(), p.tokens * 6), "{path:?}");
        }
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let p = example(DType::F32);
    let router = |experts| Router::new(RouterConfig::new(experts, 2), RouterParams::default()).unwrap();
    let new = |experts: Vec<ExpertMlp>, count| {
        message(MoeMlp::new(p.gate_weight().unwrap(), router(count), experts, Activation::SwiGlu, 0))
    };
    let few = new(experts(&p)?[..5].to_vec(), 6);
    assert!(few.contains("chooses among 6 experts, but there are 5"), "{few}");
    let mut wrong = experts(&p)?;
    wrong[3].down = wrong[3].gate.clone();
    let wrong = new(wrong, 6);
    assert!(
        wrong.contains("down of expert 3 with dims [24, 16] of dtype f32, got [16, 24] of f32"),
        "{wrong}"
    );
    let mut mixed = experts(&p)?;
    mixed[1].up = mixed[1].up.to_dtype(DType::F16)?;
    let mixed = new(mixed, 6);
    assert!(mixed.contains("up of expert 1") && mixed.contains("of f16"), "{mixed}");
    let gate = new(experts(&p)?[..5].to_vec(), 5);
    assert!(gate.contains("router gate: expected weight [5, 24]"), "{gate}");
    let shared =
        problem((6, 23, 16, 5), p.config.clone(), Some((8, false)), DType::F32, 1).shared_experts()?;
    let shared = message(legacy(&p)?.with_shared_experts(shared.unwrap()));
    assert!(shared.contains("hidden size 24") && shared.contains("got 23"), "{shared}");

    let vb = VarBuilder::from_tensors(checkpoint(&p)?, DType::F32, &Device::Cpu).pp("mlp");
    let named = BlockOptions { backend: Some("cpu".into()), ..options(&p) };
    let backend = message(MoeMlp::load(&named, vb.pp("gate"), vb.pp("experts")));
    assert!(backend.contains("no backends") && backend.contains("cpu"), "{backend}");
    let mut tensors = checkpoint(&p)?;
    tensors.remove("mlp.experts.4.up_proj.weight");
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu).pp("mlp");
    let missing = message(MoeMlp::load(&options(&p), vb.pp("gate"), vb.pp("experts")));
    assert!(missing.contains("mlp.experts.4.up_proj.weight"), "{missing}");
    assert_eq!("legacy".parse(), Ok(MoePath::Legacy));
    assert!("fast".parse::<MoePath>().unwrap_err().contains("\"fast\"; expected fused or legacy"));
    Ok(())
}
