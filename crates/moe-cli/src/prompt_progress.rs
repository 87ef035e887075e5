//! Shows the progress of the prompts in an engine while no text has arrived.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use moe_engine::engine::DpEngine;

use crate::watch::{Unit, Watch};

/// Watches the prompts that an engine computes, until all are computed.
pub struct PromptProgress {
    watched: Option<(Arc<AtomicU64>, Watch)>,
}

impl PromptProgress {
    /// Watches the prompts of new requests with this total number of tokens.
    pub fn start(tokens: usize) -> Self {
        let computed = Arc::new(AtomicU64::new(0));
        let at = computed.clone();
        let watch = Watch::start("prompt", Unit::Tokens, tokens as u64, move || at.load(Ordering::Relaxed));
        Self { watched: Some((computed, watch)) }
    }

    /// Notes what a step has computed. Removes the bar when the prompts are computed or `text` arrives, which the bar
    /// would break.
    pub fn step(&mut self, engine: &DpEngine, text: bool) {
        let progress = engine.prompt_progress();
        match &self.watched {
            Some((computed, _)) if !text && progress.computed < progress.total => {
                computed.store(progress.computed as u64, Ordering::Relaxed);
            }
            _ => self.watched = None,
        }
    }
}
