//! The effect of a new token on its sequence, and the ends of sequences.

use std::sync::Arc;
use std::time::Instant;

use model_runtime::sampling::{Sampled, SamplingError, TokenLogprobs};

use super::Engine;
use super::bad_words::{self, BadWords};
use super::plan::{Key, Part};
use super::request::{FinishReason, Output, Request, RequestError, RequestId, StopReason};
use super::sequence::{Checked, Sequence};
use crate::error::Result;
use crate::structured::Grammar;

/// The largest number of choices in a request.
const MAX_CHOICES: usize = 16384;

impl Engine<'_> {
    /// Whether a request can run.
    pub(super) fn check(&self, request: &Request) -> Result<Checked, RequestError> {
        let prompt = &request.prompt;
        let vocab_size = self.info.vocab_size;
        let max_model_len = self.max_model_len;
        request.check_prompt(vocab_size, max_model_len)?;
        request.check_parameters(vocab_size)?;
        if !request.stop.is_empty() && self.tokenizer.is_none() {
            return refuse("stop", "empty without a tokenizer", format!("{:?}", request.stop));
        }
        self.check_routing(request)?;
        // The requested tokens must fit the KV cache. Without a requested number the answer gets all the room that
        // there is.
        let asked =
            request.max_tokens.map_or(0, |max| prompt.len().saturating_add(max).min(self.context_len));
        if asked > max_model_len {
            // The last token of a sequence is never written to the cache. The cache of another rank may be the
            // smallest.
            let block_size = self.block_size;
            let [needed, blocks] = [asked, max_model_len].map(|len| (len - 1).div_ceil(block_size));
            return Err(RequestError::KvCacheTooSmall { tokens: asked, needed, blocks, block_size });
        }
        let max_len = if request.max_tokens.is_some() { asked } else { max_model_len };
        Ok(Checked { max_len, grammar: self.grammar(request)?, bad_words: self.bad_words(request)? })
    }

    fn bad_words(&self, request: &Request) -> Result<Option<Arc<BadWords>>, RequestError> {
        match (&request.bad_words[..], &self.bad_words) {
            ([], _) => Ok(None),
            (words, Some(lists)) => lists.prepare(words, request.skip_special_tokens).map(Some),
            (words, None) => refuse("bad_words", "empty without a tokenizer", format!("{words:?}")),
        }
    }

    fn grammar(&self, request: &Request) -> Result<Option<Arc<Grammar>>, RequestError> {
        match (&request.structured_output, &self.grammars) {
            (None, _) => Ok(None),
            (Some(output), Some(grammars)) => Ok(Some(grammars.compile(output)?)),
            (Some(_), None) => refuse("structured_output", "left out without a tokenizer", "some"),
        }
    }

    fn check_routing(&self, request: &Request) -> Result<(), RequestError> {
        let Some(moe) = &self.info.moe else {
            return match request.capture_routing || request.replay_routing.is_some() {
                true => refuse("capture or replay of routing", "off: the model has no experts", "on"),
                false => Ok(()),
            };
        };
        let Some(replay) = &request.replay_routing else { return Ok(()) };
        let layers = moe.layers.len();
        let top_k = moe.top_k;
        let experts = moe.num_experts;
        if (replay.layers(), replay.top_k()) != (layers, top_k) {
            let expected = format!("[T, {layers}, {top_k}] (MoE layers, experts per token)");
            return refuse(
                "routed_experts",
                expected,
                format!("[T, {}, {}]", replay.layers(), replay.top_k()),
            );
        }
        if self.runner.force_balance.is_some() {
            let expected = "left out with `force_balance`, which dictates the experts too";
            return refuse("routed_experts", expected, "some");
        }
        match replay.check(replay.tokens(), layers, top_k, experts) {
            Err(fault) => refuse("routed_experts", format!("ids below {experts}, each once in a row"), fault),
            Ok(()) => Ok(()),
        }
    }

    /// Ends requests whose time is over.
    pub(super) fn end_late_requests(&mut self) -> Result<()> {
        if self.deadlines.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        let late: Vec<u64> = self.deadlines.iter().filter(|(_, d)| **d <= now).map(|(id, _)| *id).collect();
        late.into_iter().try_for_each(|id| self.end_request(id, &FinishReason::TimedOut))
    }

    /// Ends all choices of a request.
    pub(super) fn end_request(&mut self, id: u64, reason: &FinishReason) -> Result<()> {
        self.deadlines.remove(&id);
        let sequences = self.scheduler.running.iter().chain(&self.scheduler.waiting);
        let mut keys: Vec<Key> = sequences.map(|s| s.key).filter(|key| key.0 == id).collect();
        keys.sort_unstable();
        let mut ended = std::mem::take(&mut self.ended);
        for key in keys {
            self.end(key, reason.clone(), String::new(), None, &mut ended)?;
        }
        self.ended = ended;
        Ok(())
    }

    /// Ends a request that this engine cannot run, before it has begun.
    pub(super) fn end_refused(&mut self, request: RequestId, choices: usize, why: &RequestError) {
        let finish = FinishReason::Failed(why.to_string());
        self.ended.extend((0..choices).map(|choice| without_tokens(request, choice, finish.clone())));
    }

    /// Ends a choice that has nothing to compute.
    pub(super) fn end_at_once(&mut self, request: RequestId, choice: usize) {
        let ended = without_tokens(request, choice, FinishReason::Length);
        let prompt_logprobs = (choice == 0).then(Vec::new);
        self.ended.push(Output { prompt_logprobs, ..ended });
        self.stats.finished += 1;
    }

    pub(super) fn accept_prompt_logprobs(
        &mut self,
        part: &Part,
        logprobs: Result<Vec<TokenLogprobs>, SamplingError>,
        outputs: &mut Vec<Output>,
    ) -> Result<()> {
        let Some(sequence) = self.scheduler.get_mut(part.key) else { return Ok(()) };
        match logprobs {
            // Rows that are computed again after a preemption are already known.
            Ok(rows) => {
                let known = sequence.prompt_logprobs.len().saturating_sub(part.start);
                sequence.prompt_logprobs.extend(rows.into_iter().skip(known));
                match sequence.request.scores_only() && !sequence.wants_prompt_logprobs() {
                    true => self.end(part.key, FinishReason::Length, String::new(), None, outputs),
                    false => Ok(()),
                }
            }
            Err(e) => self.end(part.key, FinishReason::Failed(e.to_string()), String::new(), None, outputs),
        }
    }

    /// A sequence gets the token of output position `position`.
    pub(super) fn accept(
        &mut self,
        key: Key,
        position: usize,
        sampled: Result<Sampled, SamplingError>,
        outputs: &mut Vec<Output>,
    ) -> Result<()> {
        // If the sequence has ended, steps that are still running are ignored.
        let Some(sequence) = self.scheduler.get_mut(key) else { return Ok(()) };
        let sampled = match sampled {
            Ok(sampled) => sampled,
            Err(e) => {
                return self.end(key, FinishReason::Failed(e.to_string()), String::new(), None, outputs);
            }
        };
        let at = sequence.prompt_len() + position;
        if let Some(token) = sequence.tokens.get_mut(at) {
            *token = sampled.token_id;
            sequence.in_flight -= 1;
        }
        let now = Instant::now();
        self.stats.add_token(sequence.added, sequence.last_token.replace(now), now);

        let mut finish = stop_reason(sequence, sampled.token_id, position).map(FinishReason::Stop);
        let mut text = String::new();
        if let (Some(output), Some(tokenizer)) = (&mut sequence.text, &self.tokenizer) {
            let shown = finish.is_none() || sequence.request.include_stop_str_in_output;
            if shown {
                let may_stop = position + 1 > sequence.request.min_tokens;
                let (piece, stopped) = output.push(tokenizer, sampled.token_id, may_stop)?;
                text = piece;
                finish = finish.or(stopped.map(|stop| FinishReason::Stop(StopReason::Text(stop))));
            }
        }
        if finish.is_none() {
            finish = sequence.end_of_grammar(position);
        }
        if finish.is_none() && at + 1 >= sequence.max_len {
            finish = Some(FinishReason::Length);
        }
        if let Some(finish) = finish {
            return self.end(key, finish, text, Some(sampled), outputs);
        }
        outputs.push(news(sequence, Some(sampled), text, None));
        Ok(())
    }

    /// Ends a sequence and reports it, with the token that ended it.
    fn end(
        &mut self,
        key: Key,
        finish: FinishReason,
        mut text: String,
        token: Option<Sampled>,
        outputs: &mut Vec<Output>,
    ) -> Result<()> {
        let Some(mut sequence) = self.scheduler.remove(key)? else { return Ok(()) };
        let cut = matches!(finish, FinishReason::Stop(StopReason::Text(_)));
        if let (Some(output), Some(tokenizer), false) = (&mut sequence.text, &self.tokenizer, cut) {
            text += &output.finish(tokenizer)?;
        }
        if !self.scheduler.running.iter().chain(&self.scheduler.waiting).any(|s| s.key.0 == key.0) {
            self.deadlines.remove(&key.0);
        }
        self.stats.finished += 1;
        outputs.push(news(&mut sequence, token, text, Some(finish)));
        Ok(())
    }
}

impl Request {
    /// Checks the prompt for a model with this vocabulary, and for sequences of at most `max_model_len` tokens.
    ///
    /// # Errors
    /// The prompt has no token, too many tokens, or a token that is not in the vocabulary.
    pub fn check_prompt(&self, vocab_size: usize, max_model_len: usize) -> Result<(), RequestError> {
        let prompt = &self.prompt;
        if prompt.is_empty() {
            return Err(RequestError::EmptyPrompt);
        }
        if prompt.len() > max_model_len.saturating_sub(usize::from(!self.scores_only())) {
            return Err(RequestError::PromptTooLong { len: prompt.len(), max_model_len });
        }
        match prompt.iter().position(|&id| id as usize >= vocab_size) {
            Some(position) => {
                Err(RequestError::UnknownToken { position, token_id: prompt[position], vocab_size })
            }
            None => Ok(()),
        }
    }

    /// Checks that the parameters are in their ranges, whatever the prompt is. This needs no loaded model.
    ///
    /// # Errors
    /// The first parameter that is out of its range.
    pub fn check_parameters(&self, vocab_size: usize) -> Result<(), RequestError> {
        self.sampling.validate(vocab_size)?;
        if !(1..=MAX_CHOICES).contains(&self.n) {
            return refuse("n", "from 1 to 16384", self.n);
        }
        if self.max_tokens == Some(0) && self.prompt_logprobs.is_none() {
            return refuse("max_tokens", "at least 1, or 0 with prompt_logprobs", 0);
        }
        if let Some(max) = self.max_tokens.filter(|max| *max < self.min_tokens) {
            return refuse("min_tokens", format!("at most max_tokens = {max}"), self.min_tokens);
        }
        if self.stop.iter().any(String::is_empty) {
            return refuse("stop", "texts that are not empty", "an empty one");
        }
        bad_words::check(&self.bad_words)
    }
}

/// The last output of a choice that has computed nothing.
fn without_tokens(request: RequestId, choice: usize, finish: FinishReason) -> Output {
    Output {
        request,
        choice,
        token_id: None,
        text: String::new(),
        logprobs: None,
        prompt_logprobs: None,
        finish: Some(finish),
        routed_experts: None,
        num_cached_tokens: 0,
    }
}

fn refuse<T>(
    name: &'static str,
    expected: impl Into<String>,
    got: impl std::fmt::Display,
) -> Result<T, RequestError> {
    Err(RequestError::Parameter { name, expected: expected.into(), got: got.to_string() })
}

/// The new output of a sequence.
fn news(
    sequence: &mut Sequence,
    token: Option<Sampled>,
    text: String,
    finish: Option<FinishReason>,
) -> Output {
    let (token_id, logprobs) = token.map(|token| (token.token_id, token.logprobs)).unzip();
    Output {
        request: RequestId(sequence.key.0),
        choice: sequence.key.1,
        token_id,
        text,
        logprobs: logprobs.flatten(),
        prompt_logprobs: take_prompt_logprobs(sequence),
        routed_experts: finish.as_ref().and_then(|_| sequence.routed.take()),
        finish,
        num_cached_tokens: sequence.num_cached_tokens.unwrap_or(0),
    }
}

/// The prompt's log-probabilities, once they are complete.
fn take_prompt_logprobs(sequence: &mut Sequence) -> Option<Vec<TokenLogprobs>> {
    let ready = sequence.key.1 == 0
        && sequence.request.prompt_logprobs.is_some()
        && !sequence.wants_prompt_logprobs()
        && !sequence.prompt_logprobs_given;
    ready.then(|| {
        sequence.prompt_logprobs_given = true;
        sequence.prompt_logprobs.clone()
    })
}

/// Why a token ends its sequence.
fn stop_reason(sequence: &Sequence, token: u32, position: usize) -> Option<StopReason> {
    let request = &sequence.request;
    if position < request.min_tokens {
        return None;
    }
    if !request.ignore_eos && request.eos_token_ids.contains(&token) {
        return Some(StopReason::EndOfSequence);
    }
    request.stop_token_ids.contains(&token).then_some(StopReason::Token(token))
}
