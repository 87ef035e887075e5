//! Compiled grammars of a tokenizer, kept as long as they are in use: a batch of many requests compiles its schema once.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::available_parallelism;

use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory, panic_utils};

use super::vocabulary::token_environment;
use super::{StructuredOutput, StructuredOutputError, perl, schema};
use crate::tokenizer::Tokenizer;

/// Grammars that are kept; the one that was asked for least lately goes.
const KEPT: usize = 32;
/// The longest text of a schema, expression, list or grammar.
const LONGEST: usize = 1 << 20;
/// States of a lexer, at one or two kilobytes each.
const MAX_LEXER_STATES: usize = 50_000;
/// The schema of an object with any members.
const ANY_OBJECT: &str = r#"{"type": "object"}"#;
/// Lexers of a grammar at most.
const MAX_LEXERS: usize = 8;
/// Compiles for one tokenizer.
pub(crate) struct Grammars {
    tokenizer: Tokenizer,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Made when it is first needed: it goes through the whole vocabulary.
    factory: Option<Result<ParserFactory, String>>,
    /// The one that was asked for last is at the end.
    kept: Vec<(StructuredOutput, Arc<Grammar>)>,
}

/// A compiled grammar.
pub(crate) struct Grammar {
    /// A matcher at the first token, with a lexer that nobody shares.
    pristine: Mutex<Matcher>,
    /// Matchers at the first token. The matchers made from one of them share a lexer, with what it has found out, and
    /// a lock. So there are several, for masks that threads compute side by side.
    shared: Vec<Mutex<Option<Matcher>>>,
    next: AtomicUsize,
}

impl Grammars {
    pub fn new(tokenizer: Tokenizer) -> Self {
        Self { tokenizer, state: Mutex::default() }
    }

    /// The compiled form.
    ///
    /// # Errors
    /// It is not well-formed, uses what is not supported, allows no text, or is too large.
    pub fn compile(&self, output: &StructuredOutput) -> Result<Arc<Grammar>, StructuredOutputError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = state.kept.iter().position(|(kept, _)| kept == output) {
            let found = state.kept.remove(at);
            let grammar = found.1.clone();
            state.kept.push(found);
            return Ok(grammar);
        }
        let described = describe(output).map_err(|reason| output.error(reason))?;
        let factory = state.factory.get_or_insert_with(|| factory(&self.tokenizer));
        let compiled = factory.as_ref().map_err(String::clone).and_then(|f| compile(f, described));
        let grammar = Arc::new(Grammar::new(compiled.map_err(|reason| output.error(reason))?));
        if state.kept.len() == KEPT {
            state.kept.remove(0);
        }
        state.kept.push((output.clone(), grammar.clone()));
        Ok(grammar)
    }

    /// How many grammars are kept.
    #[cfg(test)]
    pub fn kept(&self) -> usize {
        self.state.lock().unwrap().kept.len()
    }
}

impl Grammar {
    fn new(pristine: Matcher) -> Self {
        let lexers = available_parallelism().map_or(1, usize::from).min(MAX_LEXERS);
        let shared = (0..lexers).map(|_| Mutex::default()).collect();
        Self { pristine: Mutex::new(pristine), shared, next: AtomicUsize::new(0) }
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

/// What compiles grammars for a tokenizer.
fn factory(tokenizer: &Tokenizer) -> Result<ParserFactory, String> {
    let make = || {
        let tokens = token_environment(tokenizer).map_err(anyhow::Error::msg)?;
        let mut factory = ParserFactory::new_simple(&tokens)?;
        factory.quiet();
        *factory.limits_mut() =
            ParserLimits { max_lexer_states: MAX_LEXER_STATES, verbose_errors: false, ..Default::default() };
        Ok(factory)
    };
    panic_utils::catch_unwind(std::panic::AssertUnwindSafe(make)).map_err(|e| reason(&e))
}

/// A matcher at the first token of a grammar that allows at least one.
fn compile(factory: &ParserFactory, grammar: GrammarInit) -> Result<Matcher, String> {
    let parser = factory.create_parser_from_init_default(grammar).map_err(|e| reason(&e))?;
    let pristine = Matcher::new(Ok(parser));
    let mut first = pristine.deep_clone();
    match first.compute_mask() {
        Ok(_) => Ok(pristine),
        Err(e) if is_dead_end(&e) => Err("it allows no text but the empty one, or none at all".into()),
        Err(e) => Err(reason(&e)),
    }
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
    match text.strip_prefix("panic: ") {
        Some(panic) => format!("llguidance gave up on it ({panic})"),
        None => text.to_string(),
    }
}

/// The output in llguidance's terms.
fn describe(output: &StructuredOutput) -> Result<GrammarInit, String> {
    if output.len() > LONGEST {
        return Err(format!("it has {} bytes, and at most {LONGEST} are taken", output.len()));
    }
    let grammar = match output {
        StructuredOutput::JsonObject => return schema::compile(ANY_OBJECT),
        StructuredOutput::JsonSchema(text) => return schema::compile(text),
        StructuredOutput::Regex(text) if text.is_empty() => return Err("it is empty".into()),
        StructuredOutput::Regex(text) => TopLevelGrammar::from_regex(&perl::ascii(text)),
        StructuredOutput::Choice(texts) => TopLevelGrammar::from_regex(&alternatives(texts)?),
        StructuredOutput::Grammar(text) => TopLevelGrammar::from_lark(text.clone()),
    };
    Ok(GrammarInit::Serialized(grammar))
}

/// A regular expression for one of the texts.
fn alternatives(texts: &[String]) -> Result<String, String> {
    if texts.is_empty() || texts.iter().any(String::is_empty) {
        return Err("expected at least one text, and none that is empty".into());
    }
    let escaped = |text: &String| {
        let special = |c: char| c.is_ascii_punctuation() && !matches!(c, '<' | '>' | '/');
        text.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect()
    };
    Ok(texts.iter().map(escaped).collect::<Vec<String>>().join("|"))
}
