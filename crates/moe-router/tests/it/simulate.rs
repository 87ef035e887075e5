//! Tests of simulation strategies and of the caller's routing functions.

use std::collections::HashSet;
use std::sync::Arc;

use moe_router::candle::{DType, Device, Result, Tensor, bail};
use moe_router::{
    Exec, NO_EXPERT, RouteInput, RoutedExperts, Router, RouterConfig, RouterParams, RoutingFunction,
    RoutingMethod, RoutingStrategy, RowRng, Selection, StepContext, Strategies, View, ViewMut,
};

use crate::{bits, logits, message, rows, some_logits};

fn simulated(strategy: &str, seed: u64) -> RouterConfig {
    let selection = Selection::Simulated { strategy: strategy.to_owned(), seed };
    RouterConfig { selection, ..RouterConfig::new(16, 4) }
}

fn counts(strategy: &str) -> Result<Vec<usize>> {
    let router = Router::new(simulated(strategy, 1), RouterParams::default())?;
    // The logits are ignored, even if they are NaN.
    let routed = router.route(&Tensor::full(f32::NAN, (2000, 16), &Device::Cpu)?)?;
    let mut counts = vec![0; 16];
    for (ids, weights) in rows(&routed)? {
        assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 4, "{ids:?}");
        ids.iter().for_each(|&id| counts[id as usize] += 1);
        match strategy {
            "uniform_random" => assert_eq!(weights, [1.0; 4]),
            _ => {
                assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6, "{weights:?}");
                assert!(weights.iter().all(|&w| w >= 0.0) && weights[0] != weights[1]);
            }
        }
    }
    Ok(counts)
}

#[test]
fn uniform_random_is_even_and_normal_routing_is_not() -> Result<()> {
    let uniform = counts("uniform_random")?;
    assert!(uniform.iter().all(|n| (420..=580).contains(n)), "{uniform:?}");
    let normal = counts("normal_routing")?;
    assert!(normal[8] > 4 * normal[0].max(1) && normal[7] > 4 * normal[15].max(1), "{normal:?}");
    Ok(())
}

#[test]
fn simulation_repeats_by_seed_and_moves_with_the_step() -> Result<()> {
    let run = |seed, step| -> Result<_> {
        let router = Router::new(simulated("normal_routing", seed), RouterParams::default())?;
        let mut context = StepContext { step, ..StepContext::default() };
        bits(&router.route_step(
            &Tensor::zeros((8, 16), DType::F32, &Device::Cpu)?,
            None,
            0,
            &mut context,
            &mut Exec::cpu(),
        )?)
    };
    assert_eq!(run(1, 0)?, run(1, 0)?);
    assert_ne!(run(1, 0)?, run(2, 0)?);
    assert_ne!(run(1, 0)?, run(1, 1)?);
    Ok(())
}

#[test]
fn simulated_routing_can_be_replayed() -> Result<()> {
    let router = Router::new(simulated("normal_routing", 3), RouterParams::default())?;
    let input = Tensor::zeros((8, 16), DType::F32, &Device::Cpu)?;
    let mut context = StepContext { capture: Some(RoutedExperts::empty(8, 1, 4)?), ..StepContext::default() };
    let first = router.route_step(&input, None, 0, &mut context, &mut Exec::cpu())?;
    context.replay = context.capture.take().map(Arc::new);
    assert_eq!(bits(&router.route_step(&input, None, 0, &mut context, &mut Exec::cpu())?)?, bits(&first)?);
    Ok(())
}

#[test]
fn an_unknown_strategy_lists_the_known_ones() {
    let e = message(Router::new(simulated("zipf", 0), RouterParams::default()));
    let want = "unknown routing simulation strategy `zipf`; expected one of uniform_random, normal_routing";
    assert_eq!(e, want);
}

/// Always chooses the same expert in every slot. A strategy must not do this if there is more than one slot.
struct Stuck;

impl RoutingStrategy for Stuck {
    fn select(&self, _: &mut RowRng, _: u32, topk_ids: &mut [u32]) {
        topk_ids.fill(2);
    }
    fn weigh(&self, _: &mut RowRng, topk_weights: &mut [f32]) {
        topk_weights.fill(0.5);
    }
}

#[test]
fn strategies_can_be_registered_and_are_checked() -> Result<()> {
    let mut strategies = Strategies::default();
    strategies.register("stuck", Arc::new(Stuck));
    assert_eq!(strategies.names().collect::<Vec<_>>(), ["uniform_random", "normal_routing", "stuck"]);
    let params = RouterParams { strategies, ..Default::default() };
    let one = RouterConfig { top_k: 1, ..simulated("stuck", 0) };
    assert_eq!(one.routing_method(), RoutingMethod::Simulated);
    let input = Tensor::zeros((1, 16), DType::F32, &Device::Cpu)?;
    let routed = Router::new(one, params.clone())?.route(&input)?;
    assert_eq!(rows(&routed)?[0], (vec![2], vec![0.5]));
    let e = message(Router::new(simulated("stuck", 0), params)?.route(&input));
    assert_eq!(e, "routing simulation, row 0 of MoE layer 0: expert id 2 occurs twice");
    Ok(())
}

/// Chooses by the sign of the hidden state. The weight is 1 / (1 + id), or on request an invalid one.
struct BySign {
    bad_weight: bool,
}

impl RoutingFunction for BySign {
    fn name(&self) -> &str {
        "by_sign"
    }

    fn select(
        &self,
        config: &RouterConfig,
        input: &RouteInput<'_>,
        mut topk_ids: ViewMut<'_>,
        _: &mut Exec,
    ) -> Result<()> {
        let Some(hidden) = input.hidden else { bail!("by_sign needs hidden states") };
        let hidden = hidden.cpu::<f32>()?;
        for (ids, x) in topk_ids.cpu_mut::<u32>()?.chunks_exact_mut(config.top_k).zip(hidden) {
            ids.copy_from_slice(if *x < 0.0 { &[1, NO_EXPERT] } else { &[3, 0] });
        }
        Ok(())
    }

    fn weigh(
        &self,
        _: &RouterConfig,
        _: &RouteInput<'_>,
        topk_ids: View<'_>,
        mut topk_weights: ViewMut<'_>,
        _: &mut Exec,
    ) -> Result<()> {
        for (w, &id) in topk_weights.cpu_mut::<f32>()?.iter_mut().zip(topk_ids.cpu::<u32>()?) {
            *w = if self.bad_weight { f32::NAN } else { 1.0 / (1.0 + id as f32) };
        }
        Ok(())
    }
}

fn custom(bad_weight: bool, num_experts: usize) -> Result<Router> {
    let config = RouterConfig {
        selection: Selection::Custom,
        num_fused_shared_experts: 1,
        ..RouterConfig::new(num_experts, 2)
    };
    let params = RouterParams { function: Some(Arc::new(BySign { bad_weight })), ..Default::default() };
    Router::new(config, params)
}

#[test]
fn a_routing_function_sees_hidden_states_and_can_be_replayed() -> Result<()> {
    let router = custom(false, 4)?;
    let input = logits(&some_logits(3, 4, 1), 4)?;
    let hidden = Tensor::new(&[[-1f32], [1.0], [-2.0]], &Device::Cpu)?;
    let mut context = StepContext { capture: Some(RoutedExperts::empty(3, 1, 2)?), ..StepContext::default() };
    let first = router.route_step(&input, Some(&hidden), 0, &mut context, &mut Exec::cpu())?;
    assert_eq!(
        rows(&first)?,
        [
            (vec![1, NO_EXPERT, 4], vec![0.5, 0.0, 1.0]),
            (vec![3, 0, 4], vec![0.25, 1.0, 1.0]),
            (vec![1, NO_EXPERT, 4], vec![0.5, 0.0, 1.0]),
        ]
    );
    context.replay = context.capture.take().map(Arc::new);
    assert_eq!(
        bits(&router.route_step(&input, Some(&hidden), 0, &mut context, &mut Exec::cpu())?)?,
        bits(&first)?
    );
    // The function also weighs forced ids.
    context.replay =
        Some(Arc::new(RoutedExperts::from_ids(3, 1, 2, vec![0, 3, NO_EXPERT, NO_EXPERT, 2, 1])?));
    let forced = rows(&router.route_step(&input, Some(&hidden), 0, &mut context, &mut Exec::cpu())?)?;
    assert_eq!(forced[0], (vec![0, 3, 4], vec![1.0, 0.25, 1.0]));
    assert_eq!(forced[1], rows(&first)?[1]);
    assert_eq!(router.config().routing_method(), RoutingMethod::Custom);
    // Masked slots stay masked under force-balance.
    let mut context = StepContext { force_balance: Some(0), ..StepContext::default() };
    let balanced = rows(&router.route_step(&input, Some(&hidden), 0, &mut context, &mut Exec::cpu())?)?;
    assert_eq!((balanced[0].0[1], balanced[0].1[1]), (NO_EXPERT, 0.0));
    Ok(())
}

#[test]
fn what_a_routing_function_returns_is_checked() -> Result<()> {
    let hidden = Tensor::new(&[[1f32]], &Device::Cpu)?;
    let run = |router: Router, experts| {
        let input = logits(&some_logits(1, experts, 1), experts).unwrap();
        message(router.route_step(&input, Some(&hidden), 2, &mut StepContext::default(), &mut Exec::cpu()))
    };
    let e = run(custom(false, 3)?, 3);
    assert!(
        e.starts_with("routing function `by_sign`, row 0 of MoE layer 2: expert id 3 is out of range"),
        "{e}"
    );
    let bad = Tensor::new(&[[0f32, f32::NAN, 0.0, 0.0]], &Device::Cpu)?;
    let e = message(custom(false, 4)?.route_step(
        &bad,
        Some(&hidden),
        2,
        &mut StepContext::default(),
        &mut Exec::cpu(),
    ));
    assert_eq!(e, "router_logits, row 0 of MoE layer 2: the logit of expert 1 is NaN");
    let e = run(custom(true, 4)?, 4);
    assert_eq!(e, "routing function `by_sign`, row 0 of MoE layer 2: the weight of slot 0 is NaN");
    Ok(())
}
