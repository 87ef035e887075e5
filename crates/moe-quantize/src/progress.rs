//! The bar of a long run, on stderr where that is a terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar over so many steps.
pub fn bar(what: &'static str, steps: usize) -> ProgressBar {
    let bar = ProgressBar::new(steps as u64).with_message(what);
    match ProgressStyle::with_template("{msg} [{bar:30}] {pos}/{len} {elapsed} (left: {eta})") {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}
