//! The progress of a batch: a bar at a terminal, a line from time to time in a log.

use std::fmt;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use console::Term;
use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use moe_engine::engine::PromptProgress;
use moe_engine::terminal::{hint, is_quiet};
use serde_json::{Map, Value, json};

use super::input::Total;
use super::prices::Prices;

/// Time between two updates of the bar.
const DRAW_EVERY: Duration = Duration::from_millis(100);

/// From this time on the speed allows an estimate of the remaining time.
const SPEED_KNOWN: Duration = Duration::from_secs(1);

/// Counts the finished lines and shows the progress on stderr.
pub struct Progress {
    bar: Option<ProgressBar>,
    /// Time between two lines of a log.
    log_every: Duration,
    start: Instant,
    shown: Instant,
    total: Total,
    /// Number of lines of the input that were read.
    pub read: u64,
    /// Lines answered by this run, errors included.
    pub answered: u64,
    /// Error records of this run.
    pub errors: u64,
    /// Error records of earlier runs.
    pub earlier_errors: u64,
    /// Lines that an earlier run answered.
    pub skipped: u64,
    /// Lines of this run that got the answer of another line.
    pub repeated: u64,
    /// Tokens of the prompts of computed answers.
    pub prompt_tokens: u64,
    /// New tokens.
    pub tokens: u64,
    /// Prices of tokens.
    pub prices: Prices,
    /// Prompts in the engine.
    pub prompts: PromptProgress,
}

impl Progress {
    /// Progress over an input whose number of lines becomes known at some time; a log gets a line every `log_every`.
    pub fn new(total: Total, log_every: Duration) -> Self {
        let start = Instant::now();
        Self {
            bar: (std::io::stderr().is_terminal() && !is_quiet()).then(bar),
            log_every,
            start,
            shown: start,
            total,
            read: 0,
            answered: 0,
            errors: 0,
            earlier_errors: 0,
            skipped: 0,
            repeated: 0,
            prompt_tokens: 0,
            tokens: 0,
            prices: Prices::default(),
            prompts: PromptProgress::default(),
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

    /// Shows the progress, if it is time.
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
            // This is not a message of the log: a user who filters the log still wants to see that the run is alive.
            None => hint(status),
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn done(&self) -> u64 {
        self.answered + self.skipped
    }

    /// What the computed answers cost, if there is a price.
    pub fn cost(&self) -> Option<f64> {
        self.prices.cost(self.prompt_tokens, self.tokens)
    }

    /// The counters as JSON.
    pub fn counters(&self) -> Map<String, Value> {
        let elapsed = self.start.elapsed();
        let counters = json!({
            "seconds": elapsed.as_secs_f64(),
            "total": self.total.get(),
            "read": self.read,
            "done": self.done(),
            "skipped": self.skipped,
            "answered": self.answered,
            "repeated": self.repeated,
            "errors": self.errors,
            "earlier_errors": self.earlier_errors,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.tokens,
            "tokens_per_second": self.rate(elapsed),
            "seconds_left": self.left(elapsed).map(|left| left.as_secs_f64()),
            "cost": self.cost(),
        });
        counters.as_object().cloned().unwrap_or_default()
    }

    fn rate(&self, elapsed: Duration) -> f64 {
        self.tokens as f64 / elapsed.as_secs_f64().max(1e-3)
    }

    /// The progress after this time.
    fn status(&self, elapsed: Duration) -> String {
        let done = self.done();
        let rate = self.rate(elapsed);
        let of = match self.total.get() {
            Some(total) => format!("{done} / {total} requests"),
            None => format!("{done} / {} requests read so far", self.read),
        };
        let errors = if self.errors > 0 { format!(", {} with errors", self.errors) } else { String::new() };
        let left = self.left(elapsed).map(|left| format!(", {} left", HumanDuration(left)));
        // Until the first token, only the progress of long prompts changes.
        let prompts = match self.tokens {
            0 if self.prompts.total > 0 => {
                format!(", {} of {} prompt tokens", self.prompts.computed, self.prompts.total)
            }
            _ => String::new(),
        };
        format!("{of}, {rate:.0} tok/s{prompts}{errors}{}", left.unwrap_or_default())
    }

    /// The remaining time at the speed of this run; lines that earlier runs answered are not counted in the speed.
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
        // If earlier runs have answered everything, nothing was computed.
        if self.answered > 0 {
            write!(f, ", {:.0} tok/s", self.rate(self.start.elapsed()))?;
        }
        for (count, what) in [
            (self.errors, "with errors"),
            (self.repeated, "answered as equal ones"),
            (self.skipped, "done before"),
            (self.earlier_errors, "with errors of earlier runs"),
        ] {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        if self.tokens > 0 {
            write!(f, ", {} prompt tokens, {} new tokens", self.prompt_tokens, self.tokens)?;
        }
        self.cost().map_or(Ok(()), |cost| write!(f, ", cost {cost:.6}"))
    }
}

/// On a narrow terminal the numbers take the whole line, because a line that wraps could not be overwritten.
fn bar() -> ProgressBar {
    let columns = Term::stderr().size_checked().map_or(u16::MAX, |(_, columns)| columns);
    // The template is a constant; if it were wrong, indicatif's default would be used.
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

    #[test]
    fn the_summary_counts_tokens_and_cost() {
        let mut progress = Progress::new(Total::default(), Duration::from_secs(10));
        assert_eq!(progress.to_string(), "0 requests");
        (progress.answered, progress.repeated, progress.errors, progress.skipped) = (5, 2, 1, 4);
        (progress.prompt_tokens, progress.tokens) = (300_000, 20_000);
        let summary = progress.to_string();
        let end = ", 1 with errors, 2 answered as equal ones, 4 done before, 300000 prompt tokens, 20000 new tokens";
        assert!(summary.starts_with("5 requests, ") && summary.ends_with(end), "{summary}");
        progress.prices = Prices { input: Some(0.5), output: Some(2.0) };
        assert!(progress.to_string().ends_with(", cost 0.190000"), "{progress}");
        let counters = progress.counters();
        let some = ["done", "repeated", "new_tokens", "total"].map(|name| counters[name].clone());
        assert_eq!(some, [json!(9), json!(2), json!(20_000), Value::Null]);
    }
}
