//! Messages between ranks' processes, read as the rank reads them that gets them.

use anyhow::Result;
use model_runtime::ModelInfo;

use super::follow::read_message;
use super::step_message::GroupMessage;
use crate::engine::replies::check_reply;
use crate::engine::serve::check_question;

/// Who says something to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageKind {
    /// The first rank of a group to the others: a step, masks, a move of experts.
    Group,
    /// Rank 0 to the first rank of another group: what its engine is to do.
    Question,
    /// The answer, for a request whose prompt has so many tokens.
    Reply {
        /// Tokens of the prompt.
        prompt: usize,
    },
}

/// Reads a message as a rank of this model does, up to where it would act on it.
///
/// # Errors
/// What ends the run, by the name of the sender: bytes that are no such message, or what they say that cannot be.
pub fn check_message(kind: MessageKind, message: &[u8], info: &ModelInfo) -> Result<()> {
    match kind {
        MessageKind::Group => {
            if let GroupMessage::Step(step) = read_message(message, info)? {
                // What a rank without weights can do of it.
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
    use std::sync::Arc;
    use std::time::Duration;

    use model_runtime::{
        DeviceSampling, KvCache, LogitsRows, MoeInfo, RoutedExperts, RunnerSizes, SequenceStep, Step,
        StepContext,
    };
    use moe_layer::MoveRound;

    use super::*;
    use crate::engine::replies::examples_of_replies;
    use crate::engine::serve::examples_of_questions;
    use crate::parallel::step_message::StepMessage;
    use crate::parallel::wire::encode;
    use crate::testing::small_model;

    fn info() -> ModelInfo {
        ModelInfo { moe: Some(MoeInfo { layers: vec![0], num_experts: 4, top_k: 2 }), ..small_model(64) }
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
        let kv = KvCache::new(&info().states, 6, 4).unwrap();
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

    /// Every byte with every bit flipped, every length: a message is refused, or is one that a rank could have sent.
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
    fn what_a_step_says_beside_its_rows_is_checked() {
        let step = Step::new([], 4).unwrap();
        let kv = KvCache::new(&info().states, 6, 4).unwrap();
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
        let masks = |len: usize| GroupMessage::Masks(vec![0; len]).check(&info());
        assert!(masks(0).is_ok() && masks(32).is_ok() && masks(4).is_err());
        let layer = |layer| {
            let round = MoveRound { layer, phy2log: vec![], sole: vec![], bytes: 1, limit: Duration::ZERO };
            GroupMessage::Move(round).check(&info())
        };
        assert!(layer(0).is_ok() && layer(1).is_err());
    }
}
