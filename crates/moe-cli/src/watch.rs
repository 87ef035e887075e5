//! Shows the progress of something that takes long and prints nothing itself: loading weights, or a long prompt. If
//! stderr is a terminal, it shows a bar. Otherwise it writes a log line when the work turns out to take long, and
//! another one at its end. Quick work shows nothing.

use std::io::IsTerminal;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use indicatif::{BinaryBytes, HumanCount, ProgressBar, ProgressStyle};
use moe_engine::terminal::is_quiet;
use tracing::info;

/// Time between two updates.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A task that ends within this time shows no bar.
const BAR_AFTER: Duration = Duration::from_millis(500);
/// A task that ends within this time writes no line to a log.
const LINE_AFTER: Duration = Duration::from_secs(5);

/// The unit in which the progress is counted.
#[derive(Clone, Copy)]
pub enum Unit {
    /// Bytes of weights.
    Bytes,
    /// Tokens of prompts.
    Tokens,
}

impl Unit {
    fn show(self, count: u64) -> String {
        match self {
            Self::Bytes => BinaryBytes(count).to_string(),
            Self::Tokens => format!("{} tokens", HumanCount(count)),
        }
    }

    fn template(self) -> &'static str {
        match self {
            Self::Bytes => {
                "{msg} [{wide_bar}] {percent:>3}% of {binary_total_bytes} {binary_bytes_per_sec} {eta:>4}"
            }
            // Steps take long, so a rate between two of them would not be useful.
            Self::Tokens => "{msg} [{wide_bar}] {percent:>3}% of {human_len} tokens {elapsed:>4}",
        }
    }
}

/// A thread that shows the progress of a task until this value is dropped.
pub struct Watch {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Watches the task `what`, of `total` units. `at` returns how many of them are done.
    pub fn start(what: &'static str, unit: Unit, total: u64, at: impl Fn() -> u64 + Send + 'static) -> Self {
        let (stop, stopped) = mpsc::channel();
        let terminal = std::io::stderr().is_terminal() && !is_quiet();
        let watch = move || {
            let mut shown = Shown { what, unit, total, start: Instant::now(), bar: None, told: false };
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(LOOK_EVERY) {
                shown.look(at(), terminal);
            }
            shown.end();
        };
        // If the thread cannot start, only the progress is not shown.
        let thread = thread::Builder::new().name("progress".into()).spawn(watch).ok();
        Self { stop: Some(stop), thread }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was already reported.
            let _ = thread.join();
        }
    }
}

/// What the thread has shown so far.
struct Shown {
    what: &'static str,
    unit: Unit,
    total: u64,
    start: Instant,
    bar: Option<ProgressBar>,
    /// Whether a line was written to the log.
    told: bool,
}

impl Shown {
    fn look(&mut self, at: u64, terminal: bool) {
        let elapsed = self.start.elapsed();
        if terminal && elapsed >= BAR_AFTER {
            let bar = self.bar.get_or_insert_with(|| bar(self.what, self.unit, self.total));
            bar.set_position(at.min(self.total));
        } else if !terminal && elapsed >= LINE_AFTER && !self.told {
            self.told = true;
            info!(
                "{}: {} of {} after {:.0} s",
                self.what,
                self.unit.show(at),
                self.unit.show(self.total),
                elapsed.as_secs_f64()
            );
        }
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        if self.told {
            let seconds = self.start.elapsed().as_secs_f64();
            info!("{}: {} took {seconds:.0} s", self.what, self.unit.show(self.total));
        }
    }
}

/// Templates are constants. If one were wrong, indicatif's own template would be used.
fn bar(what: &'static str, unit: Unit, total: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(unit.template());
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ");
    ProgressBar::new(total).with_style(style).with_message(what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(seconds: u64) -> Shown {
        let start = Instant::now().checked_sub(Duration::from_secs(seconds)).unwrap();
        Shown { what: "loading", unit: Unit::Bytes, total: 1 << 30, start, bar: None, told: false }
    }

    #[test]
    fn what_is_quick_shows_nothing() {
        let mut quick = shown(0);
        quick.look(5, true);
        quick.look(5, false);
        assert!(quick.bar.is_none() && !quick.told);
    }

    #[test]
    fn a_terminal_has_a_bar_and_a_log_one_line() {
        let mut slow = shown(60);
        slow.look(1 << 29, true);
        assert_eq!(
            slow.bar.as_ref().map(|bar| (bar.position(), bar.length())),
            Some((1 << 29, Some(1 << 30)))
        );
        slow.look(1 << 31, true);
        assert_eq!(slow.bar.as_ref().map(ProgressBar::position), Some(1 << 30), "never more than all");
        assert!(!slow.told);
        let mut logged = shown(60);
        logged.look(1, false);
        assert!(logged.told && logged.bar.is_none());
    }

    #[test]
    fn units_are_named() {
        assert_eq!(Unit::Bytes.show(3 << 30), "3.00 GiB");
        assert_eq!(Unit::Tokens.show(20_000), "20,000 tokens");
        for unit in [Unit::Bytes, Unit::Tokens] {
            assert!(ProgressStyle::with_template(unit.template()).is_ok());
        }
    }

    #[test]
    fn a_watch_ends_at_once() {
        let start = Instant::now();
        drop(Watch::start("loading", Unit::Tokens, 10, || 3));
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}
