//! Executing steps.
//!
//! A step is launched, and its results are collected later. With `ahead` = 0 they are collected at once. With `ahead` =
//! 1 the next step is launched first. If it needs a token of the step before, that token is filled in here, or on a
//! CUDA device it stays there; the host is then always one step late. Results do not depend on `ahead`.

use std::collections::{HashMap, VecDeque};

use candle_core::{Result, bail};
use model_runtime::sampling::SamplingError;
use model_runtime::{
    Buffer, CausalLm, Exec, KvCache, RoutedExperts, SampleRow, Step, StepContext, ViewMut, host_logits,
    run_scored_step, run_step, sample_rows,
};
use moe_layer::{ExpertHeat, NO_EXPERT};
use tracing::trace_span;

#[cfg(feature = "cuda")]
use super::device::{DeviceRunner, InFlight};
use super::masks::{Next, masks, next_tokens};
use super::plan::{Key, Part, Plan, PromptLogprobs, StepResult, Tokens};
#[cfg(feature = "cuda")]
use super::sampling::History;
use super::scores::{HostScorer, ScoredRows};
use super::sequence::Sequence;
#[cfg(feature = "cuda")]
use super::track::StepMarks;
use crate::structured::Mask;

/// Fills in tokens that the step before has sampled. A sequence whose sampling failed continues with an arbitrary token
/// until its end is noticed.
fn take_tokens(plan: &mut Plan, before: &StepResult) -> Result<()> {
    for (row, key) in plan.in_flight.drain(..) {
        match before.sampled.get(&key) {
            Some(Ok(sampled)) => plan.step.set_token(row, sampled.token_id),
            Some(Err(_)) => plan.step.set_token(row, 0),
            None => bail!("the token of row {row} was never sampled"),
        }
    }
    Ok(())
}

/// A launched step.
pub(super) enum Launched {
    Done(StepResult),
    #[cfg(feature = "cuda")]
    OnDevice(InFlight),
}

pub(super) struct Runner<'m> {
    pub model: &'m dyn CausalLm,
    pub kv: KvCache,
    pub ex: Exec,
    /// Number of steps that may be running while the next one is scheduled.
    pub ahead: usize,
    /// See [`StepContext::most_logits`].
    pub most_logits: usize,
    /// Steps that are launched and not collected.
    pub results: VecDeque<Launched>,
    /// Samples on a CUDA device, if the device can.
    #[cfg(feature = "cuda")]
    pub device: Option<DeviceRunner>,
    pub steps: u64,
    /// Whether experts are counted in every step.
    pub count_experts: bool,
    /// Spreads routing evenly, for profiling; the seed varies it.
    pub force_balance: Option<u64>,
}

/// The choices that a step forces on the router.
struct Forcing<'a> {
    model: &'a dyn CausalLm,
    force_balance: Option<u64>,
    step: u64,
    most_logits: usize,
}

impl Forcing<'_> {
    /// The context of a step, with the choices that it forces.
    fn context(&self, plan: &Plan, sequences: &HashMap<Key, &Sequence>) -> Result<StepContext> {
        let Self { step, force_balance, most_logits, .. } = *self;
        let mut context = StepContext { step, most_logits, isolate_faults: true, ..StepContext::default() };
        let Some(moe) = &self.model.info().moe else { return Ok(context) };
        context.force_balance = force_balance;
        let of = |part: &Part| sequences.get(&part.key);
        if !plan.parts.iter().filter_map(of).any(|s| s.request.replay_routing.is_some()) {
            return Ok(context);
        }
        let layers = moe.layers.len();
        let mut replay = RoutedExperts::empty(plan.step.num_tokens(), layers, moe.top_k)?;
        let mut row = 0;
        for part in &plan.parts {
            for position in part.start..part.start + part.rows {
                if let Some((recorded, token)) = of(part).and_then(|s| s.replay(position)) {
                    for layer in 0..layers {
                        replay.set(row, layer, recorded.get(token, layer)?)?;
                    }
                }
                row += 1;
            }
        }
        context.replay = replay.ids().iter().any(|&id| id != NO_EXPERT).then(|| replay.into());
        Ok(context)
    }
}

/// Whether some sequence of a plan needs its experts recorded.
fn records_routing(plan: &Plan, sequences: &HashMap<Key, &Sequence>) -> bool {
    plan.parts.iter().filter_map(|part| sequences.get(&part.key)).any(|s| s.request.capture_routing)
}

impl Runner<'_> {
    /// The number of CUDA graphs that were recorded, and of steps that replayed one.
    pub fn graphs(&self) -> (u64, u64) {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.device {
            return (device.recorded, device.replayed);
        }
        (0, 0)
    }

    /// Starts a step. `sequences` holds the sequences of the plan.
    pub fn launch(&mut self, mut plan: Plan, sequences: &[Sequence]) -> Result<()> {
        let sequences: HashMap<Key, &Sequence> = sequences.iter().map(|s| (s.key, s)).collect();
        #[cfg(feature = "cuda")]
        if self.device.as_mut().is_some_and(|device| device.takes(self.model, &plan, &sequences, &self.ex)) {
            return self.launch_on_device(plan, &sequences);
        }
        let before = self.results.pop_back().map(|last| self.finish(last)).transpose()?;
        if let Some(result) = &before {
            take_tokens(&mut plan, result)?;
        }
        self.steps += 1;
        let Self { model, force_balance, steps: step, most_logits, .. } = *self;
        let forced = Forcing { model, force_balance, step, most_logits };
        let mut context = forced.context(&plan, &sequences)?;
        if let Some(moe) = &self.model.info().moe {
            let layers = moe.layers.len();
            let rows = plan.step.num_tokens();
            context.heat = self.count_experts.then(|| ExpertHeat::new(layers, moe.num_experts));
            if records_routing(&plan, &sequences) {
                context.capture = Some(RoutedExperts::empty(rows, layers, moe.top_k)?);
            }
        }
        // The step enters the thread pool once, and not once for computing and once for sampling, because waking its
        // threads takes 50 us.
        let pool = self.ex.clone();
        let mut compute = || self.compute(&plan, &sequences, before.as_ref(), &mut context);
        let (sampled, prompt_logprobs) =
            if pool.is_cuda() { compute() } else { pool.install_awake(compute) }?;
        let StepContext { capture: routed, heat: expert_counts, .. } = context;
        let result = StepResult { parts: plan.parts, sampled, prompt_logprobs, routed, expert_counts };
        self.results.extend(before.into_iter().chain([result]).map(Launched::Done));
        Ok(())
    }

    /// Starts a step whose tokens the device samples.
    #[cfg(feature = "cuda")]
    fn launch_on_device(&mut self, mut plan: Plan, sequences: &HashMap<Key, &Sequence>) -> Result<()> {
        let sampled = plan.parts.iter().filter(|part| part.samples.is_some());
        let mut sampled = sampled.filter_map(|part| sequences.get(&part.key));
        let structured = sampled.any(|sequence| sequence.has_mask());
        self.steps += 1;
        let Self { model, force_balance, steps: step, most_logits, .. } = *self;
        let Some(device) = &mut self.device else { bail!("a step for a device that is gone") };
        let forced = Forcing { model, force_balance, step, most_logits };
        let mut context = forced.context(&plan, sequences)?;
        let before = match self.results.back() {
            Some(Launched::Done(result)) => Some(result),
            _ => None,
        };
        if let Some(result) = before {
            take_tokens(&mut plan, result)?;
        }
        let asks = (History { sequences, before }, structured, records_routing(&plan, sequences));
        let mut launched = device.launch(model, &mut self.kv, plan, asks, &mut context, &mut self.ex)?;
        if structured {
            self.sample_masked(&mut launched, sequences)?;
        }
        self.results.push_back(Launched::OnDevice(launched));
        Ok(())
    }

    /// Samples a launched step with structured output. A mask depends on the token of the step before. The host waits
    /// for that token and computes masks while the device is busy with the layers.
    #[cfg(feature = "cuda")]
    fn sample_masked(&mut self, launched: &mut InFlight, sequences: &HashMap<Key, &Sequence>) -> Result<()> {
        let before = self.results.pop_back().map(|last| self.finish(last)).transpose()?;
        let tokens = next_tokens(launched.parts(), sequences, before.as_ref())?;
        let masks = masks(&tokens, &self.ex);
        self.results.extend(before.map(Launched::Done));
        match &mut self.device {
            Some(device) => device.sample_masked(self.model, launched, masks, &self.ex),
            None => bail!("a step on a device that is gone"),
        }
    }

    /// Runs a step and samples. Returns the token of each part that samples, and the log-probabilities of prompt
    /// tokens.
    fn compute(
        &mut self,
        plan: &Plan,
        sequences: &HashMap<Key, &Sequence>,
        before: Option<&StepResult>,
        context: &mut StepContext,
    ) -> Result<(Tokens, PromptLogprobs)> {
        #[cfg(feature = "cuda")]
        let begin = std::time::Instant::now();
        let scored = ScoredRows::of(plan, sequences);
        let mut scorer = HostScorer::new(&scored);
        let kv = &mut self.kv;
        let ex = &mut self.ex;
        let mut logits = run_scored_step(self.model, &plan.step, kv, &mut scorer, context, ex)?;
        #[cfg(feature = "cuda")]
        let marks = StepMarks::end(plan.step.num_tokens(), begin, &self.ex)?;
        let copied = logits.view().is_cuda().then(|| host_logits(self.model, &logits, &self.ex));
        let mut copied = copied.transpose()?;
        #[cfg(feature = "cuda")]
        marks.map_or(Ok(()), StepMarks::report)?;
        // The logits are in host memory, where they can be edited.
        let logits = copied.as_mut().map_or_else(|| logits.view_mut(), Buffer::view_mut);
        let span = trace_span!("sample", rows = plan.parts.iter().filter(|p| p.samples.is_some()).count());
        let sampled = span.in_scope(|| self.sample(plan, sequences, before, logits))?;
        Ok((sampled, scorer.finish()?))
    }

    /// Runs a step without rows, which is this rank's part in the steps of other ranks.
    pub fn launch_empty(&mut self) -> Result<()> {
        self.steps += 1;
        let Self { steps, most_logits, .. } = *self;
        let mut context =
            StepContext { step: steps, most_logits, isolate_faults: true, ..StepContext::default() };
        let step = Step::new([], self.kv.block_size())?;
        #[cfg(feature = "cuda")]
        if let (Some(device), Some(_)) = (&mut self.device, self.model.ranks()) {
            // If the other ranks decode padded rows, this rank's step has padding rows too, in a graph that forces the
            // same choices.
            context.force_balance = self.force_balance;
            let kv = &mut self.kv;
            let nothing = Default::default();
            return device.run(self.model, kv, &step, &nothing, &mut context, &mut self.ex).map(drop);
        }
        run_step(self.model, &step, &mut self.kv, None, &mut context, &mut self.ex).map(drop)
    }

    /// The results of the oldest step under way.
    pub fn collect(&mut self) -> Result<Option<StepResult>> {
        self.results.pop_front().map(|step| self.finish(step)).transpose()
    }

    fn finish(&mut self, step: Launched) -> Result<StepResult> {
        match step {
            Launched::Done(result) => Ok(result),
            #[cfg(feature = "cuda")]
            Launched::OnDevice(step) => match &mut self.device {
                Some(device) => device.collect(self.model, step, &self.ex),
                None => bail!("a step on a device that is gone"),
            },
        }
    }

    /// Samples a token for each part that ends its sequence. `before` holds the tokens that are not collected yet.
    fn sample(
        &self,
        plan: &Plan,
        sequences: &HashMap<Key, &Sequence>,
        before: Option<&StepResult>,
        logits: ViewMut,
    ) -> Result<Tokens> {
        let tokens = next_tokens(&plan.parts, sequences, before)?;
        let banned = |next: &Next| -> Vec<u32> {
            let request = &next.sequence.request;
            if next.position < request.min_tokens { request.stop_ids().collect() } else { Vec::new() }
        };
        let banned: Vec<_> = tokens.iter().map(banned).collect();
        let masks = masks(&tokens, &self.ex);
        let rows: Vec<SampleRow> = (tokens.iter().zip(&banned).zip(&masks))
            .map(|((next, banned), mask)| SampleRow {
                params: &next.sequence.sampling,
                prompt: &next.sequence.request.prompt,
                output: &next.output,
                banned,
                mask: mask.as_ref().ok().and_then(|mask| mask.as_ref().map(Mask::words)),
            })
            .collect();
        let sampled = sample_rows(logits, &rows, &self.ex)?;
        // A row whose mask could not be computed was sampled without a mask, so the error of the mask replaces its
        // token.
        let sampled = sampled.into_iter().zip(masks);
        let sampled = sampled.map(|(sampled, mask)| mask.map_err(SamplingError::Mask).and(sampled));
        Ok(tokens.iter().map(|next| next.sequence.key).zip(sampled).collect())
    }
}
