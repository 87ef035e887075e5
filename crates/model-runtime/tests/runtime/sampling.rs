//! Sampling against its definition, computed independently in f64 over all tokens.

use model_runtime::sampling::{SamplingError, random_bits, request_seed, sample_row};
use model_runtime::{Exec, SampleRow, Sampled, SamplingParams, ViewMut, sample_rows};
use proptest::prelude::*;

use crate::message;

/// vLLM's definition: softmax of logits / temperature; min-p relative to the largest probability;
/// the k largest; the smallest prefix of the sorted rest whose renormalised probability reaches
/// top_p. Returns renormalised probabilities by id.
fn probabilities(logits: &[f32], params: &SamplingParams) -> Vec<f64> {
    let max = logits.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b)) as f64;
    let mut p: Vec<f64> =
        logits.iter().map(|&x| ((x as f64 - max) / params.temperature as f64).exp()).collect();
    p.iter_mut().filter(|p| **p < params.min_p as f64).for_each(|p| *p = 0.0);
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
    if params.top_k > 0 {
        order.iter().skip(params.top_k).for_each(|&i| p[i] = 0.0);
    }
    let total: f64 = p.iter().sum();
    let mut before = 0.0;
    for &i in &order {
        let own = p[i] / total;
        if before >= params.top_p as f64 {
            p[i] = 0.0;
        }
        before += own;
    }
    let total: f64 = p.iter().sum();
    p.iter().map(|p| p / total).collect()
}

/// Whether the definition's answer could differ by rounding: a threshold is within `e` of a value that is compared with
/// it.
fn ambiguous(logits: &[f32], params: &SamplingParams, e: f64) -> bool {
    let max = logits.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b)) as f64;
    let near_min_p = logits.iter().any(|&x| {
        let p = ((x as f64 - max) / params.temperature as f64).exp();
        params.min_p > 0.0 && (p - params.min_p as f64).abs() < e
    });
    let loose = |top_p: f32| {
        let p = probabilities(logits, &SamplingParams { top_p, ..params.clone() });
        p.iter().filter(|p| **p > 0.0).count()
    };
    let delta = e as f32;
    near_min_p
        || params.top_p < 1.0
            && loose((params.top_p - delta).max(1e-7)) != loose((params.top_p + delta).min(1.0))
}

fn params(temperature: f32, top_k: usize, top_p: f32, min_p: f32, seed: u64) -> SamplingParams {
    SamplingParams { temperature, top_k, top_p, min_p, seed, ..SamplingParams::default() }
}

/// An output whose only meaning is its length.
static OUTPUT: [u32; 40_000] = [0; 40_000];

/// The token at an output position.
fn sample(logits: &[f32], params: &SamplingParams, position: usize) -> Result<u32, SamplingError> {
    let row = SampleRow { params, prompt: &[0], output: &OUTPUT[..position], banned: &[], mask: None };
    let mut edited = logits.to_vec();
    let sampled = sample_row(&mut edited, &row)?;
    let bits = |x: &[f32]| -> Vec<u32> { x.iter().map(|x| x.to_bits()).collect() };
    assert_eq!(bits(&edited), bits(logits), "nothing asks for an edit");
    assert_eq!(sampled.logprobs, None);
    Ok(sampled.token_id)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]
    #[test]
    fn draws_follow_the_definition(
        logits in prop::collection::vec(-6f32..6.0, 1..600),
        temperature in 0.05f32..3.0,
        top_k in prop_oneof![Just(0usize), 1usize..40, Just(10_000)],
        top_p in prop_oneof![Just(1f32), 0.01f32..1.0],
        min_p in prop_oneof![Just(0f32), 0f32..0.5],
        seed: u64,
        position in 0..OUTPUT.len(),
    ) {
        let params = params(temperature, top_k, top_p, min_p, seed);
        prop_assume!(!ambiguous(&logits, &params, 1e-5));
        let p = probabilities(&logits, &params);
        let token = sample(&logits, &params, position).unwrap();
        // The token whose slice of the distribution, in the order of ids, holds the random share.
        let u = random_bits(seed, position as u64) as f64 / 2f64.powi(64);
        let before: f64 = p[..token as usize].iter().sum();
        prop_assert!(p[token as usize] > 0.0, "token {token} is excluded");
        prop_assert!(before - 1e-6 <= u && u < before + p[token as usize] + 1e-6, "{u} {before} {token}");
    }

    #[test]
    fn greedy_takes_the_lowest_of_the_largest(logits in prop::collection::vec(prop::sample::select(vec![-2f32, 0.0, 1.5]), 1..50)) {
        let max = logits.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        let want = logits.iter().position(|&x| x == max).unwrap() as u32;
        for t in [0.0, 9e-6] {
            prop_assert_eq!(sample(&logits, &params(t, 3, 0.5, 0.9, 1), 0).unwrap(), want);
        }
        // The likeliest token alone is the same as greedy.
        prop_assert_eq!(sample(&logits, &params(1.0, 1, 1.0, 0.0, 1), 7).unwrap(), want);
        prop_assert_eq!(sample(&logits, &params(1.0, 0, 1e-6, 0.0, 1), 7).unwrap(), want);
    }
}

#[test]
fn frequencies_match_probabilities() {
    let logits = [2.0, 1.0, 0.5, 0.0, -1.0, f32::NEG_INFINITY, 1.0];
    for params in [
        params(0.7, 0, 1.0, 0.0, 3),
        params(1.5, 4, 1.0, 0.0, 4),
        params(1.0, 0, 0.8, 0.0, 5),
        params(1.0, 0, 1.0, 0.3, 6),
        params(2.0, 5, 0.9, 0.05, 7),
    ] {
        let p = probabilities(&logits, &params);
        let n = 40_000;
        let mut counts = [0f64; 7];
        for position in 0..n {
            counts[sample(&logits, &params, position).unwrap() as usize] += 1.0;
        }
        let chi2: f64 = (0..7)
            .filter(|&i| p[i] > 0.0)
            .map(|i| (counts[i] - p[i] * n as f64).powi(2) / (p[i] * n as f64))
            .sum();
        // 99.99 % of a chi-square with 6 degrees of freedom.
        assert!(chi2 < 27.9, "{params:?}: {chi2}");
        assert!((0..7).all(|i| p[i] > 0.0 || counts[i] == 0.0));
    }
}

#[test]
fn ties_at_the_edge_of_top_k_and_top_p_go_to_the_lower_id() {
    let logits = [1.0f32, 3.0, 1.0, 1.0];
    let seen = |params: SamplingParams| {
        let mut seen: Vec<u32> = (0..2000).map(|i| sample(&logits, &params, i).unwrap()).collect();
        seen.sort_unstable();
        seen.dedup();
        seen
    };
    assert_eq!(seen(params(3.0, 2, 1.0, 0.0, 0)), [0, 1]);
    assert_eq!(seen(params(3.0, 3, 1.0, 0.0, 0)), [0, 1, 2]);
    // Probabilities 0.394, 0.202 each: 0.5 needs the first of the equals, 0.7 the second too.
    assert_eq!(seen(params(3.0, 0, 0.5, 0.0, 0)), [0, 1]);
    assert_eq!(seen(params(3.0, 0, 0.7, 0.0, 0)), [0, 1, 2]);
    assert_eq!(seen(params(3.0, 0, 1.0, 0.0, 0)), [0, 1, 2, 3]);
}

#[test]
fn a_long_flat_row_needs_more_than_the_first_look() {
    let logits: Vec<f32> = (0..5000).map(|i| (i % 7) as f32 * 1e-3).collect();
    let params = params(1.0, 0, 0.9, 0.0, 11);
    let p = probabilities(&logits, &params);
    assert!(p.iter().filter(|p| **p > 0.0).count() > 4000);
    for position in 0..200 {
        let token = sample(&logits, &params, position).unwrap();
        let u = random_bits(11, position as u64) as f64 / 2f64.powi(64);
        let before: f64 = p[..token as usize].iter().sum();
        assert!(before - 1e-6 <= u && u < before + p[token as usize] + 1e-6);
    }
}

#[test]
fn small_temperatures_count_as_a_hundredth() {
    let logits = [0.0f32, 0.02, 0.01];
    for position in 0..50 {
        let at = |t| sample(&logits, &params(t, 0, 1.0, 0.0, 2), position).unwrap();
        assert_eq!(at(1e-5), at(1e-2));
        assert_eq!(at(5e-3), at(1e-2));
    }
}

#[test]
fn logits_that_are_not_finite() {
    let p = params(1.0, 0, 1.0, 0.0, 0);
    for params in [&p, &SamplingParams::default()] {
        let e = sample(&[0.0, f32::NAN, f32::NAN], params, 0).unwrap_err();
        assert!(matches!(e, SamplingError::NotFinite { token_id: 1, .. }));
        assert!(e.to_string().contains("the logit of token 1 is NaN"), "{e}");
        assert!(message(sample(&[f32::INFINITY], params, 0)).contains("token 0 is inf"));
        assert_eq!(sample(&[f32::NEG_INFINITY; 3], params, 0), Err(SamplingError::Empty));
        assert_eq!(sample(&[], params, 0), Err(SamplingError::Empty));
        assert_eq!(sample(&[f32::NEG_INFINITY, -1e30, f32::NEG_INFINITY], params, 0), Ok(1));
        assert_eq!(sample(&[f32::MIN, f32::MAX], params, 0), Ok(1));
    }
}

#[test]
fn parameters_out_of_range() {
    for (params, words) in [
        (params(-0.1, 0, 1.0, 0.0, 0), "temperature must be a finite number of at least 0, got -0.1"),
        (params(f32::NAN, 0, 1.0, 0.0, 0), "temperature must be"),
        (params(f32::INFINITY, 0, 1.0, 0.0, 0), "temperature must be"),
        (params(1.0, 0, 0.0, 0.0, 0), "top_p must be above 0 and at most 1, got 0"),
        (params(1.0, 0, 1.1, 0.0, 0), "top_p must be"),
        (params(1.0, 0, f32::NAN, 0.0, 0), "top_p must be"),
        (params(1.0, 0, 1.0, 1.5, 0), "min_p must be from 0 to 1, got 1.5"),
        (params(1.0, 0, 1.0, -1.0, 0), "min_p must be"),
    ] {
        let e = message(sample(&[0.0, 1.0], &params, 0));
        assert!(e.contains(words), "{e}");
    }
    let with = |edit: fn(&mut SamplingParams)| {
        let mut params = SamplingParams::default();
        edit(&mut params);
        params
    };
    for (params, words) in [
        (with(|p| p.repetition_penalty = 0.0), "repetition_penalty must be a finite number above 0, got 0"),
        (with(|p| p.repetition_penalty = f32::INFINITY), "repetition_penalty must be"),
        (with(|p| p.repetition_penalty = f32::NAN), "repetition_penalty must be"),
        (with(|p| p.presence_penalty = 2.5), "presence_penalty must be from -2 to 2, got 2.5"),
        (with(|p| p.presence_penalty = f32::NAN), "presence_penalty must be"),
        (with(|p| p.frequency_penalty = -2.1), "frequency_penalty must be from -2 to 2, got -2.1"),
        (with(|p| p.logit_bias = vec![(1, f32::NAN)]), "logit_bias must be finite numbers, got NaN"),
        (with(|p| p.logit_bias = vec![(0, 1.0), (1, f32::NEG_INFINITY)]), "logit_bias must be"),
        (with(|p| p.logit_bias = vec![(2, 1.0)]), "logit_bias: token id 2 is outside of the vocabulary of 2"),
        (with(|p| p.allowed_token_ids = Some(vec![])), "allowed_token_ids holds an empty list"),
        (with(|p| p.allowed_token_ids = Some(vec![0, 9])), "allowed_token_ids: token id 9 is outside"),
    ] {
        assert_eq!(message(params.validate(2)), message(sample(&[0.0, 1.0], &params, 0)));
        let e = message(params.validate(2));
        assert!(e.contains(words), "{e}");
    }
    let edges = SamplingParams {
        presence_penalty: -2.0,
        frequency_penalty: 2.0,
        repetition_penalty: 1e-30,
        logit_bias: vec![(1, -100.0)],
        allowed_token_ids: Some(vec![1]),
        ..params(0.0, 5, 1.0, 1.0, 0)
    };
    assert_eq!(edges.validate(2), Ok(()));
}

#[test]
fn rows_are_independent() -> candle_core::Result<()> {
    let v = 300;
    let logits: Vec<f32> = (0..4 * v).map(|i| ((i * 7919) % 613) as f32 / 100.0).collect();
    let mut broken = logits.clone();
    broken[v] = f32::NAN;
    let mut params: Vec<SamplingParams> = (0..4).map(|i| params(1.0, 0, 0.9, 0.0, i)).collect();
    params[2].repetition_penalty = 3.0;
    params[2].logprobs = Some(2);
    let prompts: [&[u32]; 4] = [&[1], &[2, 3], &[5, 298, 5], &[7]];
    let rows: Vec<SampleRow> = (params.iter().zip(prompts))
        .map(|(params, prompt)| SampleRow { params, prompt, output: &OUTPUT[..5], banned: &[], mask: None })
        .collect();
    let ex = Exec::cpu().with_threads(3)?;
    let got = sample_rows(ViewMut::new(&mut broken, &[4, v])?, &rows, &ex)?;
    assert!(got[1].is_err());
    for i in [0, 2, 3] {
        let mut alone = logits[i * v..][..v].to_vec();
        let want: Result<Sampled, SamplingError> = sample_row(&mut alone, &rows[i]);
        assert_eq!(got[i], want);
        assert_eq!(alone == logits[i * v..][..v], i != 2, "only the penalised row is edited");
    }
    assert_eq!(got[2].as_ref().unwrap().logprobs.as_ref().unwrap().top.len(), 2);
    let mut logits = logits;
    let e = message(sample_rows(ViewMut::new(&mut logits, &[2, 2 * v])?, &rows, &ex));
    assert!(e.contains("expected logits of 4 rows, got dims [2, 600]"), "{e}");
    assert!(sample_rows(ViewMut::new(&mut [0f32; 0], &[0, 5])?, &[], &ex)?.is_empty());
    Ok(())
}

#[test]
fn request_seeds_differ_by_run_and_name() {
    let seeds: Vec<u64> =
        [(0, "0"), (0, "1"), (1, "0"), (1, "1"), (0, "")].map(|(seed, name)| request_seed(seed, name)).into();
    for (i, a) in seeds.iter().enumerate() {
        assert!(seeds[i + 1..].iter().all(|b| a != b));
    }
    // Part of what --seed means: it must not change.
    assert_eq!(request_seed(0, "request-1"), request_seed(0, "request-1"));
}
