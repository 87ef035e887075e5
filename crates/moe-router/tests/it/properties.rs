//! Compares every scored method with its definition, and tests the invariants of a row's bits.

use moe_router::candle::Result;
use moe_router::{Exec, RouterConfig, Scoring, Selection, StepContext};
use proptest::prelude::*;

use crate::{absent, bits, definition, logits, router, rows, some_logits};

/// A configuration, its bias, and rows of logits.
#[derive(Clone, Debug)]
struct Case {
    config: RouterConfig,
    bias: Option<Vec<f32>>,
    rows: Vec<Vec<f32>>,
}

/// Generates logits with many ties (on a coarse grid), logits without ties, and masked experts.
fn row(experts: usize) -> impl Strategy<Value = Vec<f32>> {
    let grid = (-12i32..=12).prop_map(|n| n as f32 * 0.5);
    let fine = (-8000i32..8000).prop_map(|n| n as f32 / 1000.0);
    let masked = prop_oneof![3 => fine.clone(), 1 => Just(f32::NEG_INFINITY)];
    let finite_first = |mut row: Vec<f32>| {
        row[0] = if row[0].is_finite() { row[0] } else { 0.0 };
        row
    };
    prop_oneof![
        prop::collection::vec(grid, experts),
        prop::collection::vec(fine, experts),
        prop::collection::vec(masked, experts).prop_map(finite_first),
    ]
}

fn selection() -> impl Strategy<Value = (Selection, usize)> {
    let plain = (1usize..40).prop_map(|experts| (Selection::TopK, experts));
    let raw = (1usize..40).prop_map(|experts| (Selection::RawLogits, experts));
    let grouped = (1usize..7, 2usize..7, 0usize..6).prop_map(|(groups, size, kept)| {
        let selection = Selection::Grouped { num_expert_group: groups, topk_group: kept % groups + 1 };
        (selection, groups * size)
    });
    prop_oneof![plain, raw, grouped]
}

fn case() -> impl Strategy<Value = Case> {
    let scoring = prop_oneof![Just(Scoring::Softmax), Just(Scoring::Sigmoid), Just(Scoring::SqrtSoftplus)];
    let numbers = (prop_oneof![Just(1.0f32), Just(2.5)], prop_oneof![Just(None), Just(Some(30.0f32))]);
    let flags = (any::<bool>(), any::<bool>(), 0usize..3);
    (selection(), 0usize..64, scoring, numbers, flags, 0usize..5)
        .prop_flat_map(
            |((selection, experts), k, scoring, (factor, cap), (biased, renormalize, shared), tokens)| {
                let left = match selection {
                    Selection::Grouped { num_expert_group, topk_group } => {
                        experts / num_expert_group * topk_group
                    }
                    _ => experts,
                };
                let config = RouterConfig {
                    scoring,
                    correction_bias: biased && selection != Selection::RawLogits,
                    selection,
                    renormalize,
                    routed_scaling_factor: factor,
                    softcapping: cap,
                    num_fused_shared_experts: shared,
                    fused_shared_weight: 0.75,
                    ..RouterConfig::new(experts, k % left + 1)
                };
                let bias = prop::collection::vec((-8i32..=8).prop_map(|n| n as f32 * 0.125), experts);
                (Just(config), bias, prop::collection::vec(row(experts), tokens))
            },
        )
        .prop_map(|(config, bias, rows)| {
            let bias = config.correction_bias.then_some(bias);
            Case { config, bias, rows }
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn routing_is_its_definition(case in case()) {
        let Case { config, bias, rows: input } = case;
        let experts = config.num_experts;
        let k = config.top_k;
        let routed = router(config.clone(), bias.as_deref()).unwrap();
        let routed = routed.route(&logits(&input, experts).unwrap()).unwrap();
        prop_assert_eq!(routed.topk_ids.dims(), [input.len(), config.num_slots()]);
        prop_assert!(routed.zero_expert_weights.is_none());
        for (row, (ids, weights)) in input.iter().zip(rows(&routed).unwrap()) {
            let want = definition::route(&config, bias.as_deref(), row);
            let shared: Vec<u32> = (experts as u32..).take(config.num_fused_shared_experts).collect();
            prop_assert_eq!(&ids[k..], &shared);
            prop_assert!(weights[k..].iter().all(|&w| w == 0.75));
            if want.clear {
                prop_assert_eq!(&ids[..k], &want.ids);
                definition::assert_weights(&weights[..k], &want.weights);
            }
            // Even in unclear cases ids are distinct experts.
            let mut sorted = ids.clone();
            sorted.sort_unstable();
            sorted.dedup();
            prop_assert_eq!(sorted.len(), ids.len());
            prop_assert!(ids.iter().all(|&id| !absent(id)));
        }
    }
}

#[test]
fn the_definition_is_rarely_unclear() {
    // This checks that the margin of the property above does not exclude all cases.
    let config = RouterConfig {
        scoring: Scoring::Sigmoid,
        selection: Selection::Grouped { num_expert_group: 8, topk_group: 4 },
        ..RouterConfig::new(64, 6)
    };
    let rows = some_logits(500, 64, 1);
    let clear = rows.iter().filter(|row| definition::route(&config, None, row).clear).count();
    assert!(clear > 480, "{clear} of 500 rows are clear");
}

#[test]
fn exact_ties_go_to_the_lower_id_in_every_method() -> Result<()> {
    let selections =
        [Selection::TopK, Selection::RawLogits, Selection::Grouped { num_expert_group: 4, topk_group: 2 }];
    for selection in selections {
        for scoring in [Scoring::Softmax, Scoring::Sigmoid, Scoring::SqrtSoftplus] {
            let config = RouterConfig { selection: selection.clone(), scoring, ..RouterConfig::new(8, 3) };
            let routed = router(config, None)?.route(&logits(&[vec![0.3; 8]], 8)?)?;
            assert_eq!(rows(&routed)?[0].0, [0, 1, 2], "{selection:?} {scoring:?}");
        }
    }
    Ok(())
}

/// Returns one configuration of each kind, for tests of the independence of rows.
fn kinds() -> Vec<(RouterConfig, Option<Vec<f32>>)> {
    let experts = 96;
    let bias: Vec<f32> = (0..experts).map(|i| (i % 7) as f32 * 0.03).collect();
    let new = RouterConfig::new(experts, 6);
    let grouped = Selection::Grouped { num_expert_group: 8, topk_group: 3 };
    let v3 = RouterConfig {
        scoring: Scoring::Sigmoid,
        selection: grouped.clone(),
        correction_bias: true,
        renormalize: true,
        routed_scaling_factor: 2.5,
        num_fused_shared_experts: 1,
        ..new.clone()
    };
    vec![
        (RouterConfig { renormalize: true, softcapping: Some(20.0), ..new.clone() }, None),
        (RouterConfig { selection: grouped, scoring: Scoring::SqrtSoftplus, ..new.clone() }, None),
        (RouterConfig { selection: Selection::RawLogits, ..new }, None),
        (v3, Some(bias)),
    ]
}

#[test]
fn a_rows_bits_depend_on_nothing_but_the_row() -> Result<()> {
    // There are enough rows for the parallel path, divided unevenly over three threads.
    let input = some_logits(1000, 96, 3);
    for (config, bias) in kinds() {
        let router = router(config, bias.as_deref())?;
        let one = Exec::cpu().with_threads(1)?;
        let all = bits(&router.route_step(
            &logits(&input, 96)?,
            None,
            0,
            &mut StepContext::default(),
            &mut one.clone(),
        )?)?;
        let mut three = Exec::cpu().with_threads(3)?;
        assert_eq!(
            bits(&router.route_step(
                &logits(&input, 96)?,
                None,
                0,
                &mut StepContext::default(),
                &mut three
            )?)?,
            all
        );
        for t in [0, 333, 334, 999] {
            let alone = bits(&router.route(&logits(&input[t..=t], 96)?)?)?;
            assert_eq!(alone[0], all[t], "row {t} of {router:?}");
        }
    }
    Ok(())
}

#[test]
fn no_tokens_give_empty_outputs() -> Result<()> {
    for (config, bias) in kinds() {
        let slots = config.num_slots();
        let routed = router(config, bias.as_deref())?.route(&logits(&[], 96)?)?;
        assert_eq!((routed.topk_ids.dims(), routed.topk_weights.dims()), (&[0, slots][..], &[0, slots][..]));
    }
    Ok(())
}

#[test]
fn weights_are_renormalised_before_scaling_and_unbiased() -> Result<()> {
    let config = RouterConfig {
        scoring: Scoring::Sigmoid,
        correction_bias: true,
        renormalize: true,
        routed_scaling_factor: 2.5,
        ..RouterConfig::new(4, 2)
    };
    let bias = [10.0, 0.0, 0.0, 5.0];
    let routed = router(config.clone(), Some(&bias))?.route(&logits(&[vec![0.0, 9.0, 9.0, 0.0]], 4)?)?;
    // The bias decides the selection. Equal unbiased scores get equal parts of the factor.
    assert_eq!(rows(&routed)?[0], (vec![0, 3], vec![1.25, 1.25]));
    let plain = RouterConfig { renormalize: false, ..config };
    let routed = router(plain, Some(&bias))?.route(&logits(&[vec![0.0, 9.0, 9.0, 0.0]], 4)?)?;
    assert_eq!(rows(&routed)?[0].1, [1.25, 1.25]);
    Ok(())
}

#[test]
fn one_group_is_no_grouping() -> Result<()> {
    let input = logits(&some_logits(50, 32, 9), 32)?;
    let bias: Vec<f32> = (0..32).map(|i| (i % 5) as f32 * 0.1).collect();
    for bias in [None, Some(&bias[..])] {
        let plain = RouterConfig {
            scoring: Scoring::Sigmoid,
            correction_bias: bias.is_some(),
            renormalize: true,
            routed_scaling_factor: 1.1,
            ..RouterConfig::new(32, 4)
        };
        let selection = Selection::Grouped { num_expert_group: 1, topk_group: 1 };
        let grouped = RouterConfig { selection, ..plain.clone() };
        let plain = bits(&router(plain, bias)?.route(&input)?)?;
        assert_eq!(bits(&router(grouped, bias)?.route(&input)?)?, plain);
    }
    Ok(())
}
