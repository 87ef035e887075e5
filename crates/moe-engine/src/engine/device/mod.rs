//! Runs steps on a CUDA device, one step ahead of the host.
//!
//! A step is one upload, one launch and one read-back, and none of these waits. Tokens are sampled on the device, where
//! the next step's upload uses them; the host reads them when it collects the step. Steps that only decode are padded
//! to a bucket and replayed as captured graphs. A graph contains the same launches in the same order as without a
//! graph, so both give the same bits. A step with structured output is sampled by separate launches, when its masks are
//! ready.
//!
//! If ranks share a model, each runs the same steps, pads them in the same way, and samples the same tokens from the
//! same logits, so no token is sent. If one rank cannot record a graph, no rank does.

mod graphs;
mod launches;

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{DType, Result, bail};
use model_runtime::cuda::{LOGPROB_WORDS, LastStep, PinnedWords, SampleLogprobs};
use model_runtime::device_step::{DeviceStep, Shape};
use model_runtime::sampling::{Sampled, SamplingError, device_logprobs};
use model_runtime::{
    Buffer, CausalLm, DeviceSampling, Exec, Feature, KvCache, RunnerSizes, Step, StepContext, reserve_logits,
};
use tracing::trace_span;

use super::config::EngineConfig;
use super::masks::{MaskResult, pack};
use super::plan::{Key, Part, Plan, StepResult};
use super::routing::StepRouting;
use super::sampling::{DeviceSampler, History, Memory, SamplingNeeds};
use super::scores::{DeviceScorer, ScoredRows};
use super::sequence::Sequence;
use super::step_memory;
use super::track::StepMarks;
use graphs::{Recording, Variant};

/// The largest number of sequences in a graph.
const MAX_BUCKET: usize = 1024;

/// Words of a row whose token was sampled: token, status, log-probabilities.
const RESULT_WORDS: usize = 2 + LOGPROB_WORDS;

/// The results of a launched step on the device.
pub(super) struct InFlight {
    parts: Vec<Part>,
    /// For each row of the read-back: its sequence, and, if it has log-probabilities, how many top tokens it lists.
    rows: Vec<(Key, Option<usize>)>,
    /// Rows whose mask could not be computed. They were sampled without a mask.
    failed: HashMap<Key, String>,
    /// Number of rows of the read-back, padding included. It has this many tokens, then as many statuses, then
    /// log-probabilities.
    padded: usize,
    /// Rows whose log-probabilities are read back.
    scored: ScoredRows,
    /// The index of the read-back buffer that it uses.
    slot: usize,
    /// The number of rows whose experts are read back, if they are.
    routed_rows: Option<usize>,
    /// The times of the device's work, for a profile.
    marks: Option<StepMarks>,
}

impl InFlight {
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }
}

/// A launched step whose sampling is still to come.
struct Unsampled {
    shape: Shape,
    asked: SamplingNeeds,
    /// Its number of rows, and the time when its launches began.
    rows: usize,
    begin: Instant,
}

/// Runs steps and samples their tokens, on the rank that an engine drives and on the ranks that follow it.
pub(crate) struct DeviceRunner {
    sizes: RunnerSizes,
    step: DeviceStep,
    sampler: DeviceSampler,
    /// Recording and forcing of routing; `None` for a model without experts.
    routing: Option<StepRouting>,
    /// Computes log-probabilities of prompts. It is made for the first request that needs it, on the rank that an
    /// engine drives.
    scorer: Memory<DeviceScorer>,
    /// A launched step that waits for its masks.
    unsampled: Option<Unsampled>,
    logits: Buffer,
    /// Tokens, then statuses, of the last step, [2, R]; then log-probabilities if they are needed.
    sampled: Buffer,
    read_back: [PinnedWords; 2],
    turn: usize,
    /// How many words of the last launched step the upload of the next step reads back, to the buffer whose turn it is.
    /// A separate launch would make the device wait between the two steps.
    unread: Option<usize>,
    /// Keys of the last launched step, in the order of `sampled`.
    last: Vec<Key>,
    graphs: HashMap<Variant, Recording>,
    max_seqs: usize,
    /// Number of graphs that were recorded.
    pub recorded: u64,
    /// Number of steps that replayed a graph.
    pub replayed: u64,
}

impl DeviceRunner {
    /// The object that runs an engine's steps; `None` on the CPU and on cards that cannot sample tokens.
    pub(super) fn of(
        config: &EngineConfig,
        model: &dyn CausalLm,
        max_model_len: usize,
        ex: &Exec,
    ) -> Result<Option<Self>> {
        // The sampling kernel needs clusters of blocks.
        if !ex.machine().gpu.is_some_and(|gpu| gpu.has(Feature::Clusters)) {
            return Ok(None);
        }
        let sizes = RunnerSizes {
            rows: config.max_num_batched_tokens,
            sequences: config.max_num_seqs,
            tokens: max_model_len,
            blocks: max_model_len.div_ceil(config.block_size),
            eager: config.enforce_eager,
        };
        Ok(Some(Self::new(model, sizes, (config.counts(), true), ex)?))
    }

    /// A runner for steps of at most these sizes. With `counts`, experts are counted in every step. With `records`, the
    /// experts of each token can be recorded.
    pub fn new(
        model: &dyn CausalLm,
        sizes: RunnerSizes,
        (counts, records): (bool, bool),
        ex: &Exec,
    ) -> Result<Self> {
        let info = model.info();
        let vocab_size = info.vocab_size;
        let RunnerSizes { rows, sequences, tokens, blocks, .. } = sizes;
        let seqs = bucket(sequences).unwrap_or(sequences);
        let shape = Shape { rows: rows.max(seqs), scored: rows, ..Shape::decode(seqs, blocks) };
        let routing = |moe| StepRouting::new(moe, shape.rows, counts, records, ex);
        reserve_logits(model, step_memory::most_logits(sequences), ex)?;
        Ok(Self {
            sizes,
            routing: info.moe.as_ref().map(routing).transpose()?,
            scorer: Memory::None,
            unsampled: None,
            step: DeviceStep::new(shape.words(), ex)?,
            logits: ex.zeros(DType::F32, &[seqs, vocab_size])?,
            sampler: DeviceSampler::new(seqs, vocab_size, tokens),
            sampled: ex.zeros(DType::U32, &[seqs * RESULT_WORDS])?,
            read_back: [ex.pinned(seqs * RESULT_WORDS)?, ex.pinned(seqs * RESULT_WORDS)?],
            turn: 0,
            unread: None,
            last: Vec::new(),
            graphs: HashMap::new(),
            max_seqs: seqs,
            recorded: 0,
            replayed: 0,
        })
    }

    /// Whether the device can sample every token of a plan.
    pub(super) fn takes(
        &mut self,
        model: &dyn CausalLm,
        plan: &Plan,
        sequences: &HashMap<Key, &Sequence>,
        ex: &Exec,
    ) -> bool {
        plan.parts.len() <= self.max_seqs
            && self.sampler.takes(plan, sequences, model.ranks(), ex)
            && (plan.step.num_scored() == 0 || self.has_scorer(ex))
    }

    fn has_scorer(&mut self, ex: &Exec) -> bool {
        let rows = self.sizes.rows;
        let what = "log-probabilities of prompts (a lower `max_num_batched_tokens` needs less)";
        self.scorer.is_there(|| DeviceScorer::new(rows, ex), what)
    }

    /// Starts a step and returns at once. Tokens that are in flight in the plan come from the last step that was
    /// launched here. With `masked`, [`sample_masked`](Self::sample_masked) follows. With `records`, the experts of its
    /// rows are read back.
    pub(super) fn launch(
        &mut self,
        model: &dyn CausalLm,
        kv: &mut KvCache,
        mut plan: Plan,
        (history, masked, records): (History, bool, bool),
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<InFlight> {
        let token_source = self.token_source(&mut plan)?;
        let (params, keys) = self.sampler.sample(&plan, history, ex)?;
        if keys.len() != plan.step.num_logits() {
            bail!("{} tokens to sample from {} rows of logits", keys.len(), plan.step.num_logits())
        }
        let listed: Vec<_> = params.iter().map(|p| p.logprobs.map(|n| n as usize)).collect();
        let logprobs = SamplingNeeds::of(params.iter().copied()).logprobs;
        let sampling = DeviceSampling { masked, ..DeviceSampling::new(token_source, &params) };
        plan.step.check_vocab(model.info().vocab_size)?;
        let scored = ScoredRows::of(&plan, history.sequences);
        let next = 1 - self.turn;
        if let Some(scorer) = self.scorer.get().filter(|_| !scored.is_empty()) {
            scorer.begin(&scored, next, ex)?;
        }
        let (padded, marks) = self.run(model, kv, &plan.step, &sampling, context, ex)?;
        self.turn = next;
        if let Some(scorer) = self.scorer.get().filter(|_| !scored.is_empty()) {
            scorer.read_back(&scored, next, ex)?;
        }
        let words = padded * if logprobs { RESULT_WORDS } else { 2 };
        self.unread = Some(words);
        let routed_rows = records.then_some(plan.step.num_tokens());
        if let Some(routing) = &mut self.routing {
            routing.read_back(self.turn, routed_rows, ex)?;
        }
        self.last.clone_from(&keys);
        let failed = HashMap::new();
        let rows = keys.into_iter().zip(listed).collect();
        Ok(InFlight { parts: plan.parts, rows, failed, padded, scored, slot: self.turn, routed_rows, marks })
    }

    /// Runs a step and samples its tokens, together with the ranks that share the model, and returns at once. Returns
    /// the number of rows of logits, padding included, and the marks of a profile, unless the step waits for masks.
    pub fn run(
        &mut self,
        model: &dyn CausalLm,
        kv: &mut KvCache,
        step: &Step,
        sampling: &DeviceSampling,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<(usize, Option<StepMarks>)> {
        let rows = step.num_tokens();
        let fits = step.one_row_each() && step.num_logits() == rows;
        let mut bucket = bucket(rows).filter(|_| fits);
        let _span = trace_span!("step", tokens = rows, logits = step.num_logits()).entered();
        if let Some(ranks) = model.ranks() {
            bucket = ranks.begin(step, Some((sampling, self.sizes)), kv, bucket, context)?;
        }
        if bucket == Some(0) {
            // No rank has a row.
            return Ok((0, None));
        }
        let shape = match bucket {
            Some(rows) => Shape::decode(rows, self.sizes.blocks),
            None => Shape::of(step),
        };
        let begin = Instant::now();
        ex.mark("upload", rows)?;
        let read_back = self.unread.take().map(|words| (&mut self.read_back[self.turn], words));
        let last = LastStep { sampled: self.sampled.view(), read_back };
        trace_span!("upload").in_scope(|| {
            self.step.upload_padded(step, context.step, sampling, (shape, last), ex).map(drop)
        })?;
        let forced = match &mut self.routing {
            Some(routing) => routing.force(context, shape.rows, ex)?,
            None => None,
        };
        // Copies of states are not in graphs: most steps have none. The device makes them in the order of the steps.
        kv.restore(step.restores(), ex)?;
        context.padded = bucket.is_some();
        let asked = SamplingNeeds { masks: sampling.masked, ..SamplingNeeds::of(sampling.rows()) };
        let launched = trace_span!("launch").in_scope(|| match bucket {
            Some(_) if !self.sizes.eager => self.replay(shape, (asked, forced), model, kv, context, ex),
            _ => self.launch_step(shape, (asked, forced), model, kv, context, ex),
        });
        launched?;
        kv.save(step.saves(), ex)?;
        if asked.masks {
            self.unsampled = Some(Unsampled { shape, asked, rows, begin });
            return Ok((shape.logits, None));
        }
        Ok((shape.logits, StepMarks::end(rows, begin, ex)?))
    }

    /// Samples a launched step with the masks of its tokens, on all ranks, and returns at once.
    pub(super) fn sample_masked(
        &mut self,
        model: &dyn CausalLm,
        step: &mut InFlight,
        masks: Vec<MaskResult>,
        ex: &Exec,
    ) -> Result<()> {
        let packed = pack(&masks, model.info().vocab_size, ex);
        if let Some(ranks) = model.ranks() {
            ranks.tell_masks(&packed)?;
        }
        step.marks = self.sample_with(&packed, ex)?;
        let failed = step.rows.iter().zip(masks).filter_map(|((key, _), mask)| Some((*key, mask.err()?)));
        step.failed = failed.collect();
        Ok(())
    }

    /// Samples the launched step with masks [R, ceil(V / 32)] u32 and returns at once. Returns the marks of a profile.
    pub fn sample_with(&mut self, masks: &[u32], ex: &Exec) -> Result<Option<StepMarks>> {
        let Some(Unsampled { shape, asked, rows, begin }) = self.unsampled.take() else {
            bail!("masks for no step")
        };
        self.sampler.upload_masks(masks, ex)?;
        self.sample(shape, asked, ex)?;
        StepMarks::end(rows, begin, ex)
    }

    /// Waits for a step and reads its tokens.
    pub(super) fn collect(
        &mut self,
        model: &dyn CausalLm,
        mut step: InFlight,
        ex: &Exec,
    ) -> Result<StepResult> {
        // No step was launched after it.
        if step.slot == self.turn
            && let Some(words) = self.unread.take()
        {
            ex.download(self.sampled.view().narrow(0, words)?, &mut self.read_back[self.turn])?;
        }
        let words = trace_span!("wait").in_scope(|| self.read_back[step.slot].wait())?;
        if let Some(ranks) = model.ranks() {
            ranks.check()?;
        }
        if let Some(marks) = step.marks {
            marks.report()?;
        }
        let vocab_size = self.logits.dims()[1];
        let (tokens, logprobs) = words.split_at(2 * step.padded);
        let mut sampled = HashMap::with_capacity(step.rows.len());
        for (row, (key, listed)) in step.rows.into_iter().enumerate() {
            let token_id = tokens[row];
            let logprobs = || -> Result<_> {
                let Some(n) = listed else { return Ok(Ok(None)) };
                let row = SampleLogprobs::read(
                    &logprobs[row * LOGPROB_WORDS..][..LOGPROB_WORDS],
                    n.min(vocab_size),
                )?;
                Ok(device_logprobs(row, token_id).map(Some))
            };
            let result = match (step.failed.remove(&key), tokens[step.padded + row]) {
                (Some(why), _) => Err(SamplingError::Mask(why)),
                (None, 0) => logprobs()?.map(|logprobs| Sampled { token_id, logprobs }),
                (None, 1) => Err(SamplingError::NotFinite { token_id, value: f32::NAN }),
                _ => Err(SamplingError::Empty),
            };
            sampled.insert(key, result);
        }
        let (expert_counts, routed) = match &mut self.routing {
            Some(routing) => routing.collect(step.slot, step.routed_rows)?,
            None => (None, None),
        };
        let prompt_logprobs = match self.scorer.get().filter(|_| !step.scored.is_empty()) {
            Some(scorer) => scorer.collect(&step.scored, step.slot, vocab_size)?,
            None => HashMap::new(),
        };
        Ok(StepResult { parts: step.parts, sampled, prompt_logprobs, expert_counts, routed })
    }

    /// For each row of a plan: the row of the last step whose token it takes, or u32::MAX if it has its own token.
    fn token_source(&self, plan: &mut Plan) -> Result<Vec<u32>> {
        let mut source = vec![u32::MAX; plan.step.num_tokens()];
        for &(row, key) in &plan.in_flight {
            match self.last.iter().position(|k| *k == key) {
                Some(at) => {
                    plan.step.set_token(row, 0);
                    source[row] = at as u32;
                }
                None => bail!("the token of row {row} was never sampled"),
            }
        }
        Ok(source)
    }
}

/// The number of rows to which a decode step is padded. Small numbers stay unchanged, larger ones become multiples of
/// 8. `None` beyond the largest graph.
fn bucket(rows: usize) -> Option<usize> {
    match rows {
        0..=2 => Some(rows),
        3..=4 => Some(4),
        5..=MAX_BUCKET => Some(rows.next_multiple_of(8)),
        _ => None,
    }
}
