//! How far the prompts of an engine are, while no text can come yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use moe_engine::engine::DpEngine;

use crate::watch::{Unit, Watch};

/// Watches the prompts that an engine computes, until all are done.
pub struct PromptProgress {
    watched: Option<(Arc<AtomicU64>, Watch)>,
}

impl PromptProgress {
    /// Watches the prompts of new requests, of so many tokens in all.
    pub fn start(tokens: usize) -> Self {
        let computed = Arc::new(AtomicU64::new(0));
        let at = computed.clone();
        let watch = Watch::start("prompt", Unit::Tokens, tokens as u64, move || at.load(Ordering::Relaxed));
        Self { watched: Some((computed, watch)) }
    }

    /// Notes what a step has computed; takes the bar away when the prompts are done or `text` comes, which a bar would tear.
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
