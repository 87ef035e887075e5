//! Tests of gate and routing in one call.

use moe_router::candle::{DType, Device, Result, Tensor};
use moe_router::{
    Exec, GateInput, RouteOutput, Router, RouterConfig, RouterParams, Scoring, Selection, StepContext,
    TensorView, ViewMut,
};

use crate::{bits, logits, message, rows, some_logits};

fn router(num_experts: usize) -> Result<Router> {
    let config = RouterConfig { renormalize: true, ..RouterConfig::new(num_experts, 2) };
    Router::new(config, RouterParams::default())
}

#[test]
fn the_gate_is_a_product_with_f32_logits() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        // The values are powers of two and small integers, so every dtype and every order of summation is exact.
        let values = |n: usize, m: usize| (0..n * m).map(|i| ((i * 7) % 11) as f32 - 5.0).collect::<Vec<_>>();
        let hidden = Tensor::from_vec(values(3, 8), (3, 8), &Device::Cpu)?.to_dtype(dtype)?;
        let weight = (Tensor::from_vec(values(5, 8), (5, 8), &Device::Cpu)? / 64.)?.to_dtype(dtype)?;
        let bias = Tensor::new(&[0f32, 0.5, -0.25, 0.0, 1.0], &Device::Cpu)?.to_dtype(dtype)?;
        let f32 = |t: &Tensor| t.to_dtype(DType::F32);
        let want = f32(&hidden)?.matmul(&f32(&weight)?.t()?)?.broadcast_add(&f32(&bias)?)?;

        let mut ex = Exec::cpu();
        let routed = router(5)?.gate_and_route(
            &hidden,
            &weight,
            Some(&bias),
            0,
            &mut StepContext::default(),
            &mut ex,
        )?;
        assert_eq!(bits(&routed)?, bits(&router(5)?.route(&want)?)?, "{dtype:?}");
        // The bias changes the result.
        let unbiased =
            router(5)?.gate_and_route(&hidden, &weight, None, 0, &mut StepContext::default(), &mut ex)?;
        assert_ne!(bits(&unbiased)?, bits(&routed)?);
    }
    Ok(())
}

/// Rows are widened for a gate in f32, so no digit of it is lost.
#[test]
fn a_gate_in_f32_keeps_its_digits() -> Result<()> {
    for dtype in [DType::BF16, DType::F16] {
        let hidden = logits(&some_logits(12, 8, 1), 8)?.to_dtype(dtype)?;
        // The rows of two experts are equal in 16 bits. Digits after them decide which one has the larger logit.
        let coarse = logits(&some_logits(1, 8, 2), 8)?.to_dtype(dtype)?.to_dtype(DType::F32)?;
        let weight = Tensor::cat(&[&(&coarse * (1.0 + 1e-4))?, &coarse], 0)?;
        let router = Router::new(RouterConfig::new(2, 1), RouterParams::default())?;
        let chosen = |weight: &Tensor| -> Result<Vec<u32>> {
            let mut step = StepContext::default();
            let routed = router.gate_and_route(&hidden, weight, None, 0, &mut step, &mut Exec::cpu())?;
            routed.topk_ids.flatten_all()?.to_vec1()
        };
        let logit = hidden.to_dtype(DType::F32)?.matmul(&coarse.t()?)?.flatten_all()?.to_vec1::<f32>()?;
        let larger: Vec<u32> = logit.iter().map(|logit| u32::from(*logit < 0.0)).collect();
        assert!(larger.contains(&0) && larger.contains(&1), "{logit:?}");
        assert_eq!(chosen(&weight)?, larger, "{dtype:?}");
        assert_eq!(chosen(&weight.to_dtype(dtype)?)?, [0; 12], "{dtype:?}: equal experts");
    }
    Ok(())
}

#[test]
fn logits_are_handed_out_on_request() -> Result<()> {
    let hidden = logits(&some_logits(4, 8, 1), 8)?;
    let weight = logits(&some_logits(5, 8, 2), 8)?;
    let router = router(5)?;
    let mut ex = Exec::cpu();
    let mut ids = [0u32; 8];
    let mut weights = [0f32; 8];
    let mut out = [f32::NAN; 20];
    let h = TensorView::new(&hidden)?;
    let w = TensorView::new(&weight)?;
    let output = RouteOutput {
        topk_ids: ViewMut::new(&mut ids, &[4, 2])?,
        topk_weights: ViewMut::new(&mut weights, &[4, 2])?,
        zero_expert_weights: None,
    };
    let input = GateInput::new(h.view()?, w.view()?, 0);
    router.gate_and_route_into(
        &input,
        Some(ViewMut::new(&mut out, &[4, 5])?),
        output,
        &mut StepContext::default(),
        &mut ex,
    )?;
    let exact = hidden.matmul(&weight.t()?)?.flatten_all()?.to_vec1::<f32>()?;
    assert!(out.iter().zip(&exact).all(|(a, b)| (a - b).abs() < 1e-4), "{out:?} {exact:?}");
    let routed = router.route(&Tensor::from_vec(out.to_vec(), (4, 5), &Device::Cpu)?)?;
    assert_eq!(rows(&routed)?.into_iter().flat_map(|(ids, _)| ids).collect::<Vec<_>>(), ids);
    Ok(())
}

#[test]
fn a_gate_that_does_not_fit_is_refused() -> Result<()> {
    let tensor = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &Device::Cpu);
    let hidden = tensor(&[2, 8], DType::F32)?;
    let run = |weight: Tensor, bias: Option<Tensor>| {
        message(router(5).unwrap().gate_and_route(
            &hidden,
            &weight,
            bias.as_ref(),
            0,
            &mut StepContext::default(),
            &mut Exec::cpu(),
        ))
    };
    let e = run(tensor(&[4, 8], DType::F32)?, None);
    assert_eq!(e, "gate_and_route: expected gate weight with dims [5, 8], got [4, 8]");
    let e = run(tensor(&[5, 8], DType::BF16)?, None);
    assert!(e.contains("expected gate weight of dtype f32, got bf16"), "{e}");
    let e = run(tensor(&[5, 8], DType::F32)?, Some(tensor(&[4], DType::F32)?));
    assert!(e.contains("[5]") && e.contains("[4]"), "{e}");
    Ok(())
}

#[test]
fn launches_with_a_router_know_the_best_of_groups() -> Result<()> {
    let grouped = |experts, num_expert_group, topk_group| RouterConfig {
        scoring: Scoring::Sigmoid,
        selection: Selection::Grouped { num_expert_group, topk_group },
        correction_bias: true,
        renormalize: true,
        ..RouterConfig::new(experts, 4)
    };
    let biased = |config: RouterConfig| {
        let bias: Vec<f32> = (0..config.num_experts).map(|e| ((e * 5) % 7) as f32 / 9.0).collect();
        crate::router(config, Some(&bias))
    };
    for (experts, groups, kept, limiting) in
        [(64, 8, 4, Some((8, 4))), (64, 1, 1, None), (64, 8, 8, None), (64, 32, 2, Some((32, 2)))]
    {
        let config = grouped(experts, groups, kept);
        assert_eq!(config.limiting_groups(), limiting);
        let router = biased(config.clone())?;
        assert_eq!(router.kernel_rule(), Ok(()), "{groups} groups");
        if limiting.is_none() {
            // A launch can do this: choose the best K of all.
            let plain = biased(RouterConfig { selection: Selection::TopK, ..config })?;
            let logits = logits(&some_logits(9, experts, 3), experts)?;
            assert_eq!(bits(&router.route(&logits)?)?, bits(&plain.route(&logits)?)?);
        }
    }
    let refused = |config| biased(config).unwrap().kernel_rule().unwrap_err().to_string();
    let text = refused(grouped(132, 66, 3));
    assert_eq!(text, "takes a num_expert_group of at most 32, got 66");
    let zeros = RouterConfig { selection: Selection::TopK, num_zero_experts: 2, ..grouped(30, 1, 1) };
    let bias = vec![0.0; 32];
    assert!(crate::router(zeros, Some(&bias))?.kernel_rule().is_err());
    Ok(())
}
