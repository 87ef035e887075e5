//! Log-probabilities against log softmax in f64.

use model_runtime::sampling::{SamplingError, sample_row};
use model_runtime::{SampleRow, SamplingParams, TokenLogprob, TokenLogprobs, token_logprobs};
use proptest::prelude::*;

use crate::message;

/// Every token, likeliest first: id, log-probability.
fn sorted(logits: &[f32]) -> Vec<(u32, f64)> {
    let total: f64 = logits.iter().map(|&x| (x as f64).exp()).sum();
    let mut all: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|&x| x as f64 - total.ln())).collect();
    all.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
    all
}

fn check(got: TokenLogprob, rank: usize, want: (u32, f64)) -> Result<(), TestCaseError> {
    prop_assert_eq!((got.token_id, got.rank), (want.0, rank as u32 + 1));
    let error = (got.logprob as f64 - want.1).abs();
    prop_assert!(got.logprob as f64 == want.1 || error < 1e-6 * want.1.abs().max(1.0), "{got:?} {want:?}");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn logprobs_are_the_log_softmax(
        // Few values, so that there are ties.
        logits in prop::collection::vec(prop_oneof![
            4 => -30f32..30.0, 2 => prop::sample::select(vec![-1.5f32, 0.0, 25.0]), 1 => Just(f32::NEG_INFINITY),
        ], 1..300),
        token: prop::sample::Index,
        n in prop_oneof![0usize..12, Just(usize::MAX)],
    ) {
        prop_assume!(logits.iter().any(|x| x.is_finite()));
        let want = sorted(&logits);
        let token = token.index(logits.len()) as u32;
        let got = token_logprobs(&logits, token, n).unwrap();
        prop_assert_eq!(got.top.len(), n.min(logits.len()));
        for (rank, (&top, &want)) in got.top.iter().zip(&want).enumerate() {
            check(top, rank, want)?;
        }
        let rank = want.iter().position(|(id, _)| *id == token).unwrap();
        check(got.chosen, rank, want[rank])?;
    }

    /// A sampled token's log-probabilities come from the model's logits, whatever the parameters do to these.
    #[test]
    fn sampled_tokens_come_with_raw_logprobs(
        logits in prop::collection::vec(-4f32..4.0, 20),
        temperature in prop_oneof![Just(0f32), 0.2f32..2.0],
        penalised: bool,
        n in 0usize..5,
    ) {
        let mut params = SamplingParams { temperature, logprobs: Some(n), ..SamplingParams::default() };
        if penalised {
            params.repetition_penalty = 1.7;
            params.logit_bias = vec![(4, 2.0)];
            params.allowed_token_ids = Some((3..9).collect());
        }
        let mut edited = logits.clone();
        let row = SampleRow { params: &params, prompt: &[3, 5], output: &[7], banned: &[], mask: None };
        let sampled = sample_row(&mut edited, &row).unwrap();
        prop_assert_eq!(edited != logits, penalised);
        prop_assert_eq!(sampled.logprobs.unwrap(), token_logprobs(&logits, sampled.token_id, n).unwrap());
    }
}

/// A vocabulary as large as Qwen3's, most of which is very unlikely: no probability gets lost.
#[test]
fn a_large_vocabulary() {
    let logits: Vec<f32> =
        (0..151_936).map(|i| if i == 77_000 { 12.0 } else { -((i % 1000) as f32) / 50.0 }).collect();
    let want = sorted(&logits);
    let TokenLogprobs { chosen, top } = token_logprobs(&logits, 999, 3).unwrap();
    assert_eq!(top.iter().map(|t| t.token_id).collect::<Vec<_>>(), [77_000, 0, 1000]);
    for (got, want) in top.iter().zip(&want) {
        assert!((got.logprob as f64 - want.1).abs() < 1e-6 * want.1.abs().max(1.0), "{got:?} {want:?}");
    }
    assert_eq!(chosen.rank as usize, want.iter().position(|(id, _)| *id == 999).unwrap() + 1);
    let all = token_logprobs(&logits, 0, usize::MAX).unwrap().top;
    let total: f64 = all.iter().map(|t| (t.logprob as f64).exp()).sum();
    assert!((total - 1.0).abs() < 2e-6, "{total}");
}

#[test]
fn what_has_no_logprobs() {
    let e = token_logprobs(&[0.0, 1.0], 2, 1).unwrap_err();
    assert_eq!(e.to_string(), "log-probabilities: token id 2 is outside of the vocabulary of 2");
    assert!(message(token_logprobs(&[0.0, f32::NAN], 0, 1)).contains("the logit of token 1 is NaN"));
    assert_eq!(token_logprobs(&[], 0, 1), Err(SamplingError::Empty));
    assert_eq!(token_logprobs(&[f32::NEG_INFINITY; 2], 0, 1), Err(SamplingError::Empty));
}
