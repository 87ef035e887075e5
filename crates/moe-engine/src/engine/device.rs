//! Executing steps on a CUDA device, ahead of the host.
//!
//! A step is one upload, one launch and one read-back, none of which waits: tokens are drawn on the
//! device and fed to the next step there; the host reads them when it collects the step. Pure decode
//! steps are padded to a bucket and replayed as captured graphs. What a graph's bucket computes is
//! the same launches in the same order as without a graph, so both give the same bits.

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{DType, Result, bail};
use model_runtime::cuda::{Graph, PinnedWords, SampleParams, sample_into};
use model_runtime::device_step::{DeviceStep, Extras, Shape};
use model_runtime::sampling::{Sampled, SamplingError};
use model_runtime::{Buffer, CausalLm, Exec, KvCache};
use tracing::{trace_span, warn};

use super::runner::StepResult;
use super::scheduler::{Part, Plan};
use super::sequence::{Key, Sequence};
use super::track::StepMarks;

/// Most sequences of a graph.
const MAX_BUCKET: usize = 512;

/// What a launched step left on the device.
pub(super) struct InFlight {
    parts: Vec<Part>,
    /// Whose token each row of the read-back is.
    keys: Vec<Key>,
    /// Rows of the read-back, padding included: statuses lie behind so many tokens.
    padded: usize,
    /// Which of the read-back buffers it uses.
    slot: usize,
    /// What the device does when, for a profile.
    marks: Option<StepMarks>,
}

/// How far a bucket's graph is.
enum Recording {
    /// It ran once, so that every buffer exists.
    Warm,
    Ready(Graph),
    /// Recording failed: it runs without.
    Never,
}

pub(super) struct DeviceRunner {
    step: DeviceStep,
    logits: Buffer,
    /// Tokens, then statuses, of the last step, [2, R].
    drawn: Buffer,
    read_back: [PinnedWords; 2],
    turn: usize,
    /// Keys of the last launched step, in the order of `drawn`.
    last: Vec<Key>,
    graphs: HashMap<usize, Recording>,
    max_blocks: usize,
    max_seqs: usize,
    eager: bool,
    /// Steps that replayed a graph.
    replayed: u64,
}

impl DeviceRunner {
    /// For steps of at most `max_rows` rows of `max_seqs` sequences of `max_blocks` blocks.
    pub fn new(
        vocab_size: usize,
        max_rows: usize,
        max_seqs: usize,
        max_blocks: usize,
        eager: bool,
        ex: &Exec,
    ) -> Result<Self> {
        let seqs = bucket(max_seqs).unwrap_or(max_seqs);
        let shape = Shape { rows: max_rows.max(seqs), sequences: seqs, max_blocks, logits: seqs };
        Ok(Self {
            step: DeviceStep::new(shape.words(), ex)?,
            logits: ex.zeros(DType::F32, &[seqs, vocab_size])?,
            drawn: ex.zeros(DType::U32, &[2 * seqs])?,
            read_back: [ex.pinned(2 * seqs)?, ex.pinned(2 * seqs)?],
            turn: 0,
            last: Vec::new(),
            graphs: HashMap::new(),
            max_blocks,
            max_seqs: seqs,
            eager,
            replayed: 0,
        })
    }

    /// Steps that replayed a graph.
    pub fn num_replayed(&self) -> u64 {
        self.replayed
    }

    /// Whether the device can draw every token of a plan.
    pub fn takes(&self, plan: &Plan, sequences: &HashMap<Key, &Sequence>) -> bool {
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
    pub fn launch(
        &mut self,
        model: &dyn CausalLm,
        kv: &mut KvCache,
        mut plan: Plan,
        sequences: &HashMap<Key, &Sequence>,
        ex: &mut Exec,
    ) -> Result<InFlight> {
        let (extras, keys) = self.extras(&mut plan, sequences)?;
        plan.step.check_vocab(model.info().vocab_size)?;
        let rows = plan.step.num_tokens();
        let bucket = bucket(rows).filter(|_| plan.step.one_row_each() && keys.len() == rows);
        let shape = match bucket {
            Some(rows) => Shape::decode(rows, self.max_blocks),
            None => Shape::of(&plan.step),
        };
        let _span = trace_span!("step", tokens = rows, logits = keys.len()).entered();
        let begin = Instant::now();
        ex.mark("upload", rows)?;
        trace_span!("upload")
            .in_scope(|| self.step.upload_padded(&plan.step, &extras, shape, ex).map(drop))?;
        ex.step.padded = bucket.is_some();
        let launched = trace_span!("launch").in_scope(|| match bucket {
            Some(rows) if !self.eager => self.replay(rows, shape, model, kv, ex),
            _ => self.run(shape, model, kv, ex),
        });
        ex.step.padded = false;
        launched?;
        let marks = StepMarks::end(rows, begin, ex)?;
        self.turn = 1 - self.turn;
        ex.download(self.drawn.view().narrow(0, 2 * shape.logits)?, &mut self.read_back[self.turn])?;
        self.last.clone_from(&keys);
        Ok(InFlight { parts: plan.parts, keys, padded: shape.logits, slot: self.turn, marks })
    }

    /// Waits for a step and reads its tokens.
    pub fn collect(&mut self, step: InFlight) -> Result<StepResult> {
        let words = trace_span!("wait").in_scope(|| self.read_back[step.slot].wait())?;
        if let Some(marks) = step.marks {
            marks.report()?;
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
        ex.mark("embedding", 0)?;
        self.step.feed(shape, self.drawn.view(), ex)?;
        let views = self.step.views(shape)?;
        model.forward(&views.step, kv, self.logits.view_mut().narrow(0, rows)?, None, ex)?;
        ex.mark("sample", 0)?;
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
                ex.mark("graph", bucket)?;
                return graph.launch();
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
        match recorded {
            Ok(mut graph) => {
                ex.mark("graph", bucket)?;
                graph.launch()?;
                self.replayed += 1;
                self.graphs.insert(bucket, Recording::Ready(graph));
                Ok(())
            }
            Err(e) => {
                if !self.graphs.values().any(|r| matches!(r, Recording::Never)) {
                    warn!("decoding without CUDA graphs: a batch of {bucket} could not be recorded: {e}");
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
