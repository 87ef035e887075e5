//! How far a batch is: a bar where somebody watches, a line now and then in a log.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tracing::info;

/// Between two lines of the log.
const LOG_EVERY: Duration = Duration::from_secs(10);
/// Between two looks of the bar.
const DRAW_EVERY: Duration = Duration::from_millis(100);

/// Counts what is done and shows it on stderr.
pub struct Progress {
    bar: Option<ProgressBar>,
    start: Instant,
    shown: Instant,
    total: Option<u64>,
    /// Bytes of the input that are read.
    pub bytes: u64,
    /// Lines answered by this run, errors included.
    pub answered: u64,
    /// Error records of this run.
    pub errors: u64,
    /// Error records of earlier runs.
    pub earlier_errors: u64,
    /// Lines that an earlier run answered.
    pub skipped: u64,
    /// New tokens of finished lines.
    pub tokens: u64,
}

impl Progress {
    /// Of an input of `total` bytes, if that is known.
    pub fn new(total: Option<u64>) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| bar(total));
        let start = Instant::now();
        let (answered, errors, earlier_errors, skipped) = (0, 0, 0, 0);
        Self {
            bar,
            start,
            shown: start,
            total,
            bytes: 0,
            answered,
            errors,
            earlier_errors,
            skipped,
            tokens: 0,
        }
    }

    /// Error records of the output.
    pub fn all_errors(&self) -> u64 {
        self.errors + self.earlier_errors
    }

    /// Shows it, if it is time.
    pub fn show(&mut self) {
        let every = if self.bar.is_some() { DRAW_EVERY } else { LOG_EVERY };
        if self.shown.elapsed() < every {
            return;
        }
        self.shown = Instant::now();
        match (&self.bar, self.total) {
            (Some(bar), _) => {
                bar.set_position(self.bytes);
                bar.set_message(self.to_string());
            }
            (None, Some(total)) if total > 0 => {
                info!("{self}, {:.0} % of the input read", 100.0 * self.bytes as f64 / total as f64);
            }
            (None, _) => info!("{self}"),
        }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl std::fmt::Display for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rate = self.tokens as f64 / self.start.elapsed().as_secs_f64().max(1e-3);
        write!(f, "{} requests, {rate:.0} tok/s", self.answered)?;
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

fn bar(total: Option<u64>) -> ProgressBar {
    let (bar, template) = match total {
        Some(total) => (ProgressBar::new(total), "{wide_bar} {percent} %  {msg}  {elapsed}, {eta} left"),
        None => (ProgressBar::new_spinner(), "{spinner} {msg}  {elapsed}"),
    };
    // The templates are constants; should one be wrong, indicatif's own does.
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}
