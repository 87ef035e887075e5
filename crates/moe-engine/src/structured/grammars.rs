//! Compiled grammars of a tokenizer, kept as long as they are in use: a batch of many requests compiles its schema once.

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

/// Grammars that are kept though they are not in use, and bytes of their lexers; the one that was asked for least lately goes.
const KEPT: usize = 32;
const KEPT_LEXER_BYTES: usize = 4 << 20;
/// Bytes of the lexers of all grammars, beyond which none is compiled ahead of its use: about 100 MB in all.
const AHEAD_LEXER_BYTES: usize = 8 << 20;
/// Lexers of a grammar at most.
const MAX_LEXERS: usize = 8;

/// Compiles for one tokenizer.
pub(crate) struct Grammars {
    compiler: Arc<Compiler>,
    room: Arc<Room>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// All that are in use or kept.
    known: HashMap<StructuredOutput, Weak<Grammar>>,
    /// The one that was asked for last is at the end.
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
    /// The tags of reasoning that may come before its text.
    pub(super) tags: Arc<Tags>,
    /// A matcher at the first token, with a lexer that is not shared.
    pristine: Mutex<Matcher>,
    /// Matchers at the first token. The matchers made from one of them share a lexer, with what it has found out, and
    /// a lock. So there are several, for masks that threads compute side by side.
    shared: Vec<Mutex<Option<Matcher>>>,
    next: AtomicUsize,
    /// The room of its lexer.
    taken: Taken,
}

impl Grammars {
    pub fn new(tokenizer: Tokenizer) -> Self {
        let compiler = Arc::new(Compiler::new(tokenizer));
        Self { compiler, room: Arc::default(), state: Mutex::default() }
    }

    /// The compiled form.
    ///
    /// # Errors
    /// It is not well-formed, uses what is not supported, allows no text, is too large, or takes too long.
    pub fn compile(&self, output: &StructuredOutput) -> Result<Arc<Grammar>, StructuredOutputError> {
        if let Some(grammar) = self.known(output) {
            return Ok(grammar);
        }
        let compiled = self.compiler.compile(output).map_err(|reason| output.error(reason))?;
        let grammar = Arc::new(Grammar::new(compiled, &self.room));
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.known.retain(|_, grammar| grammar.strong_count() > 0);
        state.known.insert(output.clone(), Arc::downgrade(&grammar));
        state.keep(grammar.clone());
        Ok(grammar)
    }

    /// Waits until the grammars that there are leave room for another one. Grammars that are in use go when their requests end.
    pub fn wait_for_room(&self) {
        self.room.wait_below(AHEAD_LEXER_BYTES);
    }

    /// The compiled form, if it is there.
    pub fn known(&self, output: &StructuredOutput) -> Option<Arc<Grammar>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let grammar = state.known.get(output)?.upgrade()?;
        state.keep(grammar.clone());
        Some(grammar)
    }

    /// How many grammars are kept.
    #[cfg(test)]
    pub fn kept(&self) -> usize {
        self.state.lock().unwrap().kept.len()
    }
}

impl Grammar {
    fn new(compiled: Compiled, room: &Arc<Room>) -> Self {
        let Compiled { pristine, tags, lexer_bytes } = compiled;
        let lexers = available_parallelism().map_or(1, usize::from).min(MAX_LEXERS);
        let shared = (0..lexers).map(|_| Mutex::default()).collect();
        Self {
            tags,
            pristine: Mutex::new(pristine),
            shared,
            next: AtomicUsize::new(0),
            taken: room.take(lexer_bytes),
        }
    }

    /// A matcher at the first token that shares its lexer with others.
    pub fn matcher(&self) -> Matcher {
        let place = self.next.fetch_add(1, Relaxed) % self.shared.len();
        let mut shared = self.shared[place].lock().unwrap_or_else(PoisonError::into_inner);
        shared.get_or_insert_with(|| self.own_matcher()).clone()
    }

    /// A matcher at the first token with a lexer of its own.
    pub fn own_matcher(&self) -> Matcher {
        self.pristine.lock().unwrap_or_else(PoisonError::into_inner).deep_clone()
    }
}

impl StructuredOutput {
    /// Checks it as the engine will. Without a tokenizer a grammar is taken as it is: it may name special tokens.
    ///
    /// # Errors
    /// It is not well-formed, uses what is not supported, allows no text, or is too large.
    pub fn check(&self, tokenizer: Option<&Tokenizer>) -> Result<(), StructuredOutputError> {
        match (tokenizer, self) {
            (Some(tokenizer), _) => Grammars::new(tokenizer.clone()).compile(self).map(drop),
            (None, Self::Grammar(_)) => Ok(()),
            (None, _) => {
                let bytes = Tokenizer::bytes().map_err(|e| self.error(format!("{e:#}")))?;
                Grammars::new(bytes).compile(self).map(drop)
            }
        }
    }
}
