//! The progress bar of a long run. It is shown if stderr is a terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// Returns a bar with a number of steps.
pub fn bar(what: &'static str, steps: usize) -> ProgressBar {
    let bar = ProgressBar::new(steps as u64).with_message(what);
    match ProgressStyle::with_template("{msg} [{bar:30}] {pos}/{len} {elapsed} (left: {eta})") {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}
