//! The offline engine: requests in, tokens and text out, many at once.
//!
//! ```text
//! add ─► waiting ─► scheduler ─► step (plain data) ─► runner ─► tokens ─► text, stop ─► outputs
//!            ▲          │                                        │
//!            └ preempted┘            KV blocks, prefix cache      └ finished: blocks given back
//! ```
//!
//! [`Engine::step`] runs one forward pass over rows of many requests and returns what is new. What
//! a request generates does not depend on the others, on the limits, on preemption or on the
//! prefix cache. A request that fails, is cancelled or runs out of time leaves the others alone.

mod bad_words;
mod balance;
mod budget;
mod capacity;
mod config;
#[cfg(feature = "cuda")]
mod device;
mod dispatch;
mod dp;
mod finish;
mod loads;
mod lost;
mod masks;
mod memory;
mod peers;
mod plan;
mod prompt_progress;
pub(crate) mod replies;
mod request;
#[cfg(feature = "cuda")]
mod routing;
mod runner;
#[cfg(feature = "cuda")]
mod sampling;
mod scheduler;
#[cfg(test)]
mod scheduler_tests;
mod scores;
mod sequence;
pub(crate) mod serve;
#[cfg(any(test, feature = "cuda"))]
mod slots;
mod start_order;
mod states;
mod stats;
mod step_memory;
mod text;
#[cfg(feature = "cuda")]
mod track;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use model_runtime::{CausalLm, Exec, KvCache, ModelInfo, SequenceBlocks};
use moe_layer::{ExpertHeat, MoveRound, MoveStatus};
use serde::{Deserialize, Serialize};
use tracing::trace_span;

use crate::error::{Context, Result};
use crate::structured::{Constraint, Grammars};
use crate::tokenizer::Tokenizer;

pub use config::{EngineConfig, SchedulingPolicy};
#[cfg(feature = "cuda")]
pub(crate) use device::DeviceRunner;
pub use dp::DpEngine;
pub use lost::Unfinished;
pub(crate) use memory::available as available_memory;
pub use memory::host as host_memory;
pub use prompt_progress::PromptProgress;
pub use request::{FinishReason, Output, Request, RequestError, RequestId, StopReason};
pub(crate) use serve::serve;
pub use stats::{Histogram, SavedStates, Stats};

use bad_words::BadWordLists;
use budget::MixedLimit;
use capacity::Capacity;
use plan::StepResult;
use runner::Runner;
use scheduler::{Limits, Scheduler};
use sequence::{Checked, Sequence};
use text::TextOutput;

/// The tokenizer, which makes text of tokens, and the grammars to which texts are restricted.
type Texts = (Option<Tokenizer>, Option<Arc<Grammars>>);

/// Runs requests on a model.
///
#[doc = include_str!("example.md")]
pub struct Engine<'m> {
    info: &'m ModelInfo,
    tokenizer: Option<Tokenizer>,
    /// Compiled grammars of structured output, for the tokenizer.
    grammars: Option<Arc<Grammars>>,
    /// Prepares the bad words of requests, for the tokenizer.
    bad_words: Option<BadWordLists>,
    /// The requested length of the longest sequence, and the length of the longest that the KV cache holds.
    context_len: usize,
    max_model_len: usize,
    block_size: usize,
    scheduler: Scheduler,
    runner: Runner<'m>,
    next_id: u64,
    /// The times at which requests with a timeout must end.
    deadlines: BTreeMap<u64, Instant>,
    /// Outputs of sequences that ended between steps.
    ended: Vec<Output>,
    start: Instant,
    stats: Stats,
    /// Expert counts of steps that were not taken yet.
    step_loads: Vec<StepLoad>,
    /// Whether other ranks take part in every step.
    lockstep: bool,
}

/// How often each expert was chosen in one step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepLoad {
    /// Number of the step, from 0.
    pub step: u64,
    /// Number of rows that were the newest token of a sequence.
    pub decode_rows: usize,
    /// Number of rows of prompts (or of tokens that are computed again).
    pub prefill_rows: usize,
    /// The counts.
    pub counts: ExpertHeat,
}

impl<'m> Engine<'m> {
    /// An engine on a model. Without a tokenizer outputs have no text, and stop strings and structured output are
    /// refused. It writes no trace of expert counts; [`DpEngine`] does.
    pub fn new(
        model: &'m dyn CausalLm,
        mut ex: Exec,
        tokenizer: Option<Tokenizer>,
        config: &EngineConfig,
    ) -> Result<Self> {
        let grammars = tokenizer.clone().map(Grammars::new).map(Arc::new);
        let budget = step_memory::budget(model, config, &mut ex)?;
        Self::with_budget(model, ex, (tokenizer, grammars), config, budget)
    }

    /// Like [`new`](Self::new), with grammars that other engines use too. If the memory was measured, the KV cache has
    /// at most `budget` bytes.
    fn with_budget(
        model: &'m dyn CausalLm,
        ex: Exec,
        (tokenizer, grammars): Texts,
        config: &EngineConfig,
        budget: Option<usize>,
    ) -> Result<Self> {
        #[cfg(feature = "cuda")]
        let ex = track::tracked(ex)?;
        let info = model.info();
        let (free, most) = config.free_and_budget(&ex)?;
        let bad_words = tokenizer.clone().map(|tokenizer| BadWordLists::new(tokenizer, info.vocab_size));
        let capacity = config.capacity(&info.states, info.max_context_len, free, budget.unwrap_or(most))?;
        capacity.warn_if_cut();
        let Capacity { sizes, context_len, max_model_len, .. } = capacity;
        let mut kv = KvCache::with_sizes(ex.device(), &info.states, sizes)?;
        kv.commit(&ex)?;
        let limits = Limits {
            max_num_seqs: config.max_num_seqs,
            max_num_batched_tokens: config.max_num_batched_tokens,
            mixed: match ex.is_cuda() && !info.states.have_latent_rows() {
                true => MixedLimit::gpu(config.max_num_seqs),
                false => MixedLimit::NONE,
            },
            policy: config.scheduling_policy,
            block_size: config.block_size,
            prefix_caching: config.shares_prefixes(&info.states, &sizes),
            num_states: info.states.are_recurrent().then_some(sizes.num_states),
            num_saved: sizes.num_saved,
            prefix_by_prompt_len: info.keys_depend_on_prompt_len,
        };
        let scheduler = Scheduler::new(limits, sizes.num_blocks)?;
        let ahead = usize::from(config.async_scheduling || ex.is_cuda());
        #[cfg(feature = "cuda")]
        let device = DeviceRunner::of(config, model, max_model_len, &ex)?;
        let most_logits = if ex.is_cuda() { step_memory::most_logits(config.max_num_seqs) } else { 0 };
        let runner = Runner {
            model,
            kv,
            ex,
            ahead,
            most_logits,
            results: VecDeque::new(),
            #[cfg(feature = "cuda")]
            device,
            steps: 0,
            count_experts: config.counts(),
            force_balance: config.force_balance,
        };
        Ok(Self {
            info,
            tokenizer,
            grammars,
            bad_words,
            context_len,
            max_model_len,
            block_size: config.block_size,
            scheduler,
            runner,
            next_id: 0,
            deadlines: BTreeMap::new(),
            ended: Vec::new(),
            start: Instant::now(),
            stats: Stats { kv_blocks: sizes.num_blocks, ..Stats::default() },
            step_loads: Vec::new(),
            lockstep: config.lockstep,
        })
    }

    /// The largest length of a sequence, prompt and output.
    pub fn max_model_len(&self) -> usize {
        self.max_model_len
    }

    /// Adds a request, or returns why it is refused; then nothing has changed.
    pub fn add(&mut self, request: Request) -> Result<RequestId, RequestError> {
        let checked = self.check(&request)?;
        let id = RequestId(self.next_id);
        self.enter(id, request, checked, Instant::now());
        Ok(id)
    }

    /// Adds a request that was checked. `added` is the time when it was added.
    fn enter(&mut self, RequestId(id): RequestId, request: Request, checked: Checked, added: Instant) {
        let Checked { max_len, grammar, bad_words } = checked;
        self.next_id = self.next_id.max(id.saturating_add(1));
        if let Some(timeout) = request.timeout
            && let Some(deadline) = added.checked_add(timeout)
        {
            self.deadlines.insert(id, deadline);
        }
        let request = Arc::new(request);
        for choice in 0..request.n {
            if request.scores_only() && (choice > 0 || request.prompt.len() == 1) {
                self.end_at_once(RequestId(id), choice);
                continue;
            }
            let mut sampling = request.sampling.clone();
            sampling.seed = sampling.seed.wrapping_add(choice as u64);
            let text = || {
                TextOutput::new(
                    &request.stop,
                    request.include_stop_str_in_output,
                    request.skip_special_tokens,
                )
            };
            self.scheduler.add(Sequence {
                key: (id, choice),
                sampling,
                tokens: request.prompt.clone(),
                in_flight: 0,
                max_len,
                computed: 0,
                blocks: SequenceBlocks::new(),
                state: None,
                chain: Vec::new(),
                num_cached_tokens: None,
                text: self.tokenizer.as_ref().map(|_| text()),
                constraint: grammar
                    .clone()
                    .map(|grammar| Mutex::new(Constraint::after_reasoning(request.reasoning, grammar))),
                bad_words: bad_words.clone(),
                routed: None,
                prompt_logprobs: Vec::new(),
                prompt_logprobs_given: false,
                added,
                last_token: None,
                request: request.clone(),
            });
        }
        self.stats.requests += 1;
        self.stats.prompt_tokens += request.prompt.len() as u64;
    }

    /// Ends a request with the output that it has. Its last outputs come with the next step. An unknown or finished
    /// request is ignored.
    pub fn cancel(&mut self, request: RequestId) -> Result<()> {
        self.end_request(request.0, &FinishReason::Cancelled)
    }

    /// Whether there is nothing left to run or to report.
    pub fn is_idle(&self) -> bool {
        self.scheduler.waiting.is_empty()
            && self.scheduler.running.is_empty()
            && self.runner.results.is_empty()
            && self.ended.is_empty()
    }

    /// Requests' choices that are waiting or running.
    pub fn num_unfinished(&self) -> usize {
        self.scheduler.waiting.len() + self.scheduler.running.len()
    }

    /// Runs a step, and returns the new outputs since the last one.
    ///
    /// # Errors
    /// Only errors that end all requests: the model cannot run. An error of one request is in its [`Output::finish`].
    pub fn step(&mut self) -> Result<Vec<Output>> {
        self.end_late_requests()?;
        let mut outputs = std::mem::take(&mut self.ended);
        let plan =
            trace_span!("schedule").in_scope(|| self.scheduler.schedule()).context("scheduling a step")?;
        let keep = match plan {
            Some(plan) => {
                self.stats.add_step(plan.step.num_tokens(), self.scheduler.kv_blocks().0);
                self.runner.launch(plan, &self.scheduler.running).context("running a step")?;
                self.runner.ahead
            }
            None => {
                if self.lockstep {
                    self.runner.launch_empty().context("running a step without rows")?;
                }
                0
            }
        };
        self.collect(keep, &mut outputs)?;
        Ok(outputs)
    }

    /// Runs until every request has ended, and passes each output to `on_output`.
    pub fn run(&mut self, mut on_output: impl FnMut(Output)) -> Result<()> {
        while !self.is_idle() {
            self.step()?.into_iter().for_each(&mut on_output);
        }
        Ok(())
    }

    /// This rank's part of a round of moving experts, between two steps.
    fn move_experts(&self, round: &MoveRound) -> Result<MoveStatus> {
        let ranks = self.runner.model.ranks().context("moving experts: the model runs on one rank")?;
        Ok(ranks.move_experts(round)?)
    }

    /// Counters and times so far.
    pub fn stats(&self) -> Stats {
        let (graphs, graph_steps) = self.runner.graphs();
        Stats {
            seconds: self.start.elapsed().as_secs_f64(),
            graphs,
            graph_steps,
            preemptions: self.scheduler.num_preemptions,
            cached_prompt_tokens: self.scheduler.num_cached_tokens,
            saved_states: self.scheduler.saved_states(self.info.states.bytes_per_sequence().unwrap_or(0)),
            ..self.stats.clone()
        }
    }

    /// Number of steps that replayed a captured CUDA graph.
    pub fn num_graph_steps(&self) -> u64 {
        self.runner.graphs().1
    }

    /// Collects steps until only `keep` steps are running.
    fn collect(&mut self, keep: usize, outputs: &mut Vec<Output>) -> Result<()> {
        while self.runner.results.len() > keep {
            let _span = trace_span!("collect").entered();
            if let Some(result) = self.runner.collect()? {
                self.apply(result, outputs)?;
            }
        }
        Ok(())
    }

    /// Takes the results of a step to its sequences.
    fn apply(&mut self, mut result: StepResult, outputs: &mut Vec<Output>) -> Result<()> {
        let mut first_row = 0;
        for part in &result.parts {
            let rows = first_row..first_row + part.rows;
            first_row = rows.end;
            if let (Some(all), Some(sequence)) = (&result.routed, self.scheduler.get_mut(part.key))
                && sequence.request.capture_routing
            {
                sequence.record_routing(part.start, all, rows)?;
            }
            if let Some(logprobs) = result.prompt_logprobs.remove(&part.key) {
                self.accept_prompt_logprobs(part, logprobs, outputs)?;
            }
            if let (Some(position), Some(sampled)) = (part.samples, result.sampled.remove(&part.key)) {
                self.accept(part.key, position, sampled, outputs)?;
            }
        }
        if let Some(counts) = result.expert_counts {
            let decodes = |p: &&plan::Part| p.rows == 1 && p.samples.is_some_and(|n| n > 0);
            let decode_rows = result.parts.iter().filter(decodes).count();
            let step = self.stats.steps - 1 - self.runner.results.len() as u64;
            self.stats.add_expert_load(&counts);
            let prefill_rows = first_row - decode_rows;
            self.step_loads.push(StepLoad { step, decode_rows, prefill_rows, counts });
        }
        Ok(())
    }
}
