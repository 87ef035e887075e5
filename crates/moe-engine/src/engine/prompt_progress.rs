//! The progress of prompts, for users who wait for the first token of a long prompt.

use super::scheduler::Scheduler;
use super::{DpEngine, Engine};

/// Tokens of the prompts of all sequences that are waiting or running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptProgress {
    /// Tokens that are computed or come from the prefix cache.
    pub computed: usize,
    /// All of them.
    pub total: usize,
}

impl PromptProgress {
    fn of(scheduler: &Scheduler) -> Self {
        let sequences = scheduler.waiting.iter().chain(&scheduler.running);
        sequences.fold(Self::default(), |sum, sequence| Self {
            computed: sum.computed + sequence.computed.min(sequence.prompt_len()),
            total: sum.total + sequence.prompt_len(),
        })
    }
}

impl Engine<'_> {
    /// The progress of this engine's prompts.
    pub fn prompt_progress(&self) -> PromptProgress {
        PromptProgress::of(&self.scheduler)
    }
}

impl DpEngine<'_> {
    /// The progress of the prompts on the first rank. A request gets there with the next step.
    pub fn prompt_progress(&self) -> PromptProgress {
        self.engine.prompt_progress()
    }
}
