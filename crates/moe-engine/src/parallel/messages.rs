//! Messages between the processes of ranks, read in the same way as the receiving rank reads them.

use model_runtime::ModelInfo;

use super::follow::read_message;
use super::step_message::GroupMessage;
use crate::engine::replies::check_reply;
use crate::engine::serve::check_question;
use crate::error::Result;

/// The sender and the receiver of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MessageKind {
    /// The first rank of a group sends it to the other ranks of the group: a step, masks, or a move of experts.
    Group,
    /// Rank 0 sends it to the first rank of another group: it says what the engine there is to do.
    Question,
    /// The answer to such a question, for a request with a prompt of `prompt` tokens.
    Reply {
        /// Number of tokens of the prompt.
        prompt: usize,
    },
}

/// Reads a message as a rank of this model does, but does not act on it.
///
/// # Errors
/// The error that would end the run. It names the sender. The bytes are not such a message, or the message has
/// impossible contents.
pub fn check_message(kind: MessageKind, message: &[u8], info: &ModelInfo) -> Result<()> {
    match kind {
        MessageKind::Group => {
            if let GroupMessage::Step(step) = read_message(message, info)? {
                // A rank without weights can do only these checks of a step.
                step.step.views()?;
                step.context();
            }
            Ok(())
        }
        MessageKind::Question => check_question(message),
        MessageKind::Reply { prompt } => check_reply(message, prompt, info),
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;
    use std::sync::Arc;
    use std::time::Duration;

    use candle_core::Device;
    use model_runtime::{
        CacheSizes, DeltaHeads, DeviceSampling, KvCache, LayerState, LogitsRows, MoeInfo, RoutedExperts,
        RunnerSizes, SequenceStep, StateCopy, StateLayout, Step, StepContext,
    };
    use moe_layer::MoveRound;

    use super::*;
    use crate::engine::replies::examples_of_replies;
    use crate::engine::serve::examples_of_questions;
    use crate::parallel::step_message::StepMessage;
    use crate::parallel::wire::encode;
    use crate::testing::small_model;

    /// A model with layers of both kinds of states.
    fn info() -> ModelInfo {
        let small = small_model(64);
        let heads = DeltaHeads { key_heads: 1, value_heads: 1, key_dim: 2, value_dim: 2 };
        let recurrent = LayerState::Recurrent(StateLayout { heads, conv_width: 2 });
        let states = small.states.as_slice().iter().copied().chain([recurrent]).collect();
        let moe = Some(MoeInfo { layers: vec![0], num_experts: 4, top_k: 2 });
        ModelInfo { moe, states, ..small }
    }

    /// A cache of six blocks of four tokens with three states and two saved ones.
    fn cache() -> KvCache {
        let sizes = CacheSizes { num_blocks: 6, block_size: 4, num_states: 3, num_saved: 2 };
        KvCache::with_sizes(&Device::Cpu, &info().states, sizes).unwrap()
    }

    fn group_messages() -> Vec<Vec<u8>> {
        let sequence = |token_ids, start, blocks| SequenceStep {
            token_ids,
            start,
            prompt_len: 4,
            blocks,
            logits: LogitsRows::Last,
            scored: &[],
        };
        let step = Step::new([sequence(&[9], 6, &[5, 2]), sequence(&[7, 8, 9], 1, &[3])], 4).unwrap();
        let copy = |state, saved| StateCopy { state, saved };
        let step = step.with_states(vec![2, 0], vec![copy(0, 1)], vec![copy(2, 0), copy(0, 1)]).unwrap();
        let kv = cache();
        let replay = RoutedExperts::from_ids(4, 1, 2, vec![0, 1, 2, 3, u32::MAX, 0, 1, 0]).unwrap();
        let context = StepContext { replay: Some(Arc::new(replay)), step: 9, ..StepContext::default() };
        let sampling =
            DeviceSampling { token_source: vec![u32::MAX, 0], params: (0..32).collect(), masked: true };
        let sizes = RunnerSizes { rows: 8, sequences: 2, tokens: 24, blocks: 6, eager: true };
        let message = |sampling| {
            encode(&GroupMessage::Step(Box::new(StepMessage::new(&step, sampling, &kv, &context)))).unwrap()
        };
        let round = MoveRound {
            layer: 0,
            phy2log: vec![1, 0],
            sole: vec![1, 0],
            bytes: 9,
            limit: Duration::from_secs(1),
        };
        vec![
            message(None),
            message(Some((&sampling, sizes))),
            encode(&GroupMessage::Masks(vec![7; 16])).unwrap(),
            encode(&GroupMessage::Move(round)).unwrap(),
        ]
    }

    /// Flips every bit of every byte, and cuts the message at every length. Each result is refused, or is a message
    /// that a rank could have sent.
    #[test]
    fn altered_messages_are_refused_or_harmless() {
        let kinds = [
            (MessageKind::Group, group_messages()),
            (MessageKind::Question, examples_of_questions()),
            (MessageKind::Reply { prompt: 5 }, examples_of_replies()),
        ];
        for (kind, messages) in kinds {
            for message in messages {
                check_message(kind, &message, &info())
                    .unwrap_or_else(|e| panic!("{kind:?} {message:?}: {e:#}"));
                let mut refused = 0;
                for bit in 0..8 * message.len() {
                    let mut altered = message.clone();
                    altered[bit / 8] ^= 1 << (bit % 8);
                    refused += usize::from(check_message(kind, &altered, &info()).is_err());
                }
                for len in 0..message.len() {
                    assert!(
                        check_message(kind, &message[..len], &info()).is_err(),
                        "{kind:?} of {len} bytes"
                    );
                }
                assert!(check_message(kind, &[&message[..], &[0]].concat(), &info()).is_err());
                assert!(refused > 0, "{kind:?} {message:?}");
            }
        }
    }

    #[test]
    fn what_a_step_says_besides_its_rows_is_checked() {
        let step = Step::new([], 4).unwrap();
        let kv = cache();
        let message = |alter: &dyn Fn(&mut StepMessage)| {
            let mut message = StepMessage::new(&step, None, &kv, &StepContext::default());
            alter(&mut message);
            GroupMessage::Step(Box::new(message.into_owned())).check(&info()).map_err(|e| e.to_string())
        };
        assert_eq!(message(&|_| {}), Ok(()));
        let sizes = RunnerSizes { rows: 8, sequences: 2, tokens: 24, blocks: 6, eager: true };
        let sampled = |sizes: RunnerSizes| message(&|m| m.sampling = Some((Default::default(), sizes)));
        assert_eq!(sampled(sizes), Ok(()));
        for wrong in [
            RunnerSizes { rows: usize::MAX, ..sizes },
            RunnerSizes { sequences: 0, ..sizes },
            RunnerSizes { tokens: 65, ..sizes },
            RunnerSizes { blocks: 8, ..sizes },
        ] {
            assert!(sampled(wrong).unwrap_err().contains("a context of 64 tokens"));
        }
        let many = |m: &mut StepMessage| m.cache.sizes.num_saved = 7;
        assert!(message(&many).unwrap_err().contains("6 blocks with 3 recurrent states and 7 saved ones"));
        let saves = |m: &mut StepMessage| {
            let saves = vec![StateCopy { state: 0, saved: 0 }];
            let step = m.step.as_ref().clone().with_states(vec![], vec![], saves);
            m.step = Cow::Owned(step.unwrap());
        };
        assert!(message(&saves).unwrap_err().contains("state 0 is saved, and no sequence has it"));
        let masks = |len: usize| GroupMessage::Masks(vec![0; len]).check(&info());
        assert!(masks(0).is_ok() && masks(32).is_ok() && masks(4).is_err());
        let layer = |layer| {
            let round = MoveRound { layer, phy2log: vec![], sole: vec![], bytes: 1, limit: Duration::ZERO };
            GroupMessage::Move(round).check(&info())
        };
        assert!(layer(0).is_ok() && layer(1).is_err());
    }
}
