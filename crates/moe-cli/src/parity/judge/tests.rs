//! The verdict on small made-up runs: each rule passes and fails where it should.

use std::collections::BTreeMap;

use model_runtime::{KvLayout, MoeInfo};

use super::*;

/// Two layers, the second with 4 experts of which a token takes 2; V = 3, H = 2.
fn info() -> ModelInfo {
    ModelInfo {
        vocab_size: 3,
        hidden_size: 2,
        num_layers: 2,
        max_context_len: 8,
        keys_depend_on_prompt_len: false,
        dtype: DType::F32,
        states: KvLayout { num_kv_heads: 1, head_dim: 2, value_dim: Some(2), dtype: DType::F32 }.layers(2),
        moe: Some(MoeInfo { layers: vec![1], num_experts: 4, top_k: 2 }),
    }
}

/// Two sequences of two tokens.
fn reference() -> Reference {
    let hidden = |x: f32| (0..8).map(|i| x + i as f32).collect();
    Reference {
        batch: 2,
        length: 2,
        input_ids: vec![0, 1, 2, 0],
        logits: [3., 2., 1.].repeat(4),
        hidden_states: BTreeMap::from([(0, hidden(1.)), (1, hidden(2.)), (2, hidden(3.))]),
        router_logits: BTreeMap::from([(1, [8., 1., 0.5, 0.].repeat(4))]),
        generated: Some((2, vec![0, 0, 1, 2])),
        bf16_noise: None,
    }
}

fn same(reference: &Reference) -> Observations {
    Observations {
        logits: reference.logits.clone(),
        hidden_states: reference.hidden_states.clone(),
        router_logits: reference.router_logits.clone(),
        ..Observations::default()
    }
}

/// The two largest keys of each row, in any order.
struct TopTwo;

impl Selection for TopTwo {
    fn ids(&self, _: usize, logits: &[f32]) -> Result<Vec<u32>> {
        let best = |row: &[f32]| -> Vec<u32> {
            let mut ids: Vec<u32> = (0..4).collect();
            ids.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
            ids[..2].to_vec()
        };
        Ok(logits.chunks_exact(4).flat_map(best).collect())
    }

    fn gap(&self, _: usize, row: &[f32]) -> Result<f32> {
        Ok(crate::parity::compare::top_k_gap(row, 2))
    }
}

fn exact() -> Rules {
    Rules::new(DType::F32, true, None)
}

fn noisy() -> Rules {
    Rules::new(DType::BF16, true, None)
}

fn report(reference: &Reference, ours: &Observations, generated: &[u32], rules: Rules) -> Report {
    judge(&info(), reference, ours, generated, &rules, &TopTwo).unwrap()
}

fn compare(reference: &Reference, ours: &Observations, rules: Rules) -> Report {
    report(reference, ours, &[0, 0, 1, 2], rules)
}

#[test]
fn rules_follow_dtype_device_and_noise() {
    for (dtype, on_cpu, noise, tolerance, exact) in [
        (DType::F32, true, Some(0.5), 1e-5, true),
        (DType::F32, false, None, 1e-4, true),
        (DType::BF16, true, None, 2e-2, false),
        (DType::BF16, true, Some(0.5), 0.75, false),
        (DType::F16, false, Some(0.25), 0.375, false),
    ] {
        let rules = Rules::new(dtype, on_cpu, noise);
        assert_eq!((rules.tolerance, rules.exact), (tolerance, exact), "{dtype:?} {on_cpu} {noise:?}");
    }
}

#[test]
fn an_equal_run_passes() {
    let reference = reference();
    for rules in [exact(), noisy()] {
        let r = compare(&reference, &same(&reference), rules);
        assert!(r.passed && r.failures.is_empty(), "{:?}", r.failures);
        assert_eq!((r.max_logit_diff, r.relative_error, r.argmax_agreement), (0., 0., 1.));
        assert_eq!((r.generated_match, r.router_topk_agreement, r.routing_flips), (Some(true), Some(1.), 0));
        let names: Vec<&str> = r.layers.iter().map(|l| l.name.as_str()).collect();
        let order = ["hidden_states.0", "hidden_states.1", "router_logits.1", "hidden_states.2", "logits"];
        assert_eq!(names, order);
    }
}

#[test]
fn the_first_tensor_in_the_order_of_execution_is_named() {
    let reference = reference();
    let mut ours = same(&reference);
    ours.logits[0] += 1.;
    ours.router_logits.get_mut(&1).unwrap()[0] += 0.5;
    ours.hidden_states.get_mut(&2).unwrap()[7] += 5.;
    let r = compare(&reference, &ours, exact());
    assert!(
        r.failures[0].starts_with("router_logits.1 is the first tensor that differs"),
        "{:?}",
        r.failures
    );
    // Router logits are not held to the bound in bf16; the worst judged tensor counts.
    let r = compare(&reference, &ours, noisy());
    assert!(r.failures[0].starts_with("hidden_states.2 is the first"), "{:?}", r.failures);
    let norm = (3..=10).map(|x| (x * x) as f64).sum::<f64>().sqrt();
    assert!((r.relative_error - 5. / norm).abs() < 1e-9, "{}", r.relative_error);
    assert_eq!((r.max_logit_diff, r.passed), (1., false));
}

#[test]
fn what_is_nan_or_missing_fails() {
    let reference = reference();
    let mut nan = same(&reference);
    nan.logits[2] = f32::NAN;
    let mut missing = same(&reference);
    missing.hidden_states.remove(&1);
    for (ours, name) in [(nan, "logits"), (missing, "hidden_states.1")] {
        for rules in [exact(), noisy()] {
            let r = compare(&reference, &ours, rules);
            assert!(!r.passed && r.failures[0].starts_with(name), "{:?}", r.failures);
            assert_eq!(r.relative_error, f64::INFINITY);
        }
    }
}

#[test]
fn argmax_must_agree_in_f32() {
    let mut reference = reference();
    reference.logits[6..8].copy_from_slice(&[2., 2.000_000_2]);
    let mut ours = same(&reference);
    ours.logits.swap(6, 7);
    let r = compare(&reference, &ours, exact());
    assert_eq!(r.failures, ["argmax: sequence 1, position 0 differs (1 of 4 positions do)"]);
    assert_eq!(r.argmax_agreement, 0.75);
    let r = compare(&reference, &ours, noisy());
    assert!(r.passed && r.argmax_agreement == 0.75);
}

#[test]
fn greedy_tokens_must_agree_in_f32() {
    let reference = reference();
    let ours = same(&reference);
    let r = report(&reference, &ours, &[0, 0, 1, 1], exact());
    assert_eq!(r.failures, ["generated: sequence 1, token 1: expected 2, got 1"]);
    assert_eq!((r.generated_match, r.passed), (Some(false), false));
    let r = report(&reference, &ours, &[0, 0, 1, 1], noisy());
    assert_eq!((r.generated_match, r.passed), (Some(false), true));
    let r = report(&reference, &ours, &[0, 0, 1], exact());
    assert_eq!(r.failures, ["generated: expected 4 tokens, got 3"]);
    assert_eq!((r.generated_match, r.passed), (Some(false), false));
    let none = Reference { generated: None, ..reference };
    assert_eq!(compare(&none, &ours, exact()).generated_match, None);
}

/// Rows of router logits whose second and third expert change places in ours.
fn flipped(rows: usize, keys: [f32; 4]) -> (Reference, Observations) {
    let mut reference = reference();
    let row = reference.router_logits.get_mut(&1).unwrap();
    *row = keys.repeat(rows);
    let mut ours = same(&reference);
    ours.router_logits.get_mut(&1).unwrap().chunks_exact_mut(4).for_each(|row| row.swap(1, 2));
    (reference, ours)
}

#[test]
fn experts_may_flip_only_where_the_gap_is_not_clear() {
    // f32: a gap of 1e-5 is clear. bf16: a gap of 2^-6 of the row's largest magnitude, here 0.125.
    for (keys, rules, clear) in [
        ([8., 1., 1. - 5e-6, 0.], exact(), false),
        ([8., 1., 1. - 5e-5, 0.], exact(), true),
        ([8., 1., 0.9, 0.], noisy(), false),
        ([2., 1., 0.9, -8.], noisy(), false),
        ([8., 1., 0.8, 0.], noisy(), true),
    ] {
        let (reference, ours) = flipped(4, keys);
        let r = compare(&reference, &ours, rules);
        assert_eq!((r.routing_flips, r.router_topk_agreement), (4, Some(0.)), "{keys:?}");
        let named = |f: &&String| f.starts_with("experts of layer 1, row ");
        assert_eq!(r.failures.iter().filter(named).count(), if clear { 4 } else { 0 }, "{:?}", r.failures);
        assert_eq!(r.passed, !clear, "{:?}", r.failures);
    }
}

#[test]
fn failures_are_not_a_dump() {
    let (reference, ours) = flipped(100, [8., 1., 0.5, 0.]);
    let r = compare(&reference, &ours, noisy());
    assert_eq!((r.routing_flips, r.failures.len()), (100, MAX_FAILURES));
}
