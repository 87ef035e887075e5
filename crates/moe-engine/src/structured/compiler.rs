//! Compiling a grammar, away from the thread that asks: on a stack of a known size, and for a limited time.
//!
//! llguidance has limits of its own ([`ParserLimits`]) for what it builds and for every mask. What it does before it looks
//! at them is bounded here, by the length of a text and its depth. The time that one compilation takes is bounded by both;
//! whoever waits for it gives up earlier.

use std::panic::AssertUnwindSafe;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use llguidance::api::ParserLimits;
use llguidance::{Matcher, ParserFactory, panic_utils};

use super::describe::describe;
use super::lead::Tags;
use super::output::StructuredOutput;
use super::vocabulary::{token_bytes, token_environment};
use crate::tokenizer::Tokenizer;

/// Bytes of the stack. What is never touched costs nothing.
const STACK: usize = 512 << 20;
/// How long one compilation may take.
pub(super) const SECONDS: u32 = 10;
/// Compilations at the same time. One that was given up counts until it has ended.
const AT_ONCE: usize = 4;
/// States of a lexer, at one or two kilobytes each.
const MAX_LEXER_STATES: usize = 50_000;
/// Characters of an error: llguidance's may hold the whole text.
const MAX_REASON: usize = 600;

/// Compiles for one tokenizer.
pub(super) struct Compiler {
    tokenizer: Tokenizer,
    /// Made when they are first needed: they go through the whole vocabulary.
    tools: OnceLock<Result<Tools, String>>,
    free: Mutex<usize>,
    freed: Condvar,
}

/// What is the same for all grammars of a vocabulary.
pub(super) struct Tools {
    factory: ParserFactory,
    pub tags: Arc<Tags>,
}

/// A compiled grammar.
pub(super) struct Compiled {
    /// A matcher at the first token.
    pub pristine: Matcher,
    /// The tags of the vocabulary.
    pub tags: Arc<Tags>,
    /// Bytes of the tables of its lexer at the first token. The whole grammar takes 10 to 20 times as much memory.
    pub lexer_bytes: usize,
}

impl Compiler {
    pub fn new(tokenizer: Tokenizer) -> Self {
        Self { tokenizer, tools: OnceLock::new(), free: Mutex::new(AT_ONCE), freed: Condvar::new() }
    }

    /// The compiled form.
    ///
    /// # Errors
    /// The output is not well-formed, uses what is not supported, allows no text, is too large, or takes too long.
    pub fn compile(self: &Arc<Self>, output: &StructuredOutput) -> Result<Compiled, String> {
        self.enter();
        let compiler = self.clone();
        let output = output.clone();
        let work = move || {
            let compiled = compiler.tools().and_then(|tools| tools.compile(&output));
            compiler.leave();
            compiled
        };
        let compiled = on_stack(work).inspect_err(|_| self.leave())?;
        compiled.recv_timeout(Duration::from_secs(SECONDS.into())).unwrap_or_else(|e| match e {
            RecvTimeoutError::Timeout => Err(format!("compiling it takes more than {SECONDS} s")),
            RecvTimeoutError::Disconnected => Err("the thread that compiles it has failed".into()),
        })
    }

    fn tools(&self) -> Result<&Tools, String> {
        let make = || Tools::new(&token_bytes(&self.tokenizer)?);
        self.tools.get_or_init(make).as_ref().map_err(String::clone)
    }

    /// Waits until fewer than [`AT_ONCE`] compile.
    fn enter(&self) {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free = self.freed.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner);
        *free -= 1;
    }

    fn leave(&self) {
        *self.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.freed.notify_one();
    }
}

impl Tools {
    /// For a vocabulary of these tokens, as [`token_bytes`] gives them.
    pub fn new(words: &[Vec<u8>]) -> Result<Self, String> {
        let make = || {
            let tokens = token_environment(words);
            let mut factory = ParserFactory::new_simple(&tokens)?;
            factory.quiet();
            *factory.limits_mut() = ParserLimits {
                max_lexer_states: MAX_LEXER_STATES,
                verbose_errors: false,
                ..Default::default()
            };
            Ok(Self { factory, tags: Arc::new(Tags::new(tokens)) })
        };
        panic_utils::catch_unwind(AssertUnwindSafe(make)).map_err(|e| reason(&e))
    }

    /// A matcher at the first token of a grammar that allows at least one. It recurses: call it [`on_stack`].
    pub fn compile(&self, output: &StructuredOutput) -> Result<Compiled, String> {
        let make = || Ok(self.compiled(output));
        panic_utils::catch_unwind(AssertUnwindSafe(make)).unwrap_or_else(|e| Err(reason(&e)))
    }

    fn compiled(&self, output: &StructuredOutput) -> Result<Compiled, String> {
        let parser =
            self.factory.create_parser_from_init_default(describe(output)?).map_err(|e| reason(&e))?;
        let lexer_bytes = parser.parser.lexer_stats().num_bytes;
        let pristine = Matcher::new(Ok(parser));
        let mut first = pristine.deep_clone();
        match first.compute_mask() {
            Ok(_) => Ok(Compiled { pristine, tags: self.tags.clone(), lexer_bytes }),
            Err(e) if is_dead_end(&e) => Err("it allows no text but the empty one, or none at all".into()),
            Err(e) => Err(reason(&e)),
        }
    }
}

/// Runs `work` on a thread with a stack of [`STACK`] bytes, and returns at once.
pub(super) fn on_stack<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<Receiver<T>, String> {
    let (send, receive) = channel();
    // Whoever asked may have given up.
    let run = move || drop(send.send(work()));
    let thread = thread::Builder::new().name("grammar".into()).stack_size(STACK);
    thread.spawn(run).map_err(|e| format!("there is no thread to compile it on: {e}"))?;
    Ok(receive)
}

/// Whether no token fits.
pub(super) fn is_dead_end(error: &anyhow::Error) -> bool {
    error.to_string().starts_with("NoExtensionBias")
}

/// What an error of llguidance says, without its notes for debuggers. A panic of it is an error, too.
pub(super) fn reason(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    let end = text.find("\n<").unwrap_or(text.len());
    let text = text[..end].trim_end();
    let text = match text.char_indices().nth(MAX_REASON) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_string(),
    };
    match text.strip_prefix("panic: ") {
        Some(panic) => format!("llguidance gave up on it ({panic})"),
        None => text,
    }
}
