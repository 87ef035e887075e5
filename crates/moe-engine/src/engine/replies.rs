//! Checks that the reply of another rank's engine is valid before any of it is used.

use model_runtime::ModelInfo;
use model_runtime::sampling::TokenLogprobs;
use moe_layer::MAX_STEP_TOKENS;

use super::serve::Reply;
use super::stats::Stats;
use super::{Output, StepLoad};
use crate::error::{Context, Result, bail, ensure};
use crate::parallel::wire::decode;

/// Reads the reply of another rank's engine about a request with `prompt` prompt tokens, as far as it can be checked.
///
/// # Errors
/// The bytes are no reply, or the reply is invalid.
pub(crate) fn check_reply(message: &[u8], prompt: usize, info: &ModelInfo) -> Result<()> {
    match decode(message)? {
        Reply::Stepped(stepped) => {
            stepped.outputs.iter().try_for_each(|output| check_output(output, Some(prompt), info))?;
            stepped.loads.iter().try_for_each(|load| check_load(load, info))
        }
        Reply::Stats(stats) => check_stats(&stats, info),
        Reply::Started(0) => bail!("an engine for sequences of no token"),
        Reply::Started(_) | Reply::Measured | Reply::Refused(_) | Reply::Moved(_) | Reply::Ended => Ok(()),
    }
}

/// Fails unless this can be an output of a request that the rank runs. `prompt` is the length of its prompt; `None`
/// means that the rank runs no such choice.
///
/// # Errors
/// The field that is wrong.
pub(super) fn check_output(output: &Output, prompt: Option<usize>, info: &ModelInfo) -> Result<()> {
    let request = output.request.0;
    let choice = output.choice;
    let prompt =
        prompt.with_context(|| format!("choice {choice} of request {request}, which it does not run"))?;
    let vocab_size = info.vocab_size;
    ensure!(output.token_id.is_some() || output.finish.is_some(), "request {request}: no token and no end");
    let known = |id: u32| (id as usize) < vocab_size;
    ensure!(
        output.token_id.is_none_or(known),
        "request {request}: a token outside of the vocabulary of {vocab_size}"
    );
    let all = output.logprobs.iter().chain(output.prompt_logprobs.iter().flatten());
    for TokenLogprobs { chosen, top } in all {
        let ids = || top.iter().chain([chosen]).map(|entry| entry.token_id);
        ensure!(
            top.len() <= vocab_size && ids().all(known),
            "request {request}: log-probabilities of {:?}",
            ids()
        );
    }
    if let (Some(own), Some(token)) = (&output.logprobs, output.token_id) {
        let chosen = own.chosen.token_id;
        ensure!(
            chosen == token,
            "request {request}: the log-probability of token {chosen} for token {token}"
        );
    }
    if let Some(rows) = &output.prompt_logprobs {
        let len = rows.len();
        ensure!(
            len < prompt.max(1),
            "request {request}: {len} log-probabilities of a prompt of {prompt} tokens"
        );
    }
    let cached = output.num_cached_tokens;
    ensure!(cached <= prompt, "request {request}: {cached} cached tokens of a prompt of {prompt}");
    if let Some(routed) = &output.routed_experts {
        let Some(moe) = &info.moe else { bail!("request {request}: experts of a model without any") };
        let checked = routed.check(routed.tokens(), moe.layers.len(), moe.top_k, moe.num_experts);
        checked.with_context(|| format!("request {request}"))?;
    }
    Ok(())
}

/// Fails unless these can be expert counts of a step of this model.
///
/// # Errors
/// The field that is wrong.
pub(super) fn check_load(load: &StepLoad, info: &ModelInfo) -> Result<()> {
    let (layers, experts) = info.moe.as_ref().map_or((0, 0), |moe| (moe.layers.len(), moe.num_experts));
    let got = (load.counts.layers(), load.counts.experts());
    ensure!(
        got == (layers, experts),
        "counts of {got:?} layers and experts, expected {:?}",
        (layers, experts)
    );
    for rows in [load.decode_rows, load.prefill_rows] {
        ensure!(rows <= MAX_STEP_TOKENS, "a step of {rows} rows, expected at most {MAX_STEP_TOKENS}");
    }
    Ok(())
}

/// Fails unless these can be counters of an engine of this model.
///
/// # Errors
/// The field that is wrong.
pub(super) fn check_stats(stats: &Stats, info: &ModelInfo) -> Result<()> {
    ensure!(stats.seconds.is_finite() && stats.seconds >= 0.0, "{} seconds", stats.seconds);
    let times = [&stats.time_to_first_token, &stats.inter_token_latency];
    ensure!(times.iter().all(|times| times.is_valid()), "times in buckets that there are not");
    let (layers, experts) = info.moe.as_ref().map_or((0, 0), |moe| (moe.layers.len(), moe.num_experts));
    let load = &stats.expert_load;
    let fits = load.is_empty() || load.len() == layers && load.iter().all(|counts| counts.len() == experts);
    ensure!(fits, "loads of {} layers, expected {layers} of {experts} experts", load.len());
    Ok(())
}

/// One reply of each kind, for tests with altered replies.
#[cfg(test)]
pub(crate) fn examples_of_replies() -> Vec<Vec<u8>> {
    use moe_layer::{ExpertHeat, MoveStatus};

    use super::serve::Stepped;
    let counts = ExpertHeat::new(1, 4);
    let load = StepLoad { step: 1, decode_rows: 2, prefill_rows: 3, counts };
    let output = Output { routed_experts: None, ..tests::output() };
    let stepped = Stepped { outputs: vec![output], loads: vec![load], idle: true };
    let replies = [
        Reply::Started(64),
        Reply::Refused("no memory".to_string()),
        Reply::Stepped(stepped),
        Reply::Moved(MoveStatus::RolledBack(vec!["late".to_string()])),
        Reply::Stats(Box::new(Stats { expert_load: vec![vec![1; 4]], ..Stats::default() })),
    ];
    replies.iter().map(|reply| crate::parallel::wire::encode(reply).unwrap_or_default()).collect()
}

#[cfg(test)]
mod tests {
    use model_runtime::sampling::TokenLogprob;
    use model_runtime::{MoeInfo, RoutedExperts};
    use moe_layer::ExpertHeat;

    use super::*;
    use crate::engine::{FinishReason, RequestId};
    use crate::testing::small_model;

    fn info() -> ModelInfo {
        ModelInfo { moe: Some(MoeInfo { layers: vec![0, 1], num_experts: 4, top_k: 2 }), ..small_model(64) }
    }

    pub(super) fn output() -> Output {
        let one = |token_id| TokenLogprob { token_id, logprob: -1.0, rank: 1 };
        let logprobs = TokenLogprobs { chosen: one(7), top: vec![one(7), one(99)] };
        Output {
            request: RequestId(3),
            choice: 0,
            token_id: Some(7),
            text: String::new(),
            prompt_logprobs: Some(vec![logprobs.clone(); 4]),
            logprobs: Some(logprobs),
            finish: Some(FinishReason::Length),
            routed_experts: Some(RoutedExperts::from_ids(1, 2, 2, vec![0, 1, 3, 2]).unwrap()),
            num_cached_tokens: 5,
        }
    }

    #[test]
    fn every_field_of_an_output_is_checked() {
        let check = |output: &Output, prompt| check_output(output, prompt, &info());
        check(&output(), Some(5)).unwrap();
        assert!(check(&output(), None).is_err());
        let alter: [fn(&mut Output); 9] = [
            |o| o.token_id = Some(100),
            |o| (o.token_id, o.finish) = (None, None),
            |o| o.token_id = Some(8),
            |o| o.logprobs.as_mut().unwrap().top[1].token_id = 100,
            |o| o.prompt_logprobs.as_mut().unwrap()[3].chosen.token_id = u32::MAX,
            |o| o.prompt_logprobs.as_mut().unwrap().extend(Vec::from_iter(o.logprobs.clone())),
            |o| o.num_cached_tokens = 6,
            |o| o.routed_experts = Some(RoutedExperts::from_ids(1, 2, 2, vec![0, 4, 3, 2]).unwrap()),
            |o| o.routed_experts = Some(RoutedExperts::from_ids(1, 1, 2, vec![0, 1]).unwrap()),
        ];
        for (number, alter) in alter.into_iter().enumerate() {
            let mut output = output();
            alter(&mut output);
            assert!(check(&output, Some(5)).is_err(), "{number}");
        }
    }

    #[test]
    fn counts_and_counters_are_of_this_model() {
        let load = |layers, experts, rows| {
            let counts = ExpertHeat::new(layers, experts);
            check_load(&StepLoad { step: 0, decode_rows: rows, prefill_rows: 0, counts }, &info())
        };
        assert!(load(2, 4, 9).is_ok());
        assert!(load(1, 4, 9).is_err() && load(2, 3, 9).is_err() && load(2, 4, usize::MAX).is_err());
        let stats = |seconds, layers| {
            let expert_load = vec![vec![0; 4]; layers];
            check_stats(&Stats { seconds, expert_load, ..Stats::default() }, &info())
        };
        assert!(stats(1.0, 2).is_ok() && stats(1.0, 0).is_ok());
        assert!(stats(f64::NAN, 2).is_err() && stats(-1.0, 0).is_err() && stats(1.0, 3).is_err());
    }
}
