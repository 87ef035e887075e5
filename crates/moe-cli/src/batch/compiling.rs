//! Grammars of structured output, compiled between the reader of the input and the engine: lines that wait for one do not
//! hold up the others, nor does the engine compile anything between its steps.
//!
//! ```text
//! reader ─► sorter ──────────────────────────► engine
//!             └─► lines that wait ─► compilers ──┘
//! ```
//!
//! A long text waits while the compilers take short ones of later lines, so that a few megabytes of one line delay no small
//! schema; a line further for each [`BYTES_PER_LINE`], so that its time comes. A line whose grammar cannot be used becomes an
//! error record.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use anyhow::{Context, Result};
use moe_engine::structured::{Precompiler, StructuredOutput};

use super::ahead::READ_AHEAD;
use super::entries::{Entry, Work};

/// Lines that may wait for a compiler, and bytes of their grammars. Beyond that the input is read no further.
const MAX_LINES: usize = 512;
const MAX_BYTES: usize = 256 << 20;
/// Bytes of a grammar's text for which it lets one further line go first.
const BYTES_PER_LINE: usize = 128;

/// The entries of `entries` with their grammars compiled, in an order of its own. Each compiler works on a thread.
pub fn compile_ahead(
    entries: Receiver<Result<Entry>>,
    compilers: Vec<Precompiler>,
) -> Result<Receiver<Result<Entry>>> {
    if compilers.is_empty() {
        return Ok(entries);
    }
    let (send, receive) = sync_channel(READ_AHEAD);
    let waiting = Arc::new(Waiting::default());
    for compiler in compilers {
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
    spawn("structured output", move || {
        sort(entries, &waiting, &send);
        waiting.close();
    })?;
    Ok(receive)
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(work).context("cannot start a thread")?;
    Ok(())
}

/// Passes entries on, those that need a grammar to the compilers.
fn sort(entries: Receiver<Result<Entry>>, waiting: &Waiting, send: &SyncSender<Result<Entry>>) {
    for entry in entries {
        let output = entry.as_ref().ok().and_then(structured_output);
        let open = match (output, entry) {
            (Some(output), Ok(entry)) => waiting.add(output, entry),
            (_, entry) => send.send(entry).is_ok(),
        };
        if !open {
            return;
        }
    }
}

/// What an entry's requests must be: the same for all of them.
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
    /// By the line whose turn is theirs, then by their own.
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
    /// Adds an entry, as soon as there is room; false once there are no compilers.
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

    /// The entry whose turn it is, once there is one; `None` after the last.
    fn next(&self) -> Option<(Arc<StructuredOutput>, Entry)> {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let nothing = |queue: &mut Queue| queue.entries.is_empty() && !queue.closed;
        let mut queue = self.changed.wait_while(queue, nothing).unwrap_or_else(PoisonError::into_inner);
        let (_, next) = queue.entries.pop_first()?;
        queue.bytes -= next.0.text_len();
        self.changed.notify_all();
        Some(next)
    }

    /// No more entries come, or go anywhere.
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
        Entry { line, key, work: Work::Done }
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
