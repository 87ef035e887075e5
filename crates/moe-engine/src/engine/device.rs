//! Executing steps on a CUDA device, ahead of the host.
//!
//! A step is one upload, one launch and one read-back, none of which waits: tokens are drawn on the
//! device and fed to the next step there; the host reads them when it collects the step. Pure decode
//! steps are padded to a bucket and replayed as captured graphs. What a graph's bucket computes is
//! the same launches in the same order as without a graph, so both give the same bits.
//!
//! Where ranks share a model, each runs the same steps, pads them alike, and draws the same tokens from the same
//! logits: no token travels. What one of them cannot record as a graph, none does.

use std::collections::HashMap;

use candle_core::{DType, Result, bail};
use model_runtime::cuda::{Graph, PinnedWords, SampleParams, sample_into};
use model_runtime::device_step::{DeviceStep, Extras, Shape};
use model_runtime::sampling::{Sampled, SamplingError};
use model_runtime::{Announced, Buffer, CausalLm, DrawSizes, Exec, KvCache, Step};
use tracing::{trace_span, warn};

use super::runner::StepResult;
use super::scheduler::{Part, Plan};
use super::sequence::{Key, Sequence};

/// Most sequences of a graph.
const MAX_BUCKET: usize = 1024;

/// What a launched step left on the device.
pub(super) struct InFlight {
    parts: Vec<Part>,
    /// Whose token each row of the read-back is.
    keys: Vec<Key>,
    /// Rows of the read-back, padding included: statuses lie behind so many tokens.
    padded: usize,
    /// Which of the read-back buffers it uses.
    slot: usize,
}

/// How far a bucket's graph is.
enum Recording {
    /// It ran once, so that every buffer exists.
    Warm,
    Ready(Graph),
    /// Recording failed: it runs without.
    Never,
}

/// What runs steps and draws their tokens: on the rank that an engine drives, and on those that follow it.
pub(crate) struct DeviceRunner {
    sizes: DrawSizes,
    step: DeviceStep,
    logits: Buffer,
    /// Tokens, then statuses, of the last step, [2, R].
    drawn: Buffer,
    read_back: [PinnedWords; 2],
    turn: usize,
    /// Keys of the last launched step, in the order of `drawn`.
    last: Vec<Key>,
    graphs: HashMap<usize, Recording>,
    max_seqs: usize,
    /// Steps that replayed a graph.
    replayed: u64,
}

impl DeviceRunner {
    /// For steps of at most these sizes.
    pub fn new(vocab_size: usize, sizes: DrawSizes, ex: &Exec) -> Result<Self> {
        let DrawSizes { rows, sequences, blocks, .. } = sizes;
        let seqs = bucket(sequences).unwrap_or(sequences);
        let shape = Shape { rows: rows.max(seqs), sequences: seqs, max_blocks: blocks, logits: seqs };
        Ok(Self {
            sizes,
            step: DeviceStep::new(shape.words(), ex)?,
            logits: ex.zeros(DType::F32, &[seqs, vocab_size])?,
            drawn: ex.zeros(DType::U32, &[2 * seqs])?,
            read_back: [ex.pinned(2 * seqs)?, ex.pinned(2 * seqs)?],
            turn: 0,
            last: Vec::new(),
            graphs: HashMap::new(),
            max_seqs: seqs,
            replayed: 0,
        })
    }

    /// Steps that replayed a graph.
    pub fn num_replayed(&self) -> u64 {
        self.replayed
    }

    /// Whether the device can draw every token of a plan.
    pub(super) fn takes(&self, plan: &Plan, sequences: &HashMap<Key, &Sequence>) -> bool {
        let plain = |part: &Part| {
            let Some(sequence) = sequences.get(&part.key) else { return false };
            let (request, sampling) = (&sequence.request, &sequence.sampling);
            let recorded = request.capture_routing || request.replay_routing.is_some();
            let early = part.samples.is_some_and(|position| position < request.min_tokens);
            !recorded && !early && sampling.is_plain() && !sequence.wants_prompt_logprobs()
        };
        plan.parts.len() <= self.max_seqs && plan.parts.iter().all(plain)
    }

    /// Starts a step; returns at once. Tokens that the plan says are fed come from the last step that was
    /// launched here.
    pub(super) fn launch(
        &mut self,
        model: &dyn CausalLm,
        kv: &mut KvCache,
        mut plan: Plan,
        sequences: &HashMap<Key, &Sequence>,
        ex: &mut Exec,
    ) -> Result<InFlight> {
        let (extras, keys) = self.extras(&mut plan, sequences)?;
        plan.step.check_vocab(model.info().vocab_size)?;
        let padded = self.draw(model, kv, &plan.step, &extras, ex)?;
        self.turn = 1 - self.turn;
        ex.download(self.drawn.view().narrow(0, 2 * padded)?, &mut self.read_back[self.turn])?;
        self.last.clone_from(&keys);
        Ok(InFlight { parts: plan.parts, keys, padded, slot: self.turn })
    }

    /// Runs a step and draws its tokens, with the ranks that share the model; returns at once. The rows
    /// of logits, padding included.
    pub fn draw(
        &mut self,
        model: &dyn CausalLm,
        kv: &mut KvCache,
        step: &Step,
        extras: &Extras,
        ex: &mut Exec,
    ) -> Result<usize> {
        let rows = step.num_tokens();
        let fits = step.one_row_each() && step.num_logits() == rows;
        let mut bucket = bucket(rows).filter(|_| fits);
        let _span = trace_span!("step", tokens = rows, logits = step.num_logits()).entered();
        if let Some(ranks) = model.ranks() {
            let cache = (kv.id(), kv.num_blocks(), kv.block_size());
            bucket = ranks.begin(&Announced { step, draw: Some((extras, self.sizes)), cache, bucket }, ex)?;
        }
        if bucket == Some(0) {
            // No rank has a row.
            return Ok(0);
        }
        let shape = match bucket {
            Some(rows) => Shape::decode(rows, self.sizes.blocks),
            None => Shape::of(step),
        };
        self.step.upload_padded(step, extras, shape, ex)?;
        ex.step.padded = bucket.is_some();
        let launched = match bucket {
            Some(rows) if !self.sizes.eager => self.replay(rows, shape, model, kv, ex),
            _ => self.run(shape, model, kv, ex),
        };
        ex.step.padded = false;
        (ex.step.rank_tokens, ex.step.only_decode) = (None, false);
        launched?;
        Ok(shape.logits)
    }

    /// Waits for a step and reads its tokens.
    pub(super) fn collect(&mut self, model: &dyn CausalLm, step: InFlight) -> Result<StepResult> {
        let words = self.read_back[step.slot].wait()?;
        if let Some(ranks) = model.ranks() {
            ranks.check()?;
        }
        let drawn = |row: usize| match words[step.padded + row] {
            0 => Ok(Sampled { token_id: words[row], logprobs: None }),
            1 => Err(SamplingError::NotFinite { token_id: words[row], value: f32::NAN }),
            _ => Err(SamplingError::Empty),
        };
        let sampled = step.keys.iter().enumerate().map(|(row, key)| (*key, drawn(row))).collect();
        Ok(StepResult { parts: step.parts, sampled, ..StepResult::default() })
    }

    /// Where each token comes from and how each is drawn; the keys of those that are drawn.
    fn extras(&self, plan: &mut Plan, sequences: &HashMap<Key, &Sequence>) -> Result<(Extras, Vec<Key>)> {
        let mut extras = Extras::none(&plan.step);
        for &(row, key) in &plan.fed {
            match self.last.iter().position(|k| *k == key) {
                Some(at) => {
                    plan.step.set_token(row, 0);
                    extras.feed[row] = at as u32;
                }
                None => bail!("the token of row {row} was never sampled"),
            }
        }
        let (mut sampling, mut keys) = (Vec::new(), Vec::new());
        for part in &plan.parts {
            let (Some(position), Some(sequence)) = (part.samples, sequences.get(&part.key)) else { continue };
            let p = &sequence.sampling;
            sampling.push(SampleParams {
                temperature: p.temperature,
                top_p: p.top_p,
                min_p: p.min_p,
                top_k: u32::try_from(p.top_k).unwrap_or(0),
                seed: p.seed,
                position: position as u64,
            });
            keys.push(part.key);
        }
        if keys.len() != plan.step.num_logits() {
            bail!("{} tokens to draw from {} rows of logits", keys.len(), plan.step.num_logits())
        }
        extras.sampling = sampling;
        Ok((extras, keys))
    }

    /// The launches of a step.
    fn run(&mut self, shape: Shape, model: &dyn CausalLm, kv: &mut KvCache, ex: &mut Exec) -> Result<()> {
        let rows = shape.logits;
        self.step.feed(shape, self.drawn.view(), ex)?;
        let views = self.step.views(shape)?;
        model.forward(&views.step, kv, self.logits.view_mut().narrow(0, rows)?, None, ex)?;
        let (tokens, rest) = self.drawn.view_mut().split_at(rows)?;
        sample_into(self.logits.view().narrow(0, rows)?, views.sampling, tokens, rest.narrow(0, rows)?, ex)
    }

    /// The same, recorded the second time and replayed from then on.
    fn replay(
        &mut self,
        bucket: usize,
        shape: Shape,
        model: &dyn CausalLm,
        kv: &mut KvCache,
        ex: &mut Exec,
    ) -> Result<()> {
        match self.graphs.get_mut(&bucket) {
            Some(Recording::Ready(graph)) => {
                self.replayed += 1;
                graph.launch()?;
                return model.ranks().map_or(Ok(()), |ranks| ranks.watch(ex));
            }
            Some(Recording::Never) => return self.run(shape, model, kv, ex),
            None => {
                self.graphs.insert(bucket, Recording::Warm);
                return self.run(shape, model, kv, ex);
            }
            Some(Recording::Warm) => {}
        }
        let padded = ex.step.padded;
        let recorded = Graph::capture(ex, |ex| {
            ex.step.padded = padded;
            self.run(shape, model, kv, ex)
        });
        let by_all = match model.ranks() {
            Some(ranks) => ranks.all(recorded.is_ok())?,
            None => recorded.is_ok(),
        };
        match recorded {
            Ok(mut graph) if by_all => {
                graph.launch()?;
                self.replayed += 1;
                self.graphs.insert(bucket, Recording::Ready(graph));
                model.ranks().map_or(Ok(()), |ranks| ranks.watch(ex))
            }
            recorded => {
                if !self.graphs.values().any(|r| matches!(r, Recording::Never)) {
                    let why = recorded.err().map_or("another rank could not".to_string(), |e| e.to_string());
                    warn!("decoding without CUDA graphs: a batch of {bucket} could not be recorded: {why}");
                }
                self.graphs.insert(bucket, Recording::Never);
                self.run(shape, model, kv, ex)
            }
        }
    }
}

/// The number of rows to which a decode step is padded: small ones exactly, larger ones to
/// multiples of 8; `None` beyond the largest graph.
fn bucket(rows: usize) -> Option<usize> {
    match rows {
        0..=2 => Some(rows),
        3..=4 => Some(4),
        5..=MAX_BUCKET => Some(rows.next_multiple_of(8)),
        _ => None,
    }
}
