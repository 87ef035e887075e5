//! Plain batched generation: several prompts at once, prefilled in chunks, decoded by token.
//!
//! This is the smallest program over [`CausalLm`] that still batches: requests are admitted in
//! order while their KV blocks fit, decoding rows and prompt chunks share steps, and nothing is
//! preempted. What a request generates does not depend on the others, on the chunk size or on
//! the block size.

mod batch;
mod prompt;

use std::ops::ControlFlow;

use candle_core::{DType, Result};

use moe_kernels::{Exec, Scratch};
use tracing::trace_span;

use crate::kv_cache::KvCache;
use crate::model::{CausalLm, Observer};
use crate::sampling::{SampleRow, SamplingParams, sample_rows};
use crate::step::Step;

use batch::Batch;
pub use prompt::{PromptError, check_prompt};

/// One prompt to continue.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// Token ids of the prompt; at least one.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// The most tokens to generate; the context may end earlier.
    pub max_new_tokens: usize,
    /// Ids that end the text. The stop token is part of the output.
    pub stop_ids: Vec<u32>,
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop id was generated.
    Stop,
    /// `max_new_tokens`, or the end of the context.
    Length,
    /// The caller's callback ended it.
    Cancelled,
}

/// What a request generated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The new token ids, with the stop token if there was one.
    pub token_ids: Vec<u32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
}

/// A token, as it is generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenEvent {
    /// Index of the request.
    pub request: usize,
    /// Output position, from 0.
    pub position: usize,
    /// The token.
    pub token_id: u32,
    /// Set on the request's last token.
    pub finish_reason: Option<FinishReason>,
}

/// Settings of [`generate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GenerateOptions {
    /// The most rows of a step: prompts longer than this are prefilled in chunks.
    pub max_step_tokens: usize,
    /// The most requests that run at once.
    pub max_num_seqs: usize,
    /// The longest sequence; `None` for the model's own limit.
    pub max_model_len: Option<usize>,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self { max_step_tokens: 512, max_num_seqs: 256, max_model_len: None }
    }
}

/// Executes a step on a model that runs in host memory; returns the logits, [R, V] f32.
pub fn run_step(
    model: &dyn CausalLm,
    step: &Step,
    kv: &mut KvCache,
    observer: Option<&mut dyn Observer>,
    ex: &mut Exec,
) -> Result<Scratch> {
    let vocab_size = model.info().vocab_size;
    step.check_vocab(vocab_size)?;
    ex.step.token_ids = Some(step.token_ids().into());
    let mut logits = ex.scratch(DType::F32, &[step.num_logits(), vocab_size])?;
    // The step enters the thread pool once, and not once for each op.
    let pool = ex.handle();
    pool.install(|| {
        // Inside the pool: the spans of the layers run on this thread and find their parent on it.
        let _span = trace_span!("step", tokens = step.num_tokens(), logits = step.num_logits()).entered();
        model.forward(&step.views()?, kv, logits.view_mut(), observer, ex)
    })?;
    Ok(logits)
}

/// Generates for every request; results come in the order of requests. `on_token` sees each token
/// as it is generated and may end a request with [`ControlFlow::Break`].
///
/// `kv` is used from scratch. It must hold the longest request alone; more blocks let more
/// requests run at once.
pub fn generate(
    model: &dyn CausalLm,
    requests: &[GenerateRequest],
    options: &GenerateOptions,
    kv: &mut KvCache,
    ex: &mut Exec,
    mut on_token: impl FnMut(TokenEvent) -> ControlFlow<()>,
) -> Result<Vec<Generated>> {
    let mut batch = Batch::new(model.info(), requests, options, kv)?;
    while batch.admit() {
        let (step, sampled) = batch.step()?;
        let logits = run_step(model, &step, kv, None, ex)?;
        let rows: Vec<SampleRow> = sampled.iter().map(|&r| batch.sample_row(r)).collect();
        let sample = trace_span!("sample", rows = rows.len());
        let tokens = sample.in_scope(|| sample_rows(logits.view(), &rows, ex))?;
        for (&running, token) in sampled.iter().zip(tokens) {
            batch.accept(running, token?, &mut on_token);
        }
        batch.retire()?;
    }
    Ok(batch.into_outputs())
}
