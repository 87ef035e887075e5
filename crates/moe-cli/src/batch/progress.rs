//! How far a batch is: a bar where somebody watches, a line now and then in a log.

use std::fmt;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use console::Term;
use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use moe_engine::engine::PromptProgress;
use moe_engine::terminal::{hint, is_quiet};

use super::input::Total;

/// Time between two looks of the bar.
const DRAW_EVERY: Duration = Duration::from_millis(100);

/// From then on the speed says something about the rest.
const SPEED_KNOWN: Duration = Duration::from_secs(1);

/// Counts what is done and shows it on stderr.
pub struct Progress {
    bar: Option<ProgressBar>,
    /// Time between two lines of a log.
    log_every: Duration,
    start: Instant,
    shown: Instant,
    total: Total,
    /// Lines of the input that are read.
    pub read: u64,
    /// Lines answered by this run, errors included.
    pub answered: u64,
    /// Error records of this run.
    pub errors: u64,
    /// Error records of earlier runs.
    pub earlier_errors: u64,
    /// Lines that an earlier run answered.
    pub skipped: u64,
    /// New tokens.
    pub tokens: u64,
    /// Prompts in the engine.
    pub prompts: PromptProgress,
}

impl Progress {
    /// Progress over an input whose number of lines is known sooner or later; a log gets a line every `log_every`.
    pub fn new(total: Total, log_every: Duration) -> Self {
        let bar = (std::io::stderr().is_terminal() && !is_quiet()).then(bar);
        let start = Instant::now();
        let read = 0;
        let answered = 0;
        let errors = 0;
        let earlier_errors = 0;
        let skipped = 0;
        let tokens = 0;
        let shown = start;
        let prompts = PromptProgress::default();
        Self {
            bar,
            log_every,
            start,
            shown,
            total,
            read,
            answered,
            errors,
            earlier_errors,
            skipped,
            tokens,
            prompts,
        }
    }

    /// Error records of the output.
    pub fn all_errors(&self) -> u64 {
        self.errors + self.earlier_errors
    }

    /// The input has ended.
    pub fn input_ended(&mut self) {
        self.total.is(self.read);
    }

    /// Shows it, if it is time.
    pub fn show(&mut self) {
        let every = if self.bar.is_some() { DRAW_EVERY } else { self.log_every };
        if self.shown.elapsed() < every {
            return;
        }
        self.shown = Instant::now();
        let status = self.status(self.start.elapsed());
        match &self.bar {
            Some(bar) => {
                bar.set_length(self.total.get().unwrap_or(self.read));
                bar.set_position(self.done());
                bar.set_message(status);
            }
            // Not a message of the log: a user who filters that still wants to see that the run is alive.
            None => hint(status),
        }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn done(&self) -> u64 {
        self.answered + self.skipped
    }

    fn rate(&self, elapsed: Duration) -> f64 {
        self.tokens as f64 / elapsed.as_secs_f64().max(1e-3)
    }

    /// How far it is after this time.
    fn status(&self, elapsed: Duration) -> String {
        let done = self.done();
        let rate = self.rate(elapsed);
        let of = match self.total.get() {
            Some(total) => format!("{done} / {total} requests"),
            None => format!("{done} / {} requests read so far", self.read),
        };
        let errors = if self.errors > 0 { format!(", {} with errors", self.errors) } else { String::new() };
        let left = self.left(elapsed).map(|left| format!(", {} left", HumanDuration(left)));
        // Until the first token, long prompts are all that moves.
        let prompts = match self.tokens {
            0 if self.prompts.total > 0 => {
                format!(", {} of {} prompt tokens", self.prompts.computed, self.prompts.total)
            }
            _ => String::new(),
        };
        format!("{of}, {rate:.0} tok/s{prompts}{errors}{}", left.unwrap_or_default())
    }

    /// The time that the rest takes at the speed of this run so far; what earlier runs answered says nothing about it.
    fn left(&self, elapsed: Duration) -> Option<Duration> {
        // The first answers are errors, which take no time, and the shortest texts.
        let rest = self.total.get().filter(|_| elapsed >= SPEED_KNOWN)?.checked_sub(self.done())?;
        let seconds = elapsed.as_secs_f64() / self.answered as f64 * rest as f64;
        Duration::try_from_secs_f64(seconds).ok()
    }
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} request{}", self.answered, if self.answered == 1 { "" } else { "s" })?;
        // Nothing was computed where earlier runs have answered all.
        if self.answered > 0 {
            write!(f, ", {:.0} tok/s", self.rate(self.start.elapsed()))?;
        }
        for (count, what) in [
            (self.errors, "with errors"),
            (self.skipped, "done before"),
            (self.earlier_errors, "with errors of earlier runs"),
        ] {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        Ok(())
    }
}

/// On a narrow terminal the numbers have the line: one that is broken could not be drawn over.
fn bar() -> ProgressBar {
    let columns = Term::stderr().size_checked().map_or(u16::MAX, |(_, columns)| columns);
    // The template is a constant; should it be wrong, indicatif's own does.
    let style =
        ProgressStyle::with_template(if columns < 90 { "{wide_msg}" } else { "{wide_bar} {msg}  {elapsed}" });
    ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_is_shown_and_not_what_is_read() {
        let mut progress = Progress::new(Total::default(), Duration::from_secs(10));
        (progress.read, progress.answered, progress.skipped, progress.tokens) = (192, 60, 4, 3000);
        let status = |progress: &Progress| progress.status(Duration::from_secs(30));
        assert_eq!(status(&progress), "64 / 192 requests read so far, 100 tok/s");
        progress.total.is(400);
        progress.errors = 2;
        assert_eq!(status(&progress), "64 / 400 requests, 100 tok/s, 2 with errors, 3 minutes left");
        assert!(!progress.status(Duration::from_millis(900)).contains("left"), "too early to tell");
        (progress.answered, progress.read) = (396, 400);
        assert!(status(&progress).ends_with(", 0 seconds left"), "{}", status(&progress));
        progress.answered = 0;
        progress.tokens = 0;
        progress.prompts = PromptProgress { computed: 512, total: 9000 };
        assert_eq!(
            status(&progress),
            "4 / 400 requests, 0 tok/s, 512 of 9000 prompt tokens, 2 with errors",
            "prompts move before the first token"
        );
        (progress.tokens, progress.prompts) = (3000, PromptProgress::default());
        assert_eq!(
            status(&progress),
            "4 / 400 requests, 100 tok/s, 2 with errors",
            "nothing tells the speed yet"
        );
    }
}
