//! Tests of zero (identity) experts.

use moe_router::candle::Result;
use moe_router::{Exec, ExpertHeat, NO_EXPERT, RoutedExperts, RouterConfig, StepContext};
use std::sync::Arc;

use crate::{absent, bits, definition, logits, message, router, rows, some_logits};

fn config() -> RouterConfig {
    RouterConfig {
        correction_bias: true,
        num_zero_experts: 4,
        routed_scaling_factor: 6.0,
        num_fused_shared_experts: 1,
        ..RouterConfig::new(6, 3)
    }
}

const BIAS: [f32; 10] = [0.0, 0.1, 0.0, 0.0, 0.05, 0.0, 0.02, 0.0, 0.1, 0.0];

#[test]
fn zero_experts_leave_the_slots_and_add_up() -> Result<()> {
    let input = some_logits(200, 10, 5);
    let routed = router(config(), Some(&BIAS))?.route(&logits(&input, 10)?)?;
    let zero = routed.zero_expert_weights.as_ref().expect("identity weights").to_vec1::<f32>()?;
    let mut seen = [0; 4];
    for ((row, (ids, weights)), zero) in input.iter().zip(rows(&routed)?).zip(zero) {
        let want = definition::route(&config(), Some(&BIAS), row);
        if !want.clear {
            continue;
        }
        let mut sum = 0.0;
        let mut zeros = 0;
        for (k, (&id, &w)) in want.ids.iter().zip(&want.weights).enumerate() {
            if id >= 6 {
                (sum, zeros) = (sum + w, zeros + 1);
                assert!(absent(ids[k]) && weights[k] == 0.0);
            } else {
                assert_eq!(ids[k], id);
                definition::assert_weights(&weights[k..=k], &[w]);
            }
        }
        seen[zeros] += 1;
        assert!((f64::from(zero) - sum).abs() <= 1e-5 * sum, "{zero} {sum}");
        // The id of the fused shared slot comes after the ids of the real experts, and not of the zero ones.
        assert_eq!((ids[3], weights[3]), (6, 1.0));
    }
    assert!(seen.iter().all(|&n| n > 0), "rows with 0..=3 zero experts: {seen:?}");
    Ok(())
}

#[test]
fn a_capture_with_zero_experts_replays_exactly() -> Result<()> {
    let input = logits(&some_logits(40, 10, 6), 10)?;
    let router = router(config(), Some(&BIAS))?;
    let mut context = StepContext {
        capture: Some(RoutedExperts::empty(40, 1, 3)?),
        heat: Some(ExpertHeat::new(1, 6)),
        ..StepContext::default()
    };
    let first = router.route_step(&input, None, 0, &mut context, &mut Exec::cpu())?;
    let capture = context.capture.take().expect("the capture");
    assert!(capture.ids().iter().any(|id| (6..10).contains(id)), "zero experts are captured by router id");
    assert!(!capture.ids().contains(&NO_EXPERT));
    // Heat counts experts that have weights.
    let real = capture.ids().iter().filter(|&&id| id < 6).count() as u64;
    assert_eq!(context.heat.take().expect("heat").layer(0).iter().sum::<u64>(), real);

    context.replay = Some(Arc::new(capture));
    let second = router.route_step(&input, None, 0, &mut context, &mut Exec::cpu())?;
    assert_eq!(bits(&second)?, bits(&first)?);
    let zero = |r: &moe_router::Routed| r.zero_expert_weights.as_ref().expect("zero").to_vec1::<f32>();
    assert_eq!(zero(&second)?, zero(&first)?);
    Ok(())
}

#[test]
fn zero_experts_need_a_biased_top_k() {
    let config = RouterConfig { correction_bias: false, ..config() };
    let e = message(config.validate());
    assert!(e.contains("4 zero experts need plain top-k selection with a correction bias"), "{e}");
}
