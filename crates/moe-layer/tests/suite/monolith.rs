//! Monolithic experts: which steps the plan of a block gives to them, and which ops around them are fused.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use moe_kernels::plan::Gpu;
use moe_kernels::{RoutingMethod, add_into, rms_norm_into};
use moe_layer::candle::{Result, Tensor, bail};
use moe_layer::{
    Activation, Buffer, DType, Device, Exec, ExpertHeat, ExpertWeights, ExpertsShape, ExpertsSpec, Fusion,
    Gate, Machine, MoeForm, MonolithicCall, MonolithicExperts, MonolithicKernels, NoEp, PlanStep, PreNorm,
    Reason, RoutedExperts, Router, RouterConfig, SparseMoeBlock, Stage, StepContext, SublayerIo, TensorView,
    View, build_experts, select_backend,
};

use crate::reference::{Problem, example};
use crate::{bits, message};

/// Experts that contain their router. They are a whole block, for at most `most` rows.
struct Whole {
    block: SparseMoeBlock,
    shape: ExpertsShape,
    most: usize,
    calls: Arc<AtomicUsize>,
}

impl MonolithicExperts for Whole {
    fn name(&self) -> &str {
        "whole"
    }

    fn shape(&self) -> ExpertsShape {
        self.shape
    }

    fn fits(&self, call: &MonolithicCall, machine: &Machine) -> std::result::Result<(), Reason> {
        assert!(machine.gpu.is_none());
        if call.experts.tokens > self.most {
            return Err(Reason::Rows { least: 0, most: Some(self.most), got: call.experts.tokens });
        }
        Ok(())
    }

    fn apply(&self, gate: &Gate, map: Option<View>, io: SublayerIo, ex: &mut Exec) -> Result<()> {
        assert!(map.is_none() && gate.top_k == self.block.router().config().top_k);
        self.calls.fetch_add(1, Ordering::Relaxed);
        let sums = |x: View, ex: &mut Exec| -> Result<_> {
            let mut sums = ex.scratch(DType::F32, x.dims())?;
            self.block.forward_into(x, sums.view_mut(), &mut StepContext::default(), ex)?;
            Ok(sums)
        };
        match io {
            SublayerIo::Store { x, out } => self.block.forward_into(x, out, &mut StepContext::default(), ex),
            SublayerIo::Add { x, residual } => add_into(sums(x, ex)?.view(), residual, ex),
            SublayerIo::NormAdd { norm, residual } => {
                let mut x = ex.scratch(norm.weight.dtype(), residual.dims())?;
                rms_norm_into(residual.as_view(), norm.weight, norm.eps, x.view_mut(), ex)?;
                add_into(sums(x.view(), ex)?.view(), residual, ex)
            }
            SublayerIo::AddNorm { x, mut residual, norm, out } => {
                add_into(sums(x, ex)?.view(), residual.reborrow(), ex)?;
                rms_norm_into(residual.as_view(), norm.weight, norm.eps, out.floats("a mock")?, ex)
            }
        }
    }
}

/// Returns a block with such experts for at most `most` rows, and a counter of their runs.
fn with_whole(p: &Problem, most: usize) -> Result<(SparseMoeBlock, Arc<AtomicUsize>)> {
    let calls = Arc::default();
    let block = p.standard()?;
    let shape = p.standard_experts()?.shape();
    let whole = Whole { block, shape, most, calls: Arc::clone(&calls) };
    Ok((p.standard()?.with_monolithic(Box::new(whole))?, calls))
}

fn step(rows: usize) -> PlanStep {
    PlanStep::decode(rows)
}

#[test]
fn rows_that_fit_go_to_monolithic_experts_with_the_same_bits() -> Result<()> {
    let p = example(DType::F32);
    let x = p.rows()?;
    let want = p.standard()?.forward(&x)?;
    let (block, calls) = with_whole(&p, p.tokens)?;
    assert_eq!(bits(&block.forward(&x)?), bits(&want));
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    let (block, calls) = with_whole(&p, p.tokens - 1)?;
    assert_eq!(bits(&block.forward(&x)?), bits(&want));
    assert_eq!(calls.load(Ordering::Relaxed), 0);
    Ok(())
}

#[test]
fn a_step_that_sees_or_forces_routing_goes_to_modular_experts() -> Result<()> {
    let p = example(DType::F32);
    let (block, calls) = with_whole(&p, p.tokens)?;
    let asks: [fn(&mut StepContext, &Problem); 3] = [
        |step, p| step.capture = RoutedExperts::empty(p.tokens, 1, p.config.top_k).ok(),
        |step, p| step.heat = Some(ExpertHeat::new(1, p.config.num_experts)),
        |step, _| step.force_balance = Some(0),
    ];
    for ask in asks {
        let mut context = StepContext::default();
        ask(&mut context, &p);
        crate::run_in(&mut context, &block, &p.rows()?, DType::F32, &mut Exec::cpu())?;
    }
    assert_eq!(calls.load(Ordering::Relaxed), 0);
    Ok(())
}

#[test]
fn what_is_fused_around_the_experts_is_the_ops_one_by_one() -> Result<()> {
    let p = example(DType::F32);
    let (block, calls) = with_whole(&p, p.tokens)?;
    let x = p.rows()?;
    let weight = Tensor::ones(p.hidden, DType::F32, &Device::Cpu)?;
    let x = TensorView::new(&x)?;
    let weight = TensorView::new(&weight)?;
    let norm = PreNorm { weight: weight.view()?, eps: 1e-5 };
    let mut ex = Exec::cpu();
    let machine = Exec::cpu().machine();
    let context = &mut StepContext::default();
    let choose = |fusion| block.choose(&step(p.tokens), &[fusion], &machine);
    let dims = [p.tokens, p.hidden];
    let start = || Buffer::from_vec(vec![0.5f32; p.tokens * p.hidden], &dims);

    let mut added = start()?;
    let mut normed = start()?;
    let io =
        SublayerIo::AddNorm { x: x.view()?, residual: added.view_mut(), norm, out: normed.view_mut().into() };
    block.forward_as(choose(Fusion::AddNorm), io, &mut |_| Ok(()), context, &mut ex)?;
    let mut want = start()?;
    let mut sums = Buffer::zeros(DType::F32, &dims)?;
    p.standard()?.forward_into(x.view()?, sums.view_mut(), context, &mut ex)?;
    add_into(sums.view(), want.view_mut(), &mut ex)?;
    assert_eq!(added.view().cpu::<f32>()?, want.view().cpu::<f32>()?);

    let io = SublayerIo::NormAdd { norm, residual: added.view_mut() };
    block.forward_as(choose(Fusion::NormAdd), io, &mut |_| Ok(()), context, &mut ex)?;
    assert_ne!(added.view().cpu::<f32>()?, want.view().cpu::<f32>()?);
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    let modular = MoeForm::modular(Fusion::Nothing);
    let io = SublayerIo::Add { x: x.view()?, residual: added.view_mut() };
    let e = message(block.forward_as(modular, io, &mut |_| Ok(()), context, &mut ex));
    assert!(e.contains("modular experts have no form with addition"), "{e}");
    let io = SublayerIo::NormAdd { norm, residual: added.view_mut() };
    let e = message(block.forward_as(modular, io, &mut |_| Ok(()), context, &mut ex));
    assert!(e.contains("modular experts: expected normed rows"), "{e}");
    Ok(())
}

#[test]
fn experts_of_another_shape_are_refused_by_both_names() -> Result<()> {
    let p = example(DType::F32);
    let shape = ExpertsShape { num_local_experts: 3, ..p.standard_experts()?.shape() };
    let whole = Whole { block: p.standard()?, shape, most: 1, calls: Arc::default() };
    let e = message(p.standard()?.with_monolithic(Box::new(whole)));
    assert!(e.contains("monolithic experts `whole`") && e.contains("modular `cpu`"), "{e}");
    Ok(())
}

/// Returns four experts in bf16 with a gate of this dtype, as a rank with a Hopper GPU would hold them.
fn on_hopper(gate: DType) -> Result<SparseMoeBlock> {
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::BF16, &Device::Cpu);
    let gate = Tensor::zeros((4, 64), gate, &Device::Cpu)?;
    let weights = ExpertWeights::new(zeros(&[4, 128, 64])?, zeros(&[4, 64, 64])?, None, None)?;
    let spec = weights.spec(Activation::SwiGlu, 2);
    let experts = build_experts(&select_backend(&spec, None)?, weights.clone())?;
    let router = Router::new(RouterConfig::new(4, 2), Default::default())?;
    let mut block = SparseMoeBlock::new(gate, router, Box::new(NoEp::new()), experts, 0)?;
    let there = ExpertsSpec { gpu: Some(Gpu::HOPPER), routing: RoutingMethod::Default, ..spec };
    for experts in MonolithicKernels::all(&there, &weights, None) {
        block = block.with_monolithic(Box::new(experts))?;
    }
    Ok(block)
}

const FUSIONS: [Fusion; 3] = [Fusion::NormAdd, Fusion::AddNorm, Fusion::Nothing];

/// Returns the form that runs this step, and its kernels.
fn plan(block: &SparseMoeBlock, step: &PlanStep, machine: &Machine) -> (MoeForm, Vec<Stage>) {
    let form = block.choose(step, &FUSIONS, machine);
    (form, block.stages(form, step, &FUSIONS, machine))
}

#[test]
fn the_plan_of_a_gpu_is_made_without_one() -> Result<()> {
    let block = on_hopper(DType::BF16)?;
    let machine = Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() };
    let kernels = |rows, machine: &Machine| {
        let (form, stages) = plan(&block, &step(rows), machine);
        (form.fusion, stages[0].kernel.clone(), stages[0].computes.len())
    };
    let three = "gate_route + experts_tensor + combine".to_string();
    assert_eq!(kernels(1, &machine), (Fusion::NormAdd, "layer_stream".to_string(), 5));
    assert_eq!(kernels(4, &machine), (Fusion::NormAdd, "layer_stream".to_string(), 5));
    assert_eq!(kernels(5, &machine), (Fusion::Nothing, "gate_route".to_string(), 1));
    assert_eq!(kernels(16, &machine), (Fusion::AddNorm, three.clone(), 5));
    assert_eq!(kernels(63, &machine), (Fusion::AddNorm, three, 5));
    let prompt = "gate_route + experts_wide + combine".to_string();
    assert_eq!(kernels(64, &machine), (Fusion::AddNorm, prompt.clone(), 5));
    assert_eq!(kernels(65, &machine), (Fusion::AddNorm, prompt, 5));
    let invariant = Machine { batch_invariant: true, ..machine };
    let apart = "gate product, then route".to_string();
    assert_eq!(kernels(1, &invariant), (Fusion::Nothing, apart.clone(), 1));
    let (_, stages) = plan(&block, &step(16), &machine);
    let first = &stages[0].rejected[0];
    let why = stages[0].rejected[0].reason.to_string();
    assert_eq!(
        (first.kernel.as_str(), why.as_str()),
        ("layer_stream with norm and addition", "computes at most 4 rows at once, got 16",)
    );
    let observed = PlanStep { routed: Some("expert counts"), ..step(16) };
    let (form, stages) = plan(&block, &observed, &machine);
    assert_eq!((form, stages[0].kernel.as_str()), (MoeForm::modular(Fusion::Nothing), apart.as_str()));
    assert!(stages[0].rejected.iter().any(|r| r.reason.check() == "routing_context"), "{stages:?}");
    Ok(())
}

/// Launches that contain the router read the gate in the dtype of the rows.
#[test]
fn a_gate_in_f32_is_a_product_of_its_own() -> Result<()> {
    let block = on_hopper(DType::F32)?;
    let machine = Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() };
    let tensor = "gate_route + experts_tensor + combine";
    for (rows, with_router) in [(1, "layer_stream"), (5, "gate_route"), (16, tensor), (600, "gate_route")] {
        let (form, stages) = plan(&block, &step(rows), &machine);
        assert_eq!(form, MoeForm::modular(Fusion::Nothing), "{rows} rows");
        let router = &stages[0];
        assert_eq!(
            (router.computes, router.kernel.as_str(), router.note.as_deref()),
            (&["router"][..], "gate product, then route", Some("the gate in f32"))
        );
        let why = "does not compute a gate in f32, which this layer has";
        let whys: Vec<String> =
            router.rejected.iter().map(|r| format!("{}: {}", r.kernel, r.reason)).collect();
        for kernel in [with_router, "gate_route"] {
            assert!(whys.contains(&format!("{kernel}: {why}")), "{rows} rows: {whys:?}");
        }
    }
    let (_, stages) = plan(&block, &step(5), &Machine::default());
    assert_eq!(stages[0].note.as_deref(), Some("the gate in f32"));
    Ok(())
}

#[test]
fn a_backend_that_was_asked_for_stands_before_the_monolithic_ones() -> Result<()> {
    let p = example(DType::F32);
    let weights = p.weights()?;
    let spec = weights.spec(Activation::SwiGlu, 2);
    for experts in MonolithicKernels::all(&spec, &weights, Some("cpu")) {
        let call = MonolithicCall {
            experts: moe_kernels::plan::ExpertsCall {
                tokens: 1,
                top_k: 2,
                num_ids: 6,
                num_local: 6,
                hidden: 24,
                inter: 16,
                quant: None,
                passes: 1,
                epilogue: moe_kernels::plan::EpilogueCall::PLAIN,
            },
            dtype: DType::F32,
            gate: DType::F32,
            fusion: Fusion::Nothing,
        };
        let Err(reason) = experts.fits(&call, &Machine::default()) else { bail!("fits") };
        assert_eq!(reason.to_string(), "fits, but cpu was asked for");
    }
    Ok(())
}
