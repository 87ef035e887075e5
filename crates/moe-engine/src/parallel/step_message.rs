//! A step as one rank sends it to another one. The form is the same for threads and processes, and for CPUs and GPUs.

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::{Result, bail};
use model_runtime::{
    CacheSizes, DeviceSampling, KvCache, ModelInfo, RoutedExperts, RunnerSizes, Step, StepContext,
};
use moe_layer::MoveRound;
use serde::{Deserialize, Serialize};

use crate::engine::EngineConfig;

/// The work that the first rank of a group asks the other ranks to do together with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum GroupMessage<'a> {
    Step(Box<StepMessage<'a>>),
    /// The masks of the previous step, whose tokens are sampled after this message. They are words stored as bytes,
    /// because a message copies bytes unchanged.
    Masks(#[serde(with = "serde_bytes")] Vec<u8>),
    /// One round of moving experts, between two steps.
    Move(MoveRound),
}

impl GroupMessage<'_> {
    /// Fails if a rank of this model cannot do what the message asks.
    ///
    /// # Errors
    /// Names the first field that is wrong.
    pub fn check(&self, info: &ModelInfo) -> Result<()> {
        match self {
            Self::Step(step) => step.check(info),
            Self::Masks(masks) => {
                let row = info.vocab_size.div_ceil(u32::BITS as usize) * size_of::<u32>();
                match masks.len().is_multiple_of(row.max(1)) {
                    true => Ok(()),
                    false => bail!("masks of {} bytes, expected {row} for each row", masks.len()),
                }
            }
            Self::Move(round) => match info.moe.as_ref().map_or(0, |moe| moe.layers.len()) {
                layers if round.layer < layers => Ok(()),
                layers => bail!("a move of experts of MoE layer {} of {layers}", round.layer),
            },
        }
    }

    /// Returns the message with its own copy of the data.
    pub fn into_owned(self) -> GroupMessage<'static> {
        match self {
            Self::Step(step) => GroupMessage::Step(Box::new(step.into_owned())),
            Self::Masks(masks) => GroupMessage::Masks(masks),
            Self::Move(round) => GroupMessage::Move(round),
        }
    }
}

/// Everything that a rank needs in order to run the step of another rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct StepMessage<'a> {
    pub step: Cow<'a, Step>,
    /// How tokens are sampled on the device. It is `None` if the host samples, which only the first rank does.
    pub sampling: Option<(Cow<'a, DeviceSampling>, RunnerSizes)>,
    pub cache: StepCache,
    replay: Option<Arc<RoutedExperts>>,
    force_balance: Option<u64>,
    /// The number of the step.
    number: u64,
    /// Whether all ranks keep the whole residual stream, because the first rank shows it.
    whole_residual: bool,
    /// See [`StepContext::isolate_faults`].
    isolate_faults: bool,
    /// See [`StepContext::most_logits`].
    most_logits: usize,
}

/// The KV cache of a step, with the id that it has on the first rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StepCache {
    pub id: u64,
    pub sizes: CacheSizes,
}

impl StepCache {
    pub fn of(kv: &KvCache) -> Self {
        Self { id: kv.id(), sizes: kv.sizes() }
    }
}

impl StepMessage<'_> {
    /// Fails if this is not a step of this model.
    fn check(&self, info: &ModelInfo) -> Result<()> {
        let CacheSizes { num_blocks, block_size, num_states, num_saved } = self.cache.sizes;
        if num_states > num_blocks.max(EngineConfig::MAX_NUM_SEQS) || num_saved > num_blocks {
            bail!(
                "a KV cache of {num_blocks} blocks with {num_states} recurrent states and {num_saved} saved ones"
            )
        }
        self.step.check(info.vocab_size, num_blocks, block_size)?;
        if info.states.are_recurrent() {
            self.step.check_states(&self.cache.sizes)?;
        }
        let most_logits = EngineConfig::MAX_NUM_SEQS.next_multiple_of(8);
        if self.most_logits > most_logits {
            bail!("{} rows of logits, expected at most {most_logits}", self.most_logits)
        }
        if let Some(replay) = &self.replay {
            let Some(moe) = &info.moe else { bail!("replayed routing for a model without experts") };
            replay.check(self.step.num_tokens(), moe.layers.len(), moe.top_k, moe.num_experts)?;
        }
        let Some((sampling, sizes)) = &self.sampling else { return Ok(()) };
        let RunnerSizes { rows, sequences, tokens, blocks, .. } = *sizes;
        let fits = (1..=EngineConfig::MAX_NUM_BATCHED_TOKENS).contains(&rows)
            && (1..=EngineConfig::MAX_NUM_SEQS).contains(&sequences)
            && tokens <= info.max_context_len
            && blocks <= num_blocks.saturating_add(1);
        if !fits {
            bail!("{sizes:?} for a context of {} tokens and {num_blocks} KV blocks", info.max_context_len)
        }
        sampling.check(self.step.num_tokens(), self.step.num_logits(), sequences)
    }
}

impl<'a> StepMessage<'a> {
    pub fn new(
        step: &'a Step,
        sampling: Option<(&'a DeviceSampling, RunnerSizes)>,
        kv: &KvCache,
        context: &StepContext,
    ) -> Self {
        Self {
            step: Cow::Borrowed(step),
            sampling: sampling.map(|(sampling, sizes)| (Cow::Borrowed(sampling), sizes)),
            cache: StepCache::of(kv),
            replay: context.replay.clone(),
            force_balance: context.force_balance,
            number: context.step,
            whole_residual: context.whole_residual,
            isolate_faults: context.isolate_faults,
            most_logits: context.most_logits,
        }
    }

    /// Returns the message with its own copy of the data.
    pub fn into_owned(self) -> StepMessage<'static> {
        StepMessage {
            step: Cow::Owned(self.step.into_owned()),
            sampling: self.sampling.map(|(sampling, sizes)| (Cow::Owned(sampling.into_owned()), sizes)),
            ..self
        }
    }

    /// Returns the context of the step on the other rank. Only the first rank records routing and counts experts.
    /// Nothing else in a step depends on that.
    pub fn context(&self) -> StepContext {
        StepContext {
            replay: self.replay.clone(),
            force_balance: self.force_balance,
            step: self.number,
            whole_residual: self.whole_residual,
            isolate_faults: self.isolate_faults,
            most_logits: self.most_logits,
            ..StepContext::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;
    use model_runtime::{LogitsRows, SequenceStep, kv_cache::KvLayout};

    use super::*;
    use crate::parallel::wire::{decode, encode};

    #[test]
    fn steps_travel() {
        let sequence = SequenceStep {
            token_ids: &[7, 8, 9],
            start: 1,
            prompt_len: 4,
            blocks: &[5, 2],
            logits: LogitsRows::Last,
            scored: &[],
        };
        let step = Step::new([sequence], 2).unwrap();
        let layout = KvLayout { num_kv_heads: 1, head_dim: 2, value_dim: None, dtype: DType::F32 };
        let kv = KvCache::new(&layout.layers(1), 6, 2).unwrap();
        let replay = RoutedExperts::from_ids(3, 2, 1, vec![0, 1, 2, 3, u32::MAX, 0]).unwrap();
        let context = StepContext {
            replay: Some(Arc::new(replay)),
            force_balance: Some(u64::MAX),
            step: 9,
            whole_residual: true,
            isolate_faults: true,
            most_logits: 7,
            ..StepContext::default()
        };
        let sampling =
            DeviceSampling { token_source: vec![u32::MAX, 0, 1], params: (0..16).collect(), masked: true };
        let sizes = RunnerSizes { rows: 8, sequences: 2, tokens: 40, blocks: 3, eager: true };
        let sent = StepMessage::new(&step, Some((&sampling, sizes)), &kv, &context);
        let got: StepMessage = decode(&encode(&sent).unwrap()).unwrap();
        assert_eq!(format!("{got:?}"), format!("{sent:?}"));
        assert_eq!(*got.step, step);
        let again = got.into_owned().context();
        assert_eq!(again.replay, context.replay);
        assert_eq!((again.force_balance, again.step), (Some(u64::MAX), 9));
        assert!(again.whole_residual && again.isolate_faults);
        assert_eq!(again.most_logits, 7);
        let limit = std::time::Duration::from_millis(1500);
        let phy2log = vec![1, 0, 1];
        let sole = vec![1, 2];
        let round = MoveRound { layer: 3, phy2log, sole, bytes: usize::MAX, limit };
        let masks = GroupMessage::Masks(vec![7, 0, 255, 3]);
        let sent = [GroupMessage::Step(Box::new(sent)), masks, GroupMessage::Move(round)];
        for sent in sent {
            let got: GroupMessage = decode(&encode(&sent).unwrap()).unwrap();
            assert_eq!(format!("{got:?}"), format!("{:?}", sent.into_owned()));
        }
    }
}
