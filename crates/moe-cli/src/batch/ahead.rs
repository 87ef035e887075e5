//! The thread that reads the input and tokenizes, ahead of the engine.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, sync_channel};

use anyhow::{Context, Result, anyhow};
use moe_engine::panic_text;

use super::entries::Entry;

/// Entries that are read ahead of the engine.
pub const READ_AHEAD: usize = 64;

/// Starts the thread that reads. It ends when nobody listens any more, after an error, or with the program. Should it
/// panic, that is the last entry's error: an input that merely ends has none.
pub fn read_ahead(
    entries: impl Iterator<Item = Result<Entry>> + Send + 'static,
) -> Result<Receiver<Result<Entry>>> {
    let (send, receive) = sync_channel(READ_AHEAD);
    let read = move || {
        let forward = || {
            for entry in entries {
                let last = entry.is_err();
                if send.send(entry).is_err() || last {
                    return;
                }
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(forward)) {
            let error = anyhow!(
                "reading the input panicked ({}): this is a fault of the program, please report it with the message \
                 above; what is answered is kept",
                panic_text(&*panic)
            );
            // Nobody listens to a run that has ended.
            let _ = send.send(Err(error));
        }
    };
    std::thread::Builder::new().name("input".into()).spawn(read).context("cannot start a thread")?;
    Ok(receive)
}

#[cfg(test)]
mod tests {
    use super::super::entries::{Key, Work};
    use super::*;

    #[test]
    fn a_panic_is_no_end_of_the_input() {
        let entry = |line| {
            let key = Key { id: format!("line-{line}"), custom_id: None, request: None };
            Ok(Entry { line, key, work: Work::Done })
        };
        let faulty = (1..).map(move |line| if line < 3 { entry(line) } else { panic!("no such line") });
        let got: Vec<_> = read_ahead(faulty).unwrap().into_iter().collect();
        assert_eq!(got.iter().filter(|entry| entry.is_ok()).count(), 2);
        let error = got.into_iter().find_map(Result::err).unwrap().to_string();
        assert!(error.contains("no such line") && error.contains("is kept"), "{error}");
        let ends = read_ahead((1..3).map(entry)).unwrap();
        assert!(ends.into_iter().all(|entry| entry.is_ok()));
    }
}
