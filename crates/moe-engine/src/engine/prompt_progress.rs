//! How far prompts are computed, for who waits for the first token of a long one.

use super::scheduler::Scheduler;
use super::{DpEngine, Engine};

/// Tokens of the prompts of all sequences that are waiting or running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptProgress {
    /// Those that are computed, or come from the prefix cache.
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
    /// How far the prompts of this engine's sequences are.
    pub fn prompt_progress(&self) -> PromptProgress {
        PromptProgress::of(&self.scheduler)
    }
}

impl DpEngine<'_> {
    /// How far the prompts on the first rank are. Requests get there with the next step.
    pub fn prompt_progress(&self) -> PromptProgress {
        self.engine.prompt_progress()
    }
}
