//! Tests of the step context: hash routing, replay, capture, heat, force-balance.

use std::collections::HashSet;
use std::sync::Arc;

use moe_router::candle::{Device, Result, Tensor};
use moe_router::{
    Exec, ExpertHeat, NO_EXPERT, RouteInput, RouteOutput, RoutedExperts, Router, RouterConfig, RouterParams,
    Scoring, Selection, StepContext, View, ViewMut,
};

use crate::{bits, definition, logits, message, router, rows, some_logits};

fn sigmoid_router() -> Result<Router> {
    let config = RouterConfig {
        scoring: Scoring::Sigmoid,
        renormalize: true,
        routed_scaling_factor: 2.0,
        ..RouterConfig::new(12, 3)
    };
    router(config, None)
}

fn replay(tokens: usize, layers: usize, ids: Vec<u32>) -> Result<StepContext> {
    let k = ids.len() / (tokens * layers);
    let replay = Some(Arc::new(RoutedExperts::from_ids(tokens, layers, k, ids)?));
    Ok(StepContext { replay, ..StepContext::default() })
}

#[test]
fn replay_forces_ids_and_weighs_them_from_our_logits() -> Result<()> {
    let kinds = [
        RouterConfig { renormalize: true, ..RouterConfig::new(12, 3) },
        RouterConfig {
            scoring: Scoring::SqrtSoftplus,
            routed_scaling_factor: 1.5,
            ..RouterConfig::new(12, 3)
        },
        RouterConfig { selection: Selection::RawLogits, ..RouterConfig::new(12, 3) },
        RouterConfig {
            scoring: Scoring::Sigmoid,
            selection: Selection::Grouped { num_expert_group: 4, topk_group: 1 },
            ..RouterConfig::new(12, 3)
        },
    ];
    let input = some_logits(2, 12, 4);
    for config in kinds {
        // The forced ids are neither in order of score nor within one group, and they are used as they are.
        let mut context = replay(2, 1, vec![11, 0, 5, NO_EXPERT, NO_EXPERT, NO_EXPERT])?;
        let router = router(config.clone(), None)?;
        let forced = router.route_step(&logits(&input, 12)?, None, 0, &mut context, &mut Exec::cpu())?;
        let free = router.route(&logits(&input, 12)?)?;
        let got = &rows(&forced)?[0];
        assert_eq!(got.0, [11, 0, 5]);
        definition::assert_weights(&got.1, &definition::weights_at(&config, &input[0], &[11, 0, 5]));
        assert_eq!(bits(&forced)?[1], bits(&free)?[1], "a row without forced ids routes freely");
    }
    Ok(())
}

#[test]
fn masked_slots_of_a_replay_stay_masked() -> Result<()> {
    let mut context = replay(1, 1, vec![4, NO_EXPERT, 2])?;
    let routed = sigmoid_router()?.route_step(
        &logits(&some_logits(1, 12, 1), 12)?,
        None,
        0,
        &mut context,
        &mut Exec::cpu(),
    )?;
    let (ids, weights) = rows(&routed)?.remove(0);
    assert_eq!(ids, [4, NO_EXPERT, 2]);
    assert_eq!(weights[1], 0.0);
    assert!((weights[0] + weights[2] - 2.0).abs() < 1e-6, "the others are renormalised: {weights:?}");
    Ok(())
}

#[test]
fn masked_slots_take_no_share_of_a_softmax_over_the_chosen() -> Result<()> {
    let config = RouterConfig { selection: Selection::RawLogits, ..RouterConfig::new(3, 2) };
    let mut context = replay(1, 1, vec![NO_EXPERT, 2])?;
    let routed = router(config, None)?.route_step(
        &logits(&[vec![0.5, 0.1, 0.2]], 3)?,
        None,
        0,
        &mut context,
        &mut Exec::cpu(),
    )?;
    assert_eq!(rows(&routed)?, [(vec![NO_EXPERT, 2], vec![0.0, 1.0])]);
    Ok(())
}

#[test]
fn a_capture_replays_bit_for_bit_layer_by_layer() -> Result<()> {
    let router = sigmoid_router()?;
    let inputs = [some_logits(9, 12, 1), some_logits(9, 12, 2)];
    let mut context = StepContext {
        capture: Some(RoutedExperts::empty(9, 2, 3)?),
        heat: Some(ExpertHeat::new(2, 12)),
        ..StepContext::default()
    };
    let mut first = Vec::new();
    for (layer, input) in inputs.iter().enumerate() {
        first.push(bits(&router.route_step(
            &logits(input, 12)?,
            None,
            layer,
            &mut context,
            &mut Exec::cpu(),
        )?)?);
    }
    let capture = context.capture.take().expect("capture");
    let heat = context.heat.take().expect("heat");
    for (layer, routed) in first.iter().enumerate() {
        for (t, (ids, _)) in routed.iter().enumerate() {
            assert_eq!(capture.get(t, layer)?, ids);
        }
        let expert = |e: u32| routed.iter().filter(|(ids, _)| ids.contains(&e)).count() as u64;
        assert_eq!(heat.layer(layer), (0..12).map(expert).collect::<Vec<_>>());
        assert_eq!(heat.layer(layer).iter().sum::<u64>(), 27);
    }
    context.replay = Some(Arc::new(capture));
    for (layer, input) in inputs.iter().enumerate() {
        let again = router.route_step(&logits(input, 12)?, None, layer, &mut context, &mut Exec::cpu())?;
        assert_eq!(bits(&again)?, first[layer]);
    }
    Ok(())
}

#[test]
fn fused_shared_slots_are_neither_captured_nor_replayed() -> Result<()> {
    let config = RouterConfig { num_fused_shared_experts: 2, ..RouterConfig::new(5, 2) };
    let mut context = replay(1, 1, vec![3, 1])?;
    context.capture = Some(RoutedExperts::empty(1, 1, 2)?);
    context.heat = Some(ExpertHeat::new(1, 5));
    let routed = router(config, None)?.route_step(
        &logits(&some_logits(1, 5, 1), 5)?,
        None,
        0,
        &mut context,
        &mut Exec::cpu(),
    )?;
    assert_eq!(rows(&routed)?[0].0, [3, 1, 5, 6]);
    assert_eq!(context.capture.expect("capture").ids(), [3, 1]);
    assert_eq!(context.heat.expect("heat").layer(0), [0, 1, 0, 1, 0]);
    Ok(())
}

#[test]
fn pieces_of_a_step_equal_the_whole() -> Result<()> {
    let router = sigmoid_router()?;
    let input = some_logits(7, 12, 8).concat();
    let whole = |context: &mut StepContext| -> Result<(Vec<u32>, Vec<f32>)> {
        pieces(&router, &input, &[7], context)
    };
    let mut context = StepContext {
        force_balance: Some(3),
        capture: Some(RoutedExperts::empty(7, 2, 3)?),
        ..StepContext::default()
    };
    let balanced = whole(&mut context)?;
    assert_eq!(pieces(&router, &input, &[2, 0, 5], &mut context)?, balanced);
    let capture = context.capture.take().expect("capture");
    assert_eq!((0..7).flat_map(|t| capture.get(t, 1).unwrap().to_vec()).collect::<Vec<_>>(), balanced.0);
    let mut context = StepContext { replay: Some(Arc::new(capture)), ..StepContext::default() };
    assert_eq!(pieces(&router, &input, &[4, 3], &mut context)?, whole(&mut context)?);
    Ok(())
}

/// Routes [7, 12] logits of layer 1 in pieces.
fn pieces(
    router: &Router,
    input: &[f32],
    sizes: &[usize],
    context: &mut StepContext,
) -> Result<(Vec<u32>, Vec<f32>)> {
    let mut ids = vec![0u32; 21];
    let mut weights = vec![0f32; 21];
    let mut first_row = 0;
    for &n in sizes {
        let range = first_row * 3..(first_row + n) * 3;
        let rows = &input[first_row * 12..(first_row + n) * 12];
        let input = RouteInput { first_row, ..RouteInput::new(View::new(rows, &[n, 12])?, 1) };
        let out = RouteOutput {
            topk_ids: ViewMut::new(&mut ids[range.clone()], &[n, 3])?,
            topk_weights: ViewMut::new(&mut weights[range], &[n, 3])?,
            zero_expert_weights: None,
        };
        router.route_into(&input, out, context, &mut Exec::cpu())?;
        first_row += n;
    }
    Ok((ids, weights))
}

#[test]
fn force_balance_permutes_ids_and_keeps_weights() -> Result<()> {
    let router = sigmoid_router()?;
    let input = logits(&some_logits(600, 12, 2), 12)?;
    let free = rows(&router.route(&input)?)?;
    let balanced = |seed, step, layer| -> Result<Vec<(Vec<u32>, Vec<f32>)>> {
        let mut context = StepContext { force_balance: Some(seed), step, ..StepContext::default() };
        rows(&router.route_step(&input, None, layer, &mut context, &mut Exec::cpu())?)
    };
    let first = balanced(1, 0, 0)?;
    let mut counts = [0usize; 12];
    for ((ids, weights), (_, kept)) in first.iter().zip(&free) {
        assert_eq!(weights, kept);
        assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 3);
        ids.iter().for_each(|&id| counts[id as usize] += 1);
    }
    // 1,800 slots are filled with 12 experts.
    assert!(counts.iter().all(|n| (110..=190).contains(n)), "{counts:?}");
    assert_eq!(balanced(1, 0, 0)?, first);
    for other in [balanced(2, 0, 0)?, balanced(1, 1, 0)?, balanced(1, 0, 1)?] {
        assert_ne!(other, first);
    }
    // The ids are the same on every machine and in every version.
    assert_eq!(first[0].0, FIRST_BALANCED);
    Ok(())
}

const FIRST_BALANCED: [u32; 3] = [9, 2, 10];

fn hash_router() -> Result<Router> {
    let config = RouterConfig {
        scoring: Scoring::SqrtSoftplus,
        selection: Selection::Hash { vocab_size: 3 },
        renormalize: true,
        routed_scaling_factor: 1.5,
        ..RouterConfig::new(12, 2)
    };
    let table = Tensor::new(&[[3i64, 1], [11, 0], [5, 6]], &Device::Cpu)?;
    Router::new(config, RouterParams { hash_table: Some(table), ..Default::default() })
}

#[test]
fn hash_routing_looks_ids_up_and_weighs_them() -> Result<()> {
    let input = some_logits(3, 12, 7);
    let mut context = StepContext { token_ids: Some(Arc::from([2, 0, 2])), ..StepContext::default() };
    let router = hash_router()?;
    let routed = rows(&router.route_step(&logits(&input, 12)?, None, 0, &mut context, &mut Exec::cpu())?)?;
    for (row, (got, want)) in input.iter().zip(routed.iter().zip([[5, 6], [3, 1], [5, 6]])) {
        assert_eq!(got.0, want, "in the order of the table");
        definition::assert_weights(&got.1, &definition::weights_at(router.config(), row, &want));
    }
    Ok(())
}

#[test]
fn hash_routing_of_a_piece_uses_the_tokens_of_the_piece() -> Result<()> {
    let data = [0f32; 12];
    let mut ids = [0u32; 2];
    let mut weights = [0f32; 2];
    let input = RouteInput { first_row: 2, ..RouteInput::new(View::new(&data, &[1, 12])?, 0) };
    let out = RouteOutput {
        topk_ids: ViewMut::new(&mut ids, &[1, 2])?,
        topk_weights: ViewMut::new(&mut weights, &[1, 2])?,
        zero_expert_weights: None,
    };
    let mut context = StepContext { token_ids: Some(Arc::from([0, 0, 1])), ..StepContext::default() };
    hash_router()?.route_into(&input, out, &mut context, &mut Exec::cpu())?;
    assert_eq!(ids, [11, 0]);
    Ok(())
}

#[test]
fn hash_routing_refuses_rows_without_a_valid_token() -> Result<()> {
    let input = logits(&some_logits(2, 12, 7), 12)?;
    let run = |tokens: Option<Vec<u32>>| {
        let mut context = StepContext { token_ids: tokens.map(Arc::from), ..StepContext::default() };
        message(hash_router().unwrap().route_step(&input, None, 4, &mut context, &mut Exec::cpu()))
    };
    assert_eq!(run(None), "hash routing, row 0 of MoE layer 4: the step carries no token id for this row");
    assert_eq!(
        run(Some(vec![1])),
        "hash routing, row 1 of MoE layer 4: the step carries no token id for this row"
    );
    let e = "hash routing, row 1 of MoE layer 4: token id 3 is outside of the vocabulary of 3";
    assert_eq!(run(Some(vec![0, 3])), e);
    Ok(())
}

#[test]
fn bad_replays_name_row_layer_and_id() -> Result<()> {
    let input = logits(&some_logits(2, 12, 7), 12)?;
    let run = |ids: Vec<u32>, layer: usize| {
        let mut context = replay(2, 2, ids).unwrap();
        message(sigmoid_router().unwrap().route_step(&input, None, layer, &mut context, &mut Exec::cpu()))
    };
    let free = NO_EXPERT;
    let ids = vec![0, 1, 2, free, free, free, 0, 1, 2, 4, 12, 5];
    let e = run(ids.clone(), 1);
    let want =
        "replayed routing, row 1 of MoE layer 1: expert id 12 is out of range, the router chooses among 12";
    assert!(e.starts_with(want), "{e}");
    let e = run(vec![7, 1, 7, 0, 1, 2, 0, 1, 2, 0, 1, 2], 0);
    assert_eq!(e, "replayed routing, row 0 of MoE layer 0: expert id 7 occurs twice");
    let e = run(ids, 2);
    assert!(e.contains("the replay holds [2, 2, 3] ids, too few for rows 0..2 of MoE layer 2"), "{e}");
    Ok(())
}

#[test]
fn a_step_context_that_does_not_fit_is_refused() -> Result<()> {
    let router = sigmoid_router()?;
    let input = logits(&some_logits(2, 12, 7), 12)?;
    let run = |set: &dyn Fn(&mut StepContext)| {
        let mut context = StepContext::default();
        set(&mut context);
        message(router.route_step(&input, None, 0, &mut context, &mut Exec::cpu()))
    };
    let e = run(&|context| context.capture = RoutedExperts::empty(1, 1, 3).ok());
    assert!(e.contains("the capture holds [1, 1, 3] ids, too few for rows 0..2"), "{e}");
    let e = run(&|context| context.capture = RoutedExperts::empty(2, 1, 2).ok());
    assert!(e.contains("of MoE layer 0 with top-3"), "{e}");
    let e = run(&|context| context.heat = Some(ExpertHeat::new(1, 8)));
    assert!(e.contains("must count 12 experts in MoE layer 0, it counts 8 there and has 1 layers"), "{e}");
    let e = run(&|context| {
        context.force_balance = Some(0);
        context.replay = RoutedExperts::empty(2, 1, 3).ok().map(Arc::new);
    });
    assert!(e.contains("force_balance and replay both dictate the experts"), "{e}");
    Ok(())
}

#[test]
fn an_error_records_nothing() -> Result<()> {
    let mut input = some_logits(3, 12, 7);
    input[2][5] = f32::NAN;
    let mut context = StepContext {
        capture: Some(RoutedExperts::empty(3, 1, 3)?),
        heat: Some(ExpertHeat::new(1, 12)),
        ..StepContext::default()
    };
    let e =
        message(sigmoid_router()?.route_step(&logits(&input, 12)?, None, 0, &mut context, &mut Exec::cpu()));
    assert_eq!(e, "router_logits, row 2 of MoE layer 0: the logit of expert 5 is NaN");
    assert!(context.capture.expect("capture").ids().iter().all(|&id| id == NO_EXPERT));
    assert_eq!(context.heat.expect("heat").layer(0).iter().sum::<u64>(), 0);
    Ok(())
}
