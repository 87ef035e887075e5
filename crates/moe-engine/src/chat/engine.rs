//! Sets up minijinja in the way in which transformers sets up Jinja2, and limits the time and memory of a template.

use std::io::{self, Write};

use chrono::format::{Item, StrftimeItems};
use chrono::{Local, NaiveDateTime};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};

use super::error::ChatError;
use super::python;

/// The local time for `strftime_now`.
pub type Clock = fn() -> NaiveDateTime;

/// The clock of this computer.
pub fn local_time() -> NaiveDateTime {
    Local::now().naive_local()
}

/// The largest number of instructions of one rendering, which takes about a second. Most templates take a few hundred
/// for a message. A template that searches for a later message at every tool call takes ten for each pair of the two.
const FUEL: u64 = 20_000_000;

/// The largest number of bytes of a prompt.
const MAX_OUTPUT: usize = 64 << 20;

/// The largest number of bytes of a template. Published ones have a few tens of thousands.
const MAX_SOURCE: usize = 128 << 10;

/// Bytes of the stack on which templates are compiled and rendered. An expression of `MAX_SOURCE` bytes can nest deep.
/// Pages of the stack that are never touched take no memory.
const STACK: usize = 256 << 20;

/// Returns an environment without templates.
pub fn environment(clock: Clock) -> Result<Environment<'static>, ChatError> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.map_err(|e| describe("", &e))?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_fuel(Some(FUEL));
    // With this, errors name the expression that they come from.
    env.set_debug(true);
    python::register(&mut env);
    env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "refused").with_source(Refusal(message)))
    });
    env.add_function("strftime_now", move |format: String| strftime(&format, clock()));
    Ok(env)
}

/// Adds a template to an environment.
pub fn add(env: &mut Environment<'static>, name: &str, source: &str) -> Result<(), ChatError> {
    if source.len() > MAX_SOURCE {
        let message = format!("it has {} bytes, more than {MAX_SOURCE}", source.len());
        return Err(ChatError::Limit { template: name.to_string(), message });
    }
    let source = prepare(source);
    on_own_stack(name, move || env.add_template_owned(name.to_string(), source))?
        .map_err(|e| describe(name, &e))
}

/// Renders a template. `context` is called on the large stack, because its values may be nested deep.
pub fn render(
    env: &Environment<'static>,
    name: &str,
    context: impl FnOnce() -> Value + Send,
) -> Result<String, ChatError> {
    let mut prompt = Prompt { bytes: Vec::new(), full: false };
    let result =
        on_own_stack(name, || env.get_template(name)?.render_captured_to(context(), &mut prompt).map(drop))?;
    let limit = |message: String| Err(ChatError::Limit { template: name.to_string(), message });
    match result {
        _ if prompt.full => limit(format!("it makes a prompt of more than {MAX_OUTPUT} bytes")),
        Err(e) if e.kind() == ErrorKind::OutOfFuel => limit(format!("it takes more than {FUEL} steps")),
        Err(e) => Err(describe(name, &e)),
        // Only whole strings were written, so the bytes are UTF-8.
        Ok(()) => Ok(String::from_utf8_lossy(&prompt.bytes).into_owned()),
    }
}

/// The message of a template that called `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

/// A prompt that is being written, up to the limit.
struct Prompt {
    bytes: Vec<u8>,
    full: bool,
}

impl Write for Prompt {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + text.len() > MAX_OUTPUT {
            self.full = true;
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.bytes.extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs the engine on a thread with a large stack. A panic of the engine ends only that thread.
fn on_own_stack<T: Send>(name: &str, run: impl FnOnce() -> T + Send) -> Result<T, ChatError> {
    let failed = |message: String| ChatError::Limit { template: name.to_string(), message };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("chat template".to_string()).stack_size(STACK);
        let thread =
            thread.spawn_scoped(scope, run).map_err(|e| failed(format!("no thread to render it on: {e}")))?;
        thread.join().map_err(|_| failed("the template engine failed on it".to_string()))
    })
}

/// Rewrites parts of Jinja2 that minijinja does not understand: line ends other than `\n`, and the blocks that mark the
/// text which the model generates. In a prompt such a block is only a scope.
fn prepare(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + "{%".len());
        out.push_str(before);
        rest = tag;
        let content = tag.trim_start_matches(['-', '+']).trim_start();
        for (name, scope) in [("generation", "with"), ("endgeneration", "endwith")] {
            if let Some(after) = content.strip_prefix(name)
                && after.trim_start().trim_start_matches(['-', '+']).starts_with("%}")
            {
                out.push_str(&tag[..tag.len() - content.len()]);
                out.push_str(scope);
                rest = after;
            }
        }
    }
    out + rest
}

fn strftime(format: &str, time: NaiveDateTime) -> Result<String, Error> {
    let items: Vec<Item> = StrftimeItems::new(format).collect();
    if items.contains(&Item::Error) {
        let message = format!("strftime_now: {format:?} is no format of a time");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    let mut text = String::new();
    let written =
        std::fmt::Write::write_fmt(&mut text, format_args!("{}", time.format_with_items(items.iter())));
    // A format may ask for something that a local time does not have, such as its time zone.
    written.map_err(|_| {
        let message = format!("strftime_now: {format:?} asks for more than date and time");
        Error::new(ErrorKind::InvalidOperation, message)
    })?;
    Ok(text)
}

/// Converts an error of the engine to [`ChatError`].
fn describe(name: &str, error: &Error) -> ChatError {
    let template = name.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(Refusal(message)) = cause.downcast_ref() {
            return ChatError::Refused { template, message: message.clone() };
        }
        source = cause.source();
    }
    let mut message = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    let place = error.range().and_then(|range| error.template_source()?.get(range));
    if let Some(expression) = place.filter(|text| !text.trim().is_empty()) {
        let excerpt: String = expression.chars().take(120).collect();
        message = format!("{message}, in `{}`", excerpt.trim());
    }
    ChatError::Template { template, line: error.line().unwrap_or(1), message }
}
