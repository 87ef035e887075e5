//! Sampling of a step's tokens on a CUDA device: the requests for which it is possible, the parameters of each row, and
//! the slots of sequences whose logits depend on more than the model.

use std::collections::HashMap;

use candle_core::{Result, bail};
use model_runtime::cuda::{MAX_EDITS, MAX_LOGPROBS, SampleParams, SampleSlots, SlotReset};
use model_runtime::device_slots::DeviceSlots;
use model_runtime::sampling::LogitEdits;
use model_runtime::{Exec, SamplingParams, StepRanks, View};
use tracing::{info, warn};

use super::masks::DeviceMasks;
use super::plan::{Key, Part, Plan, StepResult};
use super::sequence::Sequence;
use super::slots::{Assigned, Slots};

/// Memory that is allocated when a request first needs it.
pub(super) enum Memory<T> {
    None,
    Ready(Box<T>),
    /// The device has no room, so the host samples.
    Refused,
}

impl<T> Memory<T> {
    /// Whether it exists. The first call makes it, and logs once if that is not possible.
    pub fn is_there(&mut self, make: impl FnOnce() -> Result<T>, what: &str) -> bool {
        if let Self::None = self {
            *self = match make() {
                Ok(memory) => Self::Ready(Box::new(memory)),
                Err(e) => {
                    warn!("steps with {what} go to the host: {e}");
                    Self::Refused
                }
            };
        }
        matches!(self, Self::Ready(_))
    }

    /// The object, if it exists.
    pub fn get(&mut self) -> Option<&mut T> {
        match self {
            Self::Ready(memory) => Some(memory),
            _ => None,
        }
    }
}

/// The options of sampling that the rows of a step need. Each combination has its own graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct SamplingNeeds {
    pub slots: bool,
    pub logprobs: bool,
    pub masks: bool,
}

impl SamplingNeeds {
    /// The options that these rows need.
    pub fn of(rows: impl Iterator<Item = SampleParams>) -> Self {
        rows.fold(Self::default(), |asked, row| Self {
            slots: asked.slots || row.slot != SampleParams::PADDING.slot,
            logprobs: asked.logprobs || row.logprobs.is_some(),
            ..asked
        })
    }
}

pub(super) struct DeviceSampler {
    memory: Memory<DeviceSlots>,
    masks: Memory<DeviceMasks>,
    slots: Slots,
    num_slots: usize,
    vocab_size: usize,
    max_model_len: usize,
}

impl DeviceSampler {
    /// For steps of at most `num_slots` sequences of at most `max_model_len` tokens.
    pub fn new(num_slots: usize, vocab_size: usize, max_model_len: usize) -> Self {
        let memory = Memory::None;
        let masks = Memory::None;
        let slots = Slots::new(num_slots);
        Self { memory, masks, slots, num_slots, vocab_size, max_model_len }
    }

    /// Whether the device can sample every token of a plan. If slots are needed for the first time, they are made here,
    /// between steps, so that no step allocates. If other ranks (`ranks`) sample the same tokens or agree on graphs, no
    /// sequence may need slots or log-probabilities, which those ranks do not have, or masks that do not reach all
    /// ranks.
    pub fn takes(
        &mut self,
        plan: &Plan,
        sequences: &HashMap<Key, &Sequence>,
        ranks: Option<&dyn StepRanks>,
        ex: &Exec,
    ) -> bool {
        let known = |part: &Part| sequences.get(&part.key).map(|sequence| (*sequence, part.samples));
        let parts: Option<Vec<_>> = plan.parts.iter().map(known).collect();
        let Some(parts) = parts.filter(|parts| parts.iter().all(|(s, position)| self.fits(s, *position)))
        else {
            return false;
        };
        // The device lists at most this many.
        let scored = |i: usize| {
            let listed = parts[i].0.request.prompt_logprobs.unwrap_or(0).min(self.vocab_size);
            plan.step.scored_tokens(i).is_empty() || listed <= MAX_LOGPROBS
        };
        if !(0..parts.len()).all(scored) {
            return false;
        }
        let sampled = || parts.iter().filter_map(|(s, position)| Some((s, (*position)?)));
        let with_slots = sampled().any(|(s, position)| needs_slot(s, position));
        let with_logprobs = sampled().any(|(s, _)| s.sampling.logprobs.is_some());
        let with_masks = sampled().any(|(s, _)| s.has_mask());
        let ranks = ranks.filter(|ranks| ranks.shares_steps());
        ranks.is_none_or(|ranks| !with_slots && !with_logprobs && (!with_masks || ranks.takes_masks()))
            && (!with_slots || self.has_slots(ex))
            && (!with_masks || self.has_masks(ex))
    }

    /// Whether the device can sample with the options of a sequence.
    fn fits(&self, sequence: &Sequence, position: Option<usize>) -> bool {
        let p = &sequence.sampling;
        let listed = p.logprobs.is_none_or(|n| n.min(self.vocab_size) <= MAX_LOGPROBS);
        let few = num_edits(sequence) <= MAX_EDITS;
        position.is_none() || listed && few && p.allowed_token_ids.is_none()
    }

    fn has_slots(&mut self, ex: &Exec) -> bool {
        let slots = self.num_slots;
        let vocab_size = self.vocab_size;
        let longest = self.max_model_len;
        let make = || {
            let memory = DeviceSlots::new(slots, vocab_size, longest, ex)?;
            let bytes = memory.bytes();
            info!("{bytes} bytes on the device for penalties and logit bias of {slots} sequences");
            Ok(memory)
        };
        self.memory.is_there(make, "penalties or logit bias (a lower `max_num_seqs` needs less)")
    }

    fn has_masks(&mut self, ex: &Exec) -> bool {
        let make = || DeviceMasks::new(self.num_slots, self.vocab_size, ex);
        self.masks.is_there(make, "structured output or bad words (a lower `max_num_seqs` needs less)")
    }

    /// Copies the masks of a step, [R, ceil(V / 32)] u32, one for each token that it samples.
    pub fn upload_masks(&mut self, masks: &[u32], ex: &Exec) -> Result<()> {
        self.has_masks(ex);
        match self.masks.get() {
            Some(memory) => memory.upload(masks, ex),
            None => bail!(
                "no memory for the masks of structured output or bad words; a lower `max_num_seqs` needs less"
            ),
        }
    }

    /// The inputs of the sampling kernel other than the logits of `rows` rows: slots and masks, if they are needed.
    pub fn views(
        &mut self,
        asked: SamplingNeeds,
        rows: usize,
    ) -> Result<(Option<SampleSlots<'_>>, Option<View<'_>>)> {
        let slots = self.memory.get().filter(|_| asked.slots).map(DeviceSlots::views);
        let masks = match &self.masks {
            Memory::Ready(masks) if asked.masks => Some(masks.view(rows)?),
            _ => None,
        };
        Ok((slots, masks))
    }

    /// How each token of a plan is sampled, and for which sequence. Stale slots are rebuilt from `history`.
    pub fn sample(
        &mut self,
        plan: &Plan,
        history: History,
        ex: &Exec,
    ) -> Result<(Vec<SampleParams>, Vec<Key>)> {
        let sampled = |part: &Part| Some((*history.sequences.get(&part.key)?, part.samples?));
        let rows: Vec<(&Sequence, usize)> = plan.parts.iter().filter_map(sampled).collect();
        let mut params: Vec<SampleParams> =
            rows.iter().map(|(s, position)| row(&s.sampling, *position)).collect();
        let with_slot: Vec<usize> = (0..rows.len()).filter(|&i| needs_slot(rows[i].0, rows[i].1)).collect();
        let wanted: Vec<(Key, usize)> = with_slot.iter().map(|&i| (rows[i].0.key, rows[i].1)).collect();
        let Some(assigned) = self.slots.assign(&wanted) else {
            bail!("{} sequences need a slot, and there are {}", wanted.len(), self.num_slots)
        };
        let mut stale = Vec::new();
        for (&i, Assigned { slot, stale: is_stale }) in with_slot.iter().zip(assigned) {
            let (sequence, position) = rows[i];
            let bans = num_bans(sequence);
            let p = &sequence.sampling;
            params[i].penalties = [p.repetition_penalty, p.frequency_penalty, p.presence_penalty];
            params[i].slot = slot as u32;
            let early = if position < sequence.request.min_tokens { bans } else { 0 };
            params[i].edits = [early, bans, num_edits(sequence) - bans].map(|n| n as u32);
            if is_stale {
                stale.push((slot as u32, sequence, position));
            }
        }
        self.rebuild(&stale, history.before, ex)?;
        Ok((params, rows.iter().map(|(s, _)| s.key).collect()))
    }

    fn rebuild(
        &mut self,
        stale: &[(u32, &Sequence, usize)],
        before: Option<&StepResult>,
        ex: &Exec,
    ) -> Result<()> {
        let Some(memory) = self.memory.get() else { return Ok(()) };
        let mut edits = Vec::new();
        let mut outputs = Vec::new();
        for (_, sequence, position) in stale {
            edits.push(LogitEdits::new(&sequence.sampling, bans(sequence)).unwrap_or_default());
            outputs.push(sequence.output(*position, before)?);
        }
        let resets: Vec<SlotReset> = (stale.iter().zip(&edits).zip(&outputs))
            .map(|(((slot, sequence, _), edits), output)| SlotReset {
                slot: *slot,
                prompt: &sequence.request.prompt,
                output,
                edits: &edits.list,
            })
            .collect();
        memory.reset(&resets, ex)
    }
}

/// The tokens before the tokens of a step.
#[derive(Clone, Copy)]
pub struct History<'a> {
    /// The sequences of the step.
    pub sequences: &'a HashMap<Key, &'a Sequence>,
    /// The result of the step before, if the host sampled it. The sequences do not contain it yet.
    pub before: Option<&'a StepResult>,
}

/// The parameters of a row without a slot.
fn row(p: &SamplingParams, position: usize) -> SampleParams {
    SampleParams {
        temperature: p.temperature,
        top_p: p.top_p,
        min_p: p.min_p,
        top_k: u32::try_from(p.top_k).unwrap_or(0),
        seed: p.seed,
        position: position as u64,
        logprobs: p.logprobs.map(|n| n.min(MAX_LOGPROBS) as u32),
        ..SampleParams::PADDING
    }
}

/// Ids that are excluded until the minimum of tokens.
fn bans(sequence: &Sequence) -> impl Iterator<Item = u32> + '_ {
    sequence.request.stop_ids().filter(|_| sequence.request.min_tokens > 0)
}

fn num_bans(sequence: &Sequence) -> usize {
    bans(sequence).count()
}

/// Length of the sequence's [`LogitEdits::list`].
fn num_edits(sequence: &Sequence) -> usize {
    num_bans(sequence) + sequence.sampling.logit_bias.len()
}

/// Whether the token of an output position depends on more than the logits and the row's own parameters.
fn needs_slot(sequence: &Sequence, position: usize) -> bool {
    let bans = num_bans(sequence);
    let early = bans > 0 && position < sequence.request.min_tokens;
    sequence.sampling.has_penalties() || early || num_edits(sequence) > bans
}
