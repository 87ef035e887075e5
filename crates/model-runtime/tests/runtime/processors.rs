//! Logits processors against vLLM's formulas, written for one token at a time in f64.

use model_runtime::sampling::{SamplingError, sample_row};
use model_runtime::{SampleRow, SamplingParams};
use proptest::prelude::*;

/// What the processors make of the logit of `token`.
fn processed(logits: &[f32], row: &SampleRow, token: u32) -> f64 {
    let p = row.params;
    let mut x = logits[token as usize] as f64;
    if p.allowed_token_ids.as_ref().is_some_and(|ids| !ids.contains(&token)) {
        x = f64::NEG_INFINITY;
    }
    if row.banned.contains(&token) {
        x = f64::NEG_INFINITY;
    }
    x += p.logit_bias.iter().filter(|(id, _)| *id == token).map(|(_, bias)| *bias as f64).sum::<f64>();
    let count = row.output.iter().filter(|id| **id == token).count();
    if count > 0 || row.prompt.contains(&token) {
        let r = p.repetition_penalty as f64;
        x = if x > 0.0 { x / r } else { x * r };
    }
    x -= p.frequency_penalty as f64 * count as f64;
    x - if count > 0 { p.presence_penalty as f64 } else { 0.0 }
}

const V: u32 = 9;

fn ids(len: impl Into<prop::collection::SizeRange>) -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0..V, len)
}

fn sometimes<T: Clone + std::fmt::Debug>(
    neutral: T,
    some: impl Strategy<Value = T>,
) -> impl Strategy<Value = T> {
    prop_oneof![1 => Just(neutral), 2 => some]
}

fn params() -> impl Strategy<Value = SamplingParams> {
    let penalties =
        (sometimes(1f32, 0.3f32..3.0), sometimes(0f32, -2f32..=2.0), sometimes(0f32, -2f32..=2.0));
    let bias = prop::collection::vec((0..V, -5f32..5.0), 0..4);
    let allowed = prop_oneof![3 => Just(None), 1 => ids(1..8).prop_map(Some)];
    (penalties, bias, allowed).prop_map(|(penalties, logit_bias, allowed_token_ids)| {
        let (repetition_penalty, presence_penalty, frequency_penalty) = penalties;
        SamplingParams {
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias,
            allowed_token_ids,
            ..SamplingParams::default()
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]
    #[test]
    fn edits_follow_the_definition(
        logits in prop::collection::vec(prop_oneof![9 => -4f32..4.0, 1 => Just(f32::NEG_INFINITY), 1 => Just(0f32)], V as usize),
        params in params(),
        prompt in ids(0..8),
        output in ids(0..12),
        banned in prop_oneof![2 => Just(vec![]), 1 => ids(1..4)],
    ) {
        let row = SampleRow { params: &params, prompt: &prompt, output: &output, banned: &banned, mask: None };
        let want: Vec<f64> = (0..V).map(|id| processed(&logits, &row, id)).collect();
        let mut edited = logits.clone();
        let sampled = sample_row(&mut edited, &row);
        for (id, (got, want)) in edited.iter().zip(&want).enumerate() {
            let close = if want.is_finite() { (*got as f64 - want).abs() <= 2e-5 } else { *got as f64 == *want };
            prop_assert!(close, "token {id}: {got}, expected {want}");
        }
        // Greedy takes the likeliest of the edited logits, the lower id of equals.
        let max = edited.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        let want = match edited.iter().position(|&x| x == max) {
            Some(id) if max.is_finite() => Ok(id as u32),
            _ => Err(SamplingError::Empty),
        };
        prop_assert_eq!(sampled.map(|s| s.token_id), want);
    }

    /// Sampling with the parameters is sampling from the edited logits without them.
    #[test]
    fn draws_see_the_edited_logits(
        logits in prop::collection::vec(-4f32..4.0, V as usize),
        params in params(),
        prompt in ids(0..8),
        output in ids(0..12),
        seed: u64,
        (top_k, top_p, min_p) in (0usize..6, 0.3f32..=1.0, 0f32..0.3),
    ) {
        let params = SamplingParams { temperature: 0.8, top_k, top_p, min_p, seed, ..params };
        let row = SampleRow { params: &params, prompt: &prompt, output: &output, banned: &[], mask: None };
        let mut edited = logits;
        let got = sample_row(&mut edited, &row);
        let plain = SamplingParams {
            temperature: 0.8, top_k, top_p, min_p, seed, ..SamplingParams::default()
        };
        prop_assert_eq!(got, sample_row(&mut edited, &SampleRow { params: &plain, ..row }));
    }
}

/// Rows worked out by hand.
#[test]
fn known_rows() {
    let edit = |row: SampleRow| {
        let mut logits = [2.0f32, -2.0, 0.5, 1.0];
        (sample_row(&mut logits, &row).unwrap().token_id, logits)
    };
    let all = SamplingParams {
        repetition_penalty: 2.0,
        presence_penalty: 0.25,
        frequency_penalty: 0.5,
        ..SamplingParams::default()
    };
    // Token 0 is in the prompt alone: 2 / 2. Token 1 is twice in the output: -2 * 2 - 2 * 0.5 - 0.25.
    let row = SampleRow { params: &all, prompt: &[0, 0], output: &[1, 1], banned: &[], mask: None };
    assert_eq!(edit(row), (0, [1.0, -5.25, 0.5, 1.0]));
    // In both, a token is penalised once for repetition: 2 / 2 - 0.5 - 0.25.
    assert_eq!(edit(SampleRow { output: &[0], ..row }), (3, [0.25, -2.0, 0.5, 1.0]));
    // A bias decides which side of zero the repetition penalty meets: (-2 + 3) / 2, (2 - 4) * 2.
    let biased = SamplingParams { logit_bias: vec![(1, 3.0), (0, -4.0)], ..all.clone() };
    let row = SampleRow { params: &biased, prompt: &[0, 1], output: &[], banned: &[], mask: None };
    assert_eq!(edit(row), (3, [-4.0, 0.5, 0.5, 1.0]));
    let none = f32::NEG_INFINITY;
    let plain = SamplingParams::default();
    let row = SampleRow { params: &plain, prompt: &[3], output: &[], banned: &[], mask: Some(&[0b1011]) };
    assert_eq!(edit(row), (0, [2.0, -2.0, none, 1.0]));
    // Stop ids that are not in the vocabulary cannot be sampled anyway.
    assert_eq!(edit(SampleRow { banned: &[0, 4, u32::MAX], ..row }), (3, [none, -2.0, none, 1.0]));
}

#[test]
fn excluding_every_token_is_an_error_of_the_row() {
    let params = SamplingParams { allowed_token_ids: Some(vec![1, 2]), ..SamplingParams::default() };
    let row = SampleRow { params: &params, prompt: &[0], output: &[], banned: &[1], mask: None };
    assert_eq!(sample_row(&mut [5.0, 1.0, 0.0], &row).unwrap().token_id, 2);
    let e = sample_row(&mut [5.0, 1.0, 0.0], &SampleRow { banned: &[1, 2], ..row }).unwrap_err();
    assert_eq!(e, SamplingError::Empty);
    assert!(e.to_string().contains("allowed_token_ids, bad_words and the minimum of tokens"), "{e}");
}

#[test]
fn penalties_neither_overflow_nor_hide_what_the_model_gave() {
    let strong = |repetition_penalty| SamplingParams {
        repetition_penalty,
        logit_bias: vec![(3, f32::MAX)],
        ..SamplingParams::default()
    };
    for (penalty, logit, want) in [
        (1e-40, 3.0, f32::MAX),
        (f32::MAX, -3.0, f32::MIN),
        (f32::MAX, f32::NEG_INFINITY, f32::NEG_INFINITY),
        (1e-40, 0.0, 0.0),
    ] {
        let params = strong(penalty);
        let mut logits = [-1.0, 1.0, logit, f32::MAX];
        sample_row(
            &mut logits,
            &SampleRow { params: &params, prompt: &[2], output: &[], banned: &[], mask: None },
        )
        .unwrap();
        assert_eq!(logits, [-1.0, 1.0, want, f32::MAX], "{penalty}");
    }
    for bad in [f32::NAN, f32::INFINITY] {
        let params = strong(2.0);
        let row = SampleRow { params: &params, prompt: &[2], output: &[], banned: &[], mask: None };
        let e = sample_row(&mut [0.0, 1.0, bad, 0.0], &row).unwrap_err();
        assert!(matches!(e, SamplingError::NotFinite { token_id: 2, .. }), "{e}");
    }
}

proptest! {
    /// A mask does what a list of the same tokens does, and both together leave what is in both.
    #[test]
    fn a_mask_keeps_its_tokens(
        logits in prop::collection::vec(-4f32..4.0, 100),
        words in prop::collection::vec(prop_oneof![Just(0u32), Just(u32::MAX), any::<u32>()], 0..5),
        also in prop::collection::vec(0u32..100, 1..60),
    ) {
        let kept = |id: &u32| words.get(*id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1);
        let listed = |ids: Vec<u32>| SamplingParams { allowed_token_ids: Some(ids), ..SamplingParams::default() };
        let by_list = |ids: Vec<u32>| {
            let row = SampleRow { params: &listed(ids), prompt: &[0], output: &[], banned: &[], mask: None };
            let mut logits = logits.clone();
            (sample_row(&mut logits, &row), logits)
        };
        let by_mask = |params: &SamplingParams| {
            let row = SampleRow { params, prompt: &[0], output: &[], banned: &[], mask: Some(&words) };
            let mut logits = logits.clone();
            (sample_row(&mut logits, &row), logits)
        };
        let all: Vec<u32> = (0..100).filter(kept).collect();
        match all.is_empty() {
            true => prop_assert_eq!(by_mask(&SamplingParams::default()).0, Err(SamplingError::Empty)),
            false => prop_assert_eq!(by_mask(&SamplingParams::default()), by_list(all)),
        }
        let both: Vec<u32> = also.iter().copied().filter(kept).collect();
        match both.is_empty() {
            true => prop_assert_eq!(by_mask(&listed(also)).0, Err(SamplingError::Empty)),
            false => prop_assert_eq!(by_mask(&listed(also)), by_list(both)),
        }
    }
}
