//! Encodes requests, outputs and steps for the way between processes. The format is postcard, which restores every bit
//! of a number.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Context, Result, bail};

/// Encodes a value as a message.
pub(crate) fn encode(value: &impl Serialize) -> Result<Vec<u8>> {
    postcard::to_stdvec(value).context("cannot write a message to another rank")
}

/// Decodes the value of a message, which must contain nothing else.
///
/// # Errors
/// The bytes are not such a value. The caller checks the contents of the value.
pub(crate) fn decode<T: DeserializeOwned>(message: &[u8]) -> Result<T> {
    match postcard::take_from_bytes(message).context("it sent a message that cannot be read")? {
        (value, []) => Ok(value),
        (_, rest) => bail!("it sent a message with {} bytes too many", rest.len()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use model_runtime::sampling::{TokenLogprob, TokenLogprobs};
    use model_runtime::{RoutedExperts, SamplingParams};
    use moe_layer::ExpertHeat;

    use super::*;
    use crate::engine::{FinishReason, Output, Request, StepLoad, StopReason};
    use crate::structured::StructuredOutput;

    fn routed() -> RoutedExperts {
        RoutedExperts::from_ids(2, 1, 2, vec![3, u32::MAX, 0, 1]).unwrap()
    }

    #[test]
    fn requests_come_back() {
        let sampling = SamplingParams {
            temperature: 0.1,
            logit_bias: vec![(7, f32::MIN_POSITIVE)],
            allowed_token_ids: Some(vec![1, 2]),
            seed: u64::MAX,
            logprobs: Some(usize::MAX),
            ..SamplingParams::default()
        };
        let request = Request {
            sampling,
            stop: vec!["ä\u{0}".into()],
            bad_words: vec!["ö".into(), "u v".into()],
            structured_output: Some(Arc::new(StructuredOutput::Choice(vec!["ä".into(), "b".into()]))),
            timeout: Some(Duration::from_nanos(1_500_000_001)),
            replay_routing: Some(Arc::new(routed())),
            max_tokens: Some(0),
            ..Request::new(vec![0, u32::MAX])
        };
        let again: Request = decode(&encode(&request).unwrap()).unwrap();
        assert_eq!(format!("{again:?}"), format!("{request:?}"));
        let plain = Request::new(vec![1]);
        let again: Request = decode(&encode(&plain).unwrap()).unwrap();
        assert_eq!(format!("{again:?}"), format!("{plain:?}"));
    }

    #[test]
    fn outputs_come_back_bit_for_bit() {
        let values = [f32::NEG_INFINITY, -0.0, 1e-45, -12.345_679, f32::from_bits(0x7fc0_1234)];
        let one = |logprob| TokenLogprob { token_id: 9, logprob, rank: u32::MAX };
        let logprobs = TokenLogprobs { chosen: one(0.1), top: values.map(one).to_vec() };
        let output = Output {
            request: decode(&[5]).unwrap(),
            choice: 3,
            token_id: Some(1),
            text: "\u{fffd}x".into(),
            logprobs: Some(logprobs.clone()),
            prompt_logprobs: Some(vec![logprobs]),
            finish: Some(FinishReason::Stop(StopReason::Text("end".into()))),
            routed_experts: Some(routed()),
            num_cached_tokens: 16,
        };
        let again: Output = decode(&encode(&output).unwrap()).unwrap();
        assert_eq!(format!("{again:?}"), format!("{output:?}"));
        let bits = |output: &Output| -> Vec<u32> {
            output.logprobs.iter().flat_map(|l| &l.top).map(|t| t.logprob.to_bits()).collect()
        };
        assert_eq!(bits(&again), values.map(f32::to_bits));
        assert_eq!(again.routed_experts, output.routed_experts);
    }

    #[test]
    fn expert_counts_come_back_and_garbage_is_refused() {
        let mut counts = ExpertHeat::new(2, 3);
        counts.record(0, &[2, 2, 0]);
        counts.record(1, &[1; 40]);
        let step = StepLoad { step: 7, decode_rows: 1, prefill_rows: 2, counts };
        let bytes = encode(&step).unwrap();
        let again: StepLoad = decode(&bytes).unwrap();
        assert_eq!((again.counts, again.step, again.prefill_rows), (step.counts, 7, 2));
        assert!(decode::<StepLoad>(&bytes[..bytes.len() - 1]).is_err());
        assert!(decode::<StepLoad>(&[&bytes[..], &[0]].concat()).is_err());
        assert!(decode::<Request>(&[0xff; 40]).is_err());
    }
}
