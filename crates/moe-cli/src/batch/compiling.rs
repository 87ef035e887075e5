//! Reads the input ahead of the engine: a thread parses and tokenizes, others compile grammars of structured output.
//! Lines that wait for a grammar do not delay other lines, and the engine compiles nothing between its steps.
//!
//! ```text
//! reader ────────────────────────────────────► engine
//!   └─► lines that wait ─► compilers ────────────┘
//! ```
//!
//! A long text waits while the compilers process short texts of later lines, so that a few megabytes in one line delay
//! no small schema. It waits one line longer for each [`BYTES_PER_LINE`], so that its turn comes. A line whose grammar
//! cannot be used becomes an error record.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use anyhow::{Context, Result, anyhow};
use moe_engine::panic_text;
use moe_engine::structured::{Precompiler, StructuredOutput};

use super::entries::{Entry, Work};

/// Number of entries that wait for the engine to look.
const READ_AHEAD: usize = 64;
/// The largest number of lines that wait for a compiler, and of bytes of their grammars. Beyond that the input is not
/// read.
const MAX_LINES: usize = 512;
const MAX_BYTES: usize = 256 << 20;
/// For each of these bytes of its text, a grammar lets one more line go first.
const BYTES_PER_LINE: usize = 128;

/// Starts the reading thread and a thread for each compiler. The entries come with compiled grammars, in the order in
/// which they are ready. The threads end when the receiver is gone, after an error, or with the program.
pub fn read_ahead(
    entries: impl Iterator<Item = Result<Entry>> + Send + 'static,
    compilers: Vec<Precompiler>,
) -> Result<Receiver<Result<Entry>>> {
    let (send, receive) = sync_channel(READ_AHEAD);
    let waiting = (!compilers.is_empty()).then(|| Arc::new(Waiting::default()));
    for (compiler, waiting) in compilers.into_iter().zip(waiting.iter().cycle()) {
        let waiting = waiting.clone();
        let send = send.clone();
        spawn("grammars", move || {
            while let Some((output, entry)) = waiting.next() {
                let compiled = compile(&compiler, &output, entry);
                if send.send(Ok(compiled)).is_err() {
                    return waiting.close();
                }
            }
        })?;
    }
    spawn("input", move || {
        read(entries, waiting.as_deref(), &send);
        waiting.iter().for_each(|waiting| waiting.close());
    })?;
    Ok(receive)
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(work).context("cannot start a thread")?;
    Ok(())
}

/// Passes entries on. If reading panics, the panic is the last entry's error, because an input that ends normally has
/// none.
fn read(
    entries: impl Iterator<Item = Result<Entry>>,
    waiting: Option<&Waiting>,
    send: &SyncSender<Result<Entry>>,
) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| sort(entries, waiting, send))) {
        let error = anyhow!(
            "reading the input panicked ({}): this is a fault of the program, please report it with the message above; \
             what is answered is kept",
            panic_text(&*panic)
        );
        // A run that has ended has dropped the receiver.
        let _ = send.send(Err(error));
    }
}

/// Passes entries on, up to the first error, and sends entries that need a grammar to the compilers.
fn sort(
    entries: impl Iterator<Item = Result<Entry>>,
    waiting: Option<&Waiting>,
    send: &SyncSender<Result<Entry>>,
) {
    for entry in entries {
        let is_last = entry.is_err();
        let output = entry.as_ref().ok().and_then(structured_output);
        let open = match (output, waiting, entry) {
            (Some(output), Some(waiting), Ok(entry)) => waiting.add(output, entry),
            (_, _, entry) => send.send(entry).is_ok(),
        };
        if is_last || !open {
            return;
        }
    }
}

/// The structured output of an entry's requests, which is the same for all of them.
fn structured_output(entry: &Entry) -> Option<Arc<StructuredOutput>> {
    let Work::Job(job) = &entry.work else { return None };
    job.requests.first()?.structured_output.clone()
}

fn compile(compiler: &Precompiler, output: &StructuredOutput, mut entry: Entry) -> Entry {
    if let Work::Job(job) = &mut entry.work {
        match compiler.compile(output) {
            Ok(grammar) => job.grammar = Some(grammar),
            Err(e) => entry.work = Work::Refused(job.form.refused(e.into())),
        }
    }
    entry
}

/// Entries that wait for a compiler.
#[derive(Default)]
struct Waiting {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    /// Indexed by the line whose turn they have, then by their own line.
    entries: BTreeMap<(u64, u64), (Arc<StructuredOutput>, Entry)>,
    bytes: usize,
    closed: bool,
}

impl Queue {
    fn is_full(&self) -> bool {
        self.entries.len() >= MAX_LINES || self.bytes >= MAX_BYTES
    }
}

impl Waiting {
    /// Adds an entry when there is room; false if there are no compilers any more.
    fn add(&self, output: Arc<StructuredOutput>, entry: Entry) -> bool {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let full = |queue: &mut Queue| queue.is_full() && !queue.closed;
        let mut queue = self.changed.wait_while(queue, full).unwrap_or_else(PoisonError::into_inner);
        if queue.closed {
            return false;
        }
        let len = output.text_len();
        queue.bytes += len;
        let turn = entry.line + (len / BYTES_PER_LINE) as u64;
        queue.entries.insert((turn, entry.line), (output, entry));
        self.changed.notify_all();
        true
    }

    /// The next entry when there is one; `None` after the last.
    fn next(&self) -> Option<(Arc<StructuredOutput>, Entry)> {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let nothing = |queue: &mut Queue| queue.entries.is_empty() && !queue.closed;
        let mut queue = self.changed.wait_while(queue, nothing).unwrap_or_else(PoisonError::into_inner);
        let (_, next) = queue.entries.pop_first()?;
        queue.bytes -= next.0.text_len();
        self.changed.notify_all();
        Some(next)
    }

    /// No more entries are added or taken.
    fn close(&self) {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::super::entries::Key;
    use super::*;

    fn entry(line: u64) -> Entry {
        let key = Key { id: format!("request-{line}"), custom_id: None, request: None };
        Entry { line, key, repeats: None, work: Work::Done(None) }
    }

    #[test]
    fn a_panic_is_no_end_of_the_input() {
        let faulty = (1..).map(|line| if line < 3 { Ok(entry(line)) } else { panic!("no such line") });
        let got: Vec<_> = read_ahead(faulty, Vec::new()).unwrap().into_iter().collect();
        assert_eq!(got.iter().filter(|entry| entry.is_ok()).count(), 2);
        let error = got.into_iter().find_map(Result::err).unwrap().to_string();
        assert!(error.contains("no such line") && error.contains("is kept"), "{error}");
        let ends = read_ahead((1..3).map(|line| Ok(entry(line))), Vec::new()).unwrap();
        assert!(ends.into_iter().all(|entry| entry.is_ok()));
    }

    #[test]
    fn long_grammars_let_short_ones_of_later_lines_go_first_but_not_all() {
        let waiting = Waiting::default();
        for (line, lines) in [(1, 9), (2, 3), (3, 3), (4, 0), (9, 0), (10, 0), (11, 0)] {
            let text = "a".repeat(lines * BYTES_PER_LINE + 1);
            assert!(waiting.add(Arc::new(StructuredOutput::Regex(text)), entry(line)));
        }
        waiting.close();
        let order: Vec<u64> = std::iter::from_fn(|| waiting.next()).map(|(_, entry)| entry.line).collect();
        assert_eq!(order, [4, 2, 3, 9, 1, 10, 11]);
        assert!(!waiting.add(Arc::new(StructuredOutput::JsonObject), entry(5)), "it is closed");
    }

    #[test]
    fn what_waits_has_a_bound() {
        let waiting = Arc::new(Waiting::default());
        let adding = waiting.clone();
        let adds = std::thread::spawn(move || {
            let add = |line| adding.add(Arc::new(StructuredOutput::JsonObject), entry(line));
            (0..MAX_LINES as u64 + 1).all(add)
        });
        while waiting.queue.lock().unwrap().entries.len() < MAX_LINES {
            std::thread::yield_now();
        }
        assert!(!adds.is_finished());
        assert!(waiting.next().is_some());
        assert!(adds.join().unwrap());
    }
}
