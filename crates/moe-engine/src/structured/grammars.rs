//! The compiled grammars of a tokenizer. They are kept while they are in use, so a batch of many requests compiles its
//! schema once.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::available_parallelism;

use llguidance::Matcher;

use super::compiler::{Compiled, Compiler};
use super::lead::Tags;
use super::output::{StructuredOutput, StructuredOutputError};
use super::room::{Room, Taken};
use crate::tokenizer::Tokenizer;

/// The largest number of unused grammars that are kept, and the largest number of bytes of their lexers. The least
/// recently used grammar is dropped first.
const KEPT: usize = 32;
const KEPT_LEXER_BYTES: usize = 4 << 20;
/// The largest number of bytes of the lexers of all grammars. Above it no grammar is compiled ahead of its use. The
/// grammars then take about 100 MB in all.
const AHEAD_LEXER_BYTES: usize = 8 << 20;
/// The largest number of lexers of a grammar.
const MAX_LEXERS: usize = 8;

/// Compiles grammars for one tokenizer.
pub(crate) struct Grammars {
    compiler: Arc<Compiler>,
    room: Arc<Room>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// All grammars that are in use or kept.
    known: HashMap<StructuredOutput, Weak<Grammar>>,
    /// The unused grammars that are kept. The most recently used one is the last.
    kept: Vec<Arc<Grammar>>,
}

impl State {
    fn keep(&mut self, grammar: Arc<Grammar>) {
        self.kept.retain(|kept| !Arc::ptr_eq(kept, &grammar));
        self.kept.push(grammar);
        let mut bytes: usize = self.kept.iter().map(|kept| kept.taken.bytes()).sum();
        while self.kept.len() > KEPT || bytes > KEPT_LEXER_BYTES {
            bytes -= self.kept.remove(0).taken.bytes();
        }
    }
}

/// A compiled grammar.
pub(crate) struct Grammar {
    /// The tags of the reasoning that may come before the text.
    pub(super) tags: Arc<Tags>,
    /// Whether the text begins with the header of its message (a call in a channel).
    pub(super) has_header: bool,
    /// A matcher before the first token. Its lexer is not shared.
    pristine: Mutex<Matcher>,
    /// Matchers before the first token. All matchers that are made from one of them share its lexer, with the states
    /// that the lexer has computed, and a lock. There are several, so that threads can compute masks in parallel.
    shared: Vec<Mutex<Option<Matcher>>>,
    next: AtomicUsize,
    /// The room that its lexer takes.
    taken: Taken,
}

impl Grammars {
    pub fn new(tokenizer: Tokenizer) -> Self {
        let compiler = Arc::new(Compiler::new(tokenizer));
        Self { compiler, room: Arc::default(), state: Mutex::default() }
    }

    /// Returns the compiled grammar.
    ///
    /// # Errors
    /// The output is not well-formed, uses an unsupported feature, allows no text, is too large, or takes too long.
    pub fn compile(&self, output: &StructuredOutput) -> Result<Arc<Grammar>, StructuredOutputError> {
        if let Some(grammar) = self.known(output) {
            return Ok(grammar);
        }
        let compiled = self.compiler.compile(output).map_err(|reason| output.error(reason))?;
        let grammar = Arc::new(Grammar::new(compiled, output.has_header(), &self.room));
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.known.retain(|_, grammar| grammar.strong_count() > 0);
        state.known.insert(output.clone(), Arc::downgrade(&grammar));
        state.keep(grammar.clone());
        Ok(grammar)
    }

    /// Waits until the existing grammars leave room for another one. A grammar that is in use is dropped when its
    /// requests end.
    pub fn wait_for_room(&self) {
        self.room.wait_below(AHEAD_LEXER_BYTES);
    }

    /// Returns the compiled grammar if it exists.
    pub fn known(&self, output: &StructuredOutput) -> Option<Arc<Grammar>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let grammar = state.known.get(output)?.upgrade()?;
        state.keep(grammar.clone());
        Some(grammar)
    }

    /// Returns the number of grammars that are kept.
    #[cfg(test)]
    pub fn kept(&self) -> usize {
        self.state.lock().unwrap().kept.len()
    }
}

impl Grammar {
    fn new(compiled: Compiled, has_header: bool, room: &Arc<Room>) -> Self {
        let Compiled { pristine, tags, lexer_bytes } = compiled;
        let lexers = available_parallelism().map_or(1, usize::from).min(MAX_LEXERS);
        let shared = (0..lexers).map(|_| Mutex::default()).collect();
        Self {
            tags,
            has_header,
            pristine: Mutex::new(pristine),
            shared,
            next: AtomicUsize::new(0),
            taken: room.take(lexer_bytes),
        }
    }

    /// Returns a matcher before the first token that shares its lexer with others.
    pub fn matcher(&self) -> Matcher {
        let place = self.next.fetch_add(1, Relaxed) % self.shared.len();
        let mut shared = self.shared[place].lock().unwrap_or_else(PoisonError::into_inner);
        shared.get_or_insert_with(|| self.own_matcher()).clone()
    }

    /// Returns a matcher before the first token that has a lexer of its own.
    pub fn own_matcher(&self) -> Matcher {
        self.pristine.lock().unwrap_or_else(PoisonError::into_inner).deep_clone()
    }
}

impl StructuredOutput {
    /// Checks the output as the engine will. Without a tokenizer what may name special tokens is accepted unchecked:
    /// a grammar, and calls whose form needs them.
    ///
    /// # Errors
    /// The output is not well-formed, uses an unsupported feature, allows no text, or is too large.
    pub fn check(&self, tokenizer: Option<&Tokenizer>) -> Result<(), StructuredOutputError> {
        match (tokenizer, self) {
            (Some(tokenizer), _) => Grammars::new(tokenizer.clone()).compile(self).map(drop),
            (None, Self::Grammar(_)) => Ok(()),
            (None, Self::ToolCalls { parser, .. }) if !parser.token_tags().is_empty() => Ok(()),
            (None, _) => {
                let bytes = Tokenizer::bytes().map_err(|e| self.error(format!("{e:#}")))?;
                Grammars::new(bytes).compile(self).map(drop)
            }
        }
    }
}
