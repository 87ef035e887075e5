//! One choice of a request: its tokens, and how far they are computed.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use candle_core::{Result, bail};
use model_runtime::sampling::TokenLogprobs;
use model_runtime::{
    BlockAllocator, LogitsRows, PrefixId, RoutedExperts, SamplingParams, SequenceBlocks, SequenceStep,
};

use super::bad_words::BadWords;
use super::plan::{IN_FLIGHT, Key, StepResult};
use super::request::{FinishReason, Request, StopReason};
use super::text::TextOutput;
use crate::structured::{Constraint, Grammar, Mask};

/// What is known of a request that can run.
pub(super) struct Checked {
    /// The length at which its sequences end.
    pub max_len: usize,
    /// What their text follows.
    pub grammar: Option<Arc<Grammar>>,
    /// What their text must not hold.
    pub bad_words: Option<Arc<BadWords>>,
}

pub(super) struct Sequence {
    pub key: Key,
    pub request: Arc<Request>,
    /// The request's parameters with the seed of this choice.
    pub sampling: SamplingParams,
    /// Prompt and generated tokens; those at the end may be [`IN_FLIGHT`].
    pub tokens: Vec<u32>,
    /// Tokens at the end that are in flight.
    pub in_flight: usize,
    /// The length at which it ends.
    pub max_len: usize,
    /// Tokens whose keys and values are in the cache, or will be after the steps under way.
    pub computed: usize,
    pub blocks: SequenceBlocks,
    /// The prefixes of its announced blocks.
    pub chain: Vec<PrefixId>,
    /// Set when it first runs.
    pub num_cached_tokens: Option<usize>,
    pub text: Option<TextOutput>,
    /// What its text follows. Locked, for the threads that compute masks.
    pub constraint: Option<Mutex<Constraint>>,
    /// What its text must not hold.
    pub bad_words: Option<Arc<BadWords>>,
    pub routed: Option<RoutedExperts>,
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// They are handed out once.
    pub prompt_logprobs_given: bool,
    pub added: Instant,
    pub last_token: Option<Instant>,
}

impl Sequence {
    /// Tokens that wait to be computed; 0 while it only waits for a token in flight.
    pub fn remaining(&self) -> usize {
        if self.request.scores_only() {
            // The last token has nothing behind it to score.
            return self.prompt_len() - 1 - self.computed;
        }
        if self.tokens.len() >= self.max_len { 0 } else { self.tokens.len() - self.computed }
    }

    pub fn prompt_len(&self) -> usize {
        self.request.prompt.len()
    }

    /// Tokens that it can generate at most.
    pub fn most_output(&self) -> usize {
        self.max_len - self.prompt_len()
    }

    /// Whether it has run, though it may be waiting again.
    pub fn has_run(&self) -> bool {
        self.num_cached_tokens.is_some()
    }

    /// Tokens generated, in flight or known.
    pub fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len()
    }

    /// What it has generated before an output position. The last token may be one that the step before has sampled
    /// and that nobody has collected yet: it is in `before`. One that could not be sampled counts as 0, as in that step.
    pub fn output(&self, position: usize, before: Option<&StepResult>) -> Result<Cow<'_, [u32]>> {
        let prompt = self.prompt_len();
        let output = &self.tokens[prompt..prompt + position];
        let known = output.iter().take_while(|id| **id != IN_FLIGHT).count();
        if known == position {
            return Ok(Cow::Borrowed(output));
        }
        match before.and_then(|result| result.sampled.get(&self.key)) {
            Some(sampled) if known + 1 == position => {
                let last = sampled.as_ref().map_or(0, |sampled| sampled.token_id);
                Ok(Cow::Owned([&output[..known], &[last]].concat()))
            }
            _ => bail!("output tokens {known} to {position} of sequence {:?} are still in flight", self.key),
        }
    }

    /// Whether a mask says which tokens may follow.
    pub fn has_mask(&self) -> bool {
        self.constraint.is_some() || self.bad_words.is_some()
    }

    /// The tokens that may follow `output`; `None` for all of them. Behind an output that has ended, or whose text is
    /// complete, all may follow, because the token that is sampled there is dropped.
    pub fn mask(&self, output: &[u32]) -> std::result::Result<Option<Mask>, String> {
        let ends: Vec<u32> = self.request.stop_ids().collect();
        if output.last().is_some_and(|last| ends.contains(last)) {
            return Ok(None);
        }
        let eos: &[u32] = if self.request.ignore_eos { &[] } else { &self.request.eos_token_ids };
        let grammar = match &self.constraint {
            Some(constraint) => {
                constraint.lock().unwrap_or_else(PoisonError::into_inner).mask(output, &ends, eos)?
            }
            None => None,
        };
        let Some(words) = &self.bad_words else { return Ok(grammar) };
        // The text of the token that ends it is left out.
        let shown: &[u32] = if self.request.include_stop_str_in_output { &[] } else { &ends };
        Ok(Some(words.mask(&self.request.prompt, output, shown, grammar)))
    }

    /// The end after the token of an output position, if the text is then complete or went wrong.
    pub fn end_of_grammar(&mut self, position: usize) -> Option<FinishReason> {
        let output = self.request.prompt.len()..self.request.prompt.len() + position + 1;
        let constraint = self.constraint.as_mut()?.get_mut().unwrap_or_else(PoisonError::into_inner);
        match constraint.is_complete(self.tokens.get(output)?) {
            Ok(complete) => complete.then_some(FinishReason::Stop(StopReason::EndOfSequence)),
            Err(reason) => Some(FinishReason::Failed(format!("structured_output: {reason}"))),
        }
    }

    /// Whether its tokens must come from the model, not from the prefix cache: somebody wants to see
    /// them computed.
    fn is_watched(&self) -> bool {
        let r = &self.request;
        r.capture_routing
            || r.replay_routing.is_some()
            || (r.prompt_logprobs.is_some() && self.wants_prompt_logprobs())
    }

    /// Whether log-probabilities of its prompt are still to be computed.
    pub fn wants_prompt_logprobs(&self) -> bool {
        let first = self.key.1 == 0;
        let prompt = self.prompt_len();
        first && self.request.prompt_logprobs.is_some() && self.prompt_logprobs.len() + 1 < prompt
    }

    /// Its part in a step of `rows` more rows: at least one.
    pub fn step(&self, rows: usize) -> SequenceStep<'_> {
        let end = self.computed + rows;
        let behind = self.computed + 1..(end + 1).min(self.prompt_len());
        let scored = self.request.prompt.get(behind).filter(|_| self.wants_prompt_logprobs());
        SequenceStep {
            token_ids: &self.tokens[self.computed..end],
            start: self.computed,
            prompt_len: self.prompt_len(),
            blocks: self.blocks.as_slice(),
            logits: if end == self.tokens.len() { LogitsRows::Last } else { LogitsRows::None },
            scored: scored.unwrap_or_default(),
        }
    }

    /// The routing to force for a position.
    pub fn replay(&self, position: usize) -> Option<(&RoutedExperts, usize)> {
        let replay = self.request.replay_routing.as_deref()?;
        (position < replay.tokens()).then_some((replay, position))
    }

    /// Copies the experts of a part's rows, of which the first has position `start`; positions that are computed again get
    /// the same ones.
    pub fn record_routing(
        &mut self,
        start: usize,
        all: &RoutedExperts,
        rows: std::ops::Range<usize>,
    ) -> Result<()> {
        let layers = all.layers();
        let top_k = all.top_k();
        let routed = match &mut self.routed {
            Some(routed) => routed,
            none => none.insert(RoutedExperts::empty(0, layers, top_k)?),
        };
        let per_token = layers * top_k;
        for (position, row) in (start..).zip(rows) {
            if position == routed.tokens() {
                let ids = all.ids()[row * per_token..(row + 1) * per_token].to_vec();
                routed.extend(&RoutedExperts::from_ids(1, layers, top_k, ids)?)?;
            }
        }
        Ok(())
    }

    /// Takes the blocks of its longest cached prefix; at least one token stays to be computed.
    pub fn take_prefix(&mut self, root: PrefixId, block_size: usize, allocator: &mut BlockAllocator) {
        if self.is_watched() || self.computed > 0 || !self.blocks.as_slice().is_empty() {
            return;
        }
        let usable = self.tokens.len() - 1;
        for tokens in self.tokens[..usable].chunks_exact(block_size) {
            let parent = self.chain.last().copied().unwrap_or(root);
            let Some((block, prefix)) = allocator.share(parent, tokens) else { break };
            self.blocks.push(block);
            self.chain.push(prefix);
            self.computed += block_size;
        }
    }

    /// Announces the blocks that have become full with known tokens.
    pub fn announce(
        &mut self,
        root: PrefixId,
        block_size: usize,
        allocator: &mut BlockAllocator,
    ) -> Result<()> {
        let known = self.computed.min(self.tokens.len() - self.in_flight);
        while (self.chain.len() + 1) * block_size <= known {
            let i = self.chain.len();
            let parent = self.chain.last().copied().unwrap_or(root);
            let Some(&block) = self.blocks.as_slice().get(i) else { break };
            let tokens = &self.tokens[i * block_size..(i + 1) * block_size];
            self.chain.push(allocator.announce(block, parent, tokens)?);
        }
        Ok(())
    }

    /// Gives its blocks back; what was computed must be computed again.
    pub fn release(&mut self, allocator: &mut BlockAllocator) -> Result<()> {
        self.blocks.release(allocator)?;
        self.chain.clear();
        self.computed = 0;
        Ok(())
    }
}
