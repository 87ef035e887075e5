//! The running requests: admission, the next step, what becomes of its tokens.

use std::collections::VecDeque;
use std::ops::ControlFlow;

use candle_core::{Result, bail};

use super::prompt::check_prompt;
use super::{FinishReason, GenerateOptions, GenerateRequest, Generated, TokenEvent};
use crate::blocks::{BlockAllocator, SequenceBlocks};
use crate::kv_cache::KvCache;
use crate::model::ModelInfo;
use crate::sampling::SampleRow;
use crate::step::{LogitsRows, SequenceStep, Step};

/// A running request.
struct Running<'a> {
    index: usize,
    request: &'a GenerateRequest,
    /// Prompt and generated tokens.
    tokens: Vec<u32>,
    /// The length at which it ends.
    longest: usize,
    /// Tokens whose keys and values are in the cache, or will be after the step under way.
    computed: usize,
    blocks: SequenceBlocks,
    finished: bool,
}

impl Running<'_> {
    fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// Its part in a step of `rows` more rows: at least one.
    fn sequence_step(&self, rows: usize) -> SequenceStep<'_> {
        let end = self.computed + rows;
        SequenceStep {
            token_ids: &self.tokens[self.computed..end],
            start: self.computed,
            prompt_len: self.request.prompt.len(),
            blocks: self.blocks.as_slice(),
            logits: if end == self.tokens.len() { LogitsRows::Last } else { LogitsRows::None },
        }
    }
}

pub(super) struct Batch<'a> {
    requests: &'a [GenerateRequest],
    options: GenerateOptions,
    block_size: usize,
    max_model_len: usize,
    waiting: VecDeque<usize>,
    running: Vec<Running<'a>>,
    allocator: BlockAllocator,
    outputs: Vec<Generated>,
}

impl<'a> Batch<'a> {
    /// Checks every request, so that nothing runs if one is wrong.
    pub fn new(
        info: &ModelInfo,
        requests: &'a [GenerateRequest],
        options: &GenerateOptions,
        kv: &KvCache,
    ) -> Result<Self> {
        if options.max_step_tokens == 0 || options.max_num_seqs == 0 {
            bail!("generate: max_step_tokens and max_num_seqs must be at least 1, got {options:?}")
        }
        let output = |_| Generated { token_ids: Vec::new(), finish_reason: FinishReason::Length };
        let batch = Self {
            requests,
            options: *options,
            block_size: kv.block_size(),
            max_model_len: options.max_model_len.unwrap_or(info.max_context_len),
            waiting: (0..requests.len()).collect(),
            running: Vec::new(),
            allocator: BlockAllocator::new(kv.num_blocks())?,
            outputs: requests.iter().map(output).collect(),
        };
        for (i, request) in requests.iter().enumerate() {
            if let Err(e) = batch.check(request, info.vocab_size) {
                bail!("request {i}: {e}")
            }
        }
        Ok(batch)
    }

    fn check(&self, request: &GenerateRequest, vocab_size: usize) -> Result<()> {
        check_prompt(&request.prompt, vocab_size, self.max_model_len)?;
        request.sampling.validate(vocab_size)?;
        let blocks = (self.longest(request) - 1).div_ceil(self.block_size);
        if blocks > self.allocator.num_blocks() {
            bail!(
                "it needs {blocks} KV blocks of {} tokens, the cache has {}; enlarge it or shorten the request",
                self.block_size,
                self.allocator.num_blocks()
            )
        }
        Ok(())
    }

    /// The most tokens that a request can come to. The last one is never written to the cache.
    fn longest(&self, request: &GenerateRequest) -> usize {
        request.prompt.len().saturating_add(request.max_new_tokens).min(self.max_model_len)
    }

    /// Starts requests in order while their blocks fit. `false` when nothing is left to run.
    pub fn admit(&mut self) -> bool {
        while self.running.len() < self.options.max_num_seqs
            && let Some(&index) = self.waiting.front()
            && let Some(request) = self.requests.get(index)
        {
            if request.max_new_tokens > 0 {
                let longest = self.longest(request);
                let mut blocks = SequenceBlocks::new();
                if !blocks.reserve(longest - 1, self.block_size, &mut self.allocator) {
                    break;
                }
                let tokens = request.prompt.clone();
                self.running.push(Running {
                    index,
                    request,
                    tokens,
                    longest,
                    computed: 0,
                    blocks,
                    finished: false,
                });
            }
            self.waiting.pop_front();
        }
        !self.running.is_empty()
    }

    /// The next step: every request that decodes, then prompts while rows are left. Also returns
    /// which running requests get a token from it, in the order of its logits.
    pub fn step(&mut self) -> Result<(Step, Vec<usize>)> {
        let mut budget = self.options.max_step_tokens;
        let mut rows = vec![0; self.running.len()];
        // Decoding first, so that long prompts do not stall those who are answering.
        for decoding in [true, false] {
            for (rows, r) in rows.iter_mut().zip(&self.running) {
                if (r.generated() > 0) == decoding {
                    *rows = (r.tokens.len() - r.computed).min(budget);
                    budget -= *rows;
                }
            }
        }
        let active = self.running.iter().zip(&rows).filter(|&(_, &rows)| rows > 0);
        let step = Step::new(active.map(|(r, &rows)| r.sequence_step(rows)), self.block_size)?;
        let mut sampled = Vec::new();
        for (i, (r, rows)) in self.running.iter_mut().zip(rows).enumerate() {
            r.computed += rows;
            if rows > 0 && r.computed == r.tokens.len() {
                sampled.push(i);
            }
        }
        Ok((step, sampled))
    }

    /// How the next token of a running request is sampled.
    pub fn sample_row(&self, running: usize) -> SampleRow<'_> {
        let r = &self.running[running];
        let (prompt, output) = r.tokens.split_at(r.request.prompt.len());
        SampleRow { params: &r.request.sampling, prompt, output, banned: &[] }
    }

    /// Appends a token to a running request and shows it to the caller.
    pub fn accept(
        &mut self,
        running: usize,
        token_id: u32,
        on_token: &mut impl FnMut(TokenEvent) -> ControlFlow<()>,
    ) {
        let r = &mut self.running[running];
        let position = r.generated();
        r.tokens.push(token_id);
        let mut finish_reason = if r.request.stop_ids.contains(&token_id) {
            Some(FinishReason::Stop)
        } else if r.tokens.len() >= r.longest {
            Some(FinishReason::Length)
        } else {
            None
        };
        let event = TokenEvent { request: r.index, position, token_id, finish_reason };
        if on_token(event).is_break() {
            finish_reason = finish_reason.or(Some(FinishReason::Cancelled));
        }
        if let Some(finish_reason) = finish_reason {
            r.finished = true;
            let token_ids = r.tokens.split_off(r.request.prompt.len());
            self.outputs[r.index] = Generated { token_ids, finish_reason };
        }
    }

    /// Gives the blocks of finished requests back.
    pub fn retire(&mut self) -> Result<()> {
        for r in self.running.iter_mut().filter(|r| r.finished) {
            r.blocks.release(&mut self.allocator)?;
        }
        self.running.retain(|r| !r.finished);
        Ok(())
    }

    /// The results, in the order of requests.
    pub fn into_outputs(self) -> Vec<Generated> {
        self.outputs
    }
}
