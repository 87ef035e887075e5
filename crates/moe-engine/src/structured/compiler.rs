//! Compiles grammars on another thread than the caller's, with a stack of a known size and for a limited time.
//!
//! llguidance has limits of its own ([`ParserLimits`]) for the things that it builds and for every mask. The work that
//! it does before it checks its limits is bounded here, by the length of a text and by its depth. Both kinds of limits
//! bound the time of one compilation. The caller stops waiting earlier.

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

/// Bytes of the stack. Pages that are never touched take no memory.
const STACK: usize = 512 << 20;
/// The largest time of one compilation, in seconds.
pub(super) const SECONDS: u32 = 10;
/// The largest number of compilations at the same time. A compilation whose caller stopped waiting counts until it has
/// ended.
const AT_ONCE: usize = 4;
/// The largest number of states of a lexer. A state takes one or two kilobytes.
const MAX_LEXER_STATES: usize = 50_000;
/// The largest number of characters of an error. An error of llguidance may contain the whole text of the grammar.
const MAX_REASON: usize = 600;

/// Compiles grammars for one tokenizer.
pub(super) struct Compiler {
    tokenizer: Tokenizer,
    /// The tools are made when they are first needed, because that reads the whole vocabulary.
    tools: OnceLock<Result<Tools, String>>,
    free: Mutex<usize>,
    freed: Condvar,
}

/// The parts that are the same for all grammars of a vocabulary.
pub(super) struct Tools {
    factory: ParserFactory,
    pub tags: Arc<Tags>,
}

/// A compiled grammar.
pub(super) struct Compiled {
    /// A matcher in its state before the first token.
    pub pristine: Matcher,
    /// The tags as tokens of the vocabulary.
    pub tags: Arc<Tags>,
    /// Bytes of the lexer's tables before the first token. The whole grammar takes 10 to 20 times as much memory.
    pub lexer_bytes: usize,
}

impl Compiler {
    pub fn new(tokenizer: Tokenizer) -> Self {
        Self { tokenizer, tools: OnceLock::new(), free: Mutex::new(AT_ONCE), freed: Condvar::new() }
    }

    /// Compiles a grammar.
    ///
    /// # Errors
    /// The output is not well-formed, uses an unsupported feature, allows no text, is too large, or takes too long.
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

    /// Waits until fewer than [`AT_ONCE`] compilations run.
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
    /// Creates the tools for a vocabulary of these tokens, in the form that [`token_bytes`] returns.
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

    /// Returns a matcher before the first token of a grammar that allows at least one token. The function recurses, so
    /// call it with [`on_stack`].
    pub fn compile(&self, output: &StructuredOutput) -> Result<Compiled, String> {
        let make = || Ok(self.compiled(output));
        panic_utils::catch_unwind(AssertUnwindSafe(make)).unwrap_or_else(|e| Err(reason(&e)))
    }

    fn compiled(&self, output: &StructuredOutput) -> Result<Compiled, String> {
        let grammar = describe(output, self.factory.tok_env().tok_trie())?;
        let parser = self.factory.create_parser_from_init_default(grammar).map_err(|e| reason(&e))?;
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

/// Starts `work` on a thread with a stack of [`STACK`] bytes, and returns at once.
pub(super) fn on_stack<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<Receiver<T>, String> {
    let (send, receive) = channel();
    // The caller may have stopped waiting.
    let run = move || drop(send.send(work()));
    let thread = thread::Builder::new().name("grammar".into()).stack_size(STACK);
    thread.spawn(run).map_err(|e| format!("there is no thread to compile it on: {e}"))?;
    Ok(receive)
}

/// Returns whether the error means that no token can follow.
pub(super) fn is_dead_end(error: &anyhow::Error) -> bool {
    error.to_string().starts_with("NoExtensionBias")
}

/// Returns the message of an error of llguidance, without its notes for debuggers. A panic of llguidance is an error,
/// too.
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
