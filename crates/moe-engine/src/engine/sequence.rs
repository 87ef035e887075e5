//! One choice of a request: its tokens, and how many of them are computed.

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
use super::states::{FreeStates, PrefixStart, SequenceState};
use super::text::TextOutput;
use crate::structured::{Constraint, Grammar, Mask};

/// The data of a request that was checked.
pub(super) struct Checked {
    /// The length at which its sequences end.
    pub max_len: usize,
    /// The grammar of its text.
    pub grammar: Option<Arc<Grammar>>,
    /// The words that must not occur in its text.
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
    /// Number of tokens whose keys and values are in the cache, or will be after the running steps.
    pub computed: usize,
    pub blocks: SequenceBlocks,
    /// Its recurrent state while it runs, where layers keep any.
    pub state: Option<SequenceState>,
    /// The prefixes of its announced blocks.
    pub chain: Vec<PrefixId>,
    /// Set when it first runs.
    pub num_cached_tokens: Option<usize>,
    pub text: Option<TextOutput>,
    /// The constraint of its text. It is locked, because several threads compute masks.
    pub constraint: Option<Mutex<Constraint>>,
    /// The words that must not occur in its text.
    pub bad_words: Option<Arc<BadWords>>,
    pub routed: Option<RoutedExperts>,
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Whether the log-probabilities of the prompt were already returned.
    pub prompt_logprobs_given: bool,
    pub added: Instant,
    pub last_token: Option<Instant>,
}

impl Sequence {
    /// Tokens that wait to be computed; 0 while it only waits for a token in flight.
    pub fn remaining(&self) -> usize {
        if self.request.scores_only() {
            // The last token has no next token to score.
            return self.prompt_len() - 1 - self.computed;
        }
        if self.tokens.len() >= self.max_len { 0 } else { self.tokens.len() - self.computed }
    }

    /// How many of `want` rows are in the next step, so that it ends where its recurrent state is saved.
    pub fn rows(&self, want: usize, block_size: usize) -> usize {
        self.state.as_ref().map_or(want, |state| state.rows(self.computed, want, block_size))
    }

    pub fn prompt_len(&self) -> usize {
        self.request.prompt.len()
    }

    /// The largest number of tokens that it can generate.
    pub fn most_output(&self) -> usize {
        self.max_len - self.prompt_len()
    }

    /// Whether it has run; it may be waiting again.
    pub fn has_run(&self) -> bool {
        self.num_cached_tokens.is_some()
    }

    /// Number of tokens generated, in flight or known.
    pub fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len()
    }

    /// The tokens that it has generated before an output position. The last token may be one that the step before has
    /// sampled and that was not collected yet; then it is in `before`. A token that could not be sampled counts as 0,
    /// as in that step.
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

    /// The tokens that may follow `output`; `None` for all of them. After an output that has ended, or whose text is
    /// complete, all tokens may follow, because the token that is sampled there is dropped.
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

    /// The reason to end after the token of an output position, if the text is complete or has failed.
    pub fn end_of_grammar(&mut self, position: usize) -> Option<FinishReason> {
        let output = self.request.prompt.len()..self.request.prompt.len() + position + 1;
        let constraint = self.constraint.as_mut()?.get_mut().unwrap_or_else(PoisonError::into_inner);
        match constraint.is_complete(self.tokens.get(output)?) {
            Ok(complete) => complete.then_some(FinishReason::Stop(StopReason::EndOfSequence)),
            Err(reason) => Some(FinishReason::Failed(format!("structured_output: {reason}"))),
        }
    }

    /// Whether its tokens may come from the prefix cache. If their computation is recorded, the model must compute
    /// them.
    pub fn reads_prefixes(&self) -> bool {
        let r = &self.request;
        let scores = r.prompt_logprobs.is_some() && self.wants_prompt_logprobs();
        !r.capture_routing && r.replay_routing.is_none() && !scores
    }

    /// Whether others may take its blocks. If its experts are dictated, keys and values do not follow from its tokens.
    pub fn writes_prefixes(&self) -> bool {
        self.request.replay_routing.is_none()
    }

    /// Whether log-probabilities of its prompt are still to be computed.
    pub fn wants_prompt_logprobs(&self) -> bool {
        let first = self.key.1 == 0;
        let prompt = self.prompt_len();
        first && self.request.prompt_logprobs.is_some() && self.prompt_logprobs.len() + 1 < prompt
    }

    /// Its part of a step, with at least one new row.
    pub fn step(&self, rows: usize) -> SequenceStep<'_> {
        let end = self.computed + rows;
        let targets = self.computed + 1..(end + 1).min(self.prompt_len());
        let scored = self.request.prompt.get(targets).filter(|_| self.wants_prompt_logprobs());
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

    /// Copies the experts of a part's rows, whose first row has position `start`. Positions that are computed again get
    /// the same experts.
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

    /// Number of tokens in the full blocks that it has in common with another sequence and may take from the prefix
    /// cache.
    pub fn common_prefix(&self, other: &Self, block_size: usize) -> usize {
        let usable = &self.tokens[..self.tokens.len() - 1];
        let blocks = usable.chunks_exact(block_size).zip(other.tokens.chunks_exact(block_size));
        block_size * blocks.take_while(|(own, others)| own == others).count()
    }

    /// Takes the blocks of its longest cached prefix; where layers keep recurrent states (`needs_state`), of the
    /// longest one whose state is saved. At least one token remains to be computed.
    pub fn take_prefix(
        &mut self,
        root: PrefixId,
        block_size: usize,
        needs_state: bool,
        allocator: &mut BlockAllocator,
    ) -> PrefixStart {
        if !self.reads_prefixes() || self.computed > 0 || !self.blocks.as_slice().is_empty() {
            return PrefixStart::default();
        }
        let blocks = self.tokens[..self.tokens.len() - 1].chunks_exact(block_size);
        let mut parent = root;
        let mut start = PrefixStart::default();
        for tokens in blocks.clone() {
            let Some(known) = allocator.known(parent, tokens) else { break };
            start.known += block_size;
            parent = known.id;
            if known.saved.is_some() || !needs_state {
                start.tokens = start.known;
                start.saved = known.saved;
            }
        }
        if let Some(place) = start.saved {
            allocator.use_state(place);
        }
        for tokens in blocks.take(start.tokens / block_size) {
            let parent = self.chain.last().copied().unwrap_or(root);
            let Some((block, prefix)) = allocator.share(parent, tokens) else { break };
            self.blocks.push(block);
            self.chain.push(prefix);
            self.computed += block_size;
        }
        start
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
            let end = self.chain.len() * block_size;
            if let Some(place) = self.state.as_mut().and_then(|state| state.saved_place(end)) {
                allocator.keep_state(parent, tokens, place);
            }
        }
        Ok(())
    }

    /// Gives its blocks and its state back. Its tokens must then be computed again.
    pub fn release(&mut self, allocator: &mut BlockAllocator, states: &mut FreeStates) -> Result<()> {
        self.blocks.release(allocator)?;
        if let Some(mut state) = self.state.take() {
            state.end(allocator);
            states.put_back(state);
        }
        self.chain.clear();
        self.computed = 0;
        Ok(())
    }
}
