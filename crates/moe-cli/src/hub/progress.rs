//! Shows the progress of a download. If stderr is a terminal, there is a bar for each file and one for all files;
//! otherwise there are lines in the log. Each finished file leaves a line with its size.

use std::cell::Cell;

use console::Term;
use indicatif::{HumanBytes, MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use moe_engine::terminal::{is_quiet, visible};
use tracing::info;

/// Progress over several files.
pub struct Progress {
    bars: MultiProgress,
    total: ProgressBar,
    /// The number of bytes of finished files.
    done: Cell<u64>,
}

impl Progress {
    /// Makes the progress of `files` files with `bytes` bytes in total. A single file gets no second bar.
    pub fn new(files: usize, bytes: u64) -> Self {
        let bars = MultiProgress::new();
        if is_quiet() {
            bars.set_draw_target(ProgressDrawTarget::hidden());
        }
        let total = match files {
            0 | 1 => ProgressBar::hidden(),
            _ => bars.add(running(bytes, format!("{files} files"))),
        };
        if files > 1 && total.is_hidden() {
            info!("downloading {files} files: {}", HumanBytes(bytes));
        }
        Self { bars, total, done: Cell::new(0) }
    }

    /// Begins a file of which `here` bytes are already on disk.
    pub fn file(&self, name: &str, size: u64, here: u64) -> FileProgress<'_> {
        // The bar is inserted above the bar of all files, if there is one.
        let bar = self.bars.insert(0, running(size, name.to_string()));
        if bar.is_hidden() {
            let rest = if here > 0 { format!(", {} of them here", HumanBytes(here)) } else { String::new() };
            info!("downloading {name}: {}{rest}", HumanBytes(size));
        }
        let file = FileProgress { all: self, bar };
        file.at(here);
        file.bar.reset_eta();
        file
    }

    /// Ends the progress, when all files are complete.
    pub fn finish(&self) {
        end(&self.total);
    }
}

/// Progress of one of the files.
pub struct FileProgress<'p> {
    all: &'p Progress,
    bar: ProgressBar,
}

impl FileProgress<'_> {
    /// Shows that `bytes` bytes have arrived.
    pub fn at(&self, bytes: u64) {
        self.bar.set_position(bytes);
        self.all.total.set_position(self.all.done.get() + bytes);
    }

    /// Ends the progress of the file, when it is complete.
    pub fn finish(&self, size: u64) {
        self.at(size);
        end(&self.bar);
        self.all.done.set(self.all.done.get() + size);
    }

    /// The bar of the file. Messages must not be printed across it.
    pub fn bar(&self) -> &ProgressBar {
        &self.bar
    }
}

/// From this number of columns on, a line has room for everything.
const WIDE: u16 = 90;

/// Returns the templates of a line while a file arrives and when it is complete, for a terminal of `columns` columns.
/// The column of names is as wide as the names of shards, so that bars are aligned. A narrow terminal shows less and
/// cuts names, because a line that wraps could not be overwritten.
fn templates(columns: u16) -> (&'static str, &'static str) {
    match columns {
        WIDE.. => (
            "{msg:32} [{wide_bar}] {percent:>3}% of {total_bytes:>10} {bytes_per_sec:>12} {eta:>4}",
            "{msg:32} {total_bytes:>10}",
        ),
        50.. => ("{wide_msg} {percent:>3}% of {total_bytes:>10} {eta:>4}", "{wide_msg} {total_bytes:>10}"),
        _ => ("{wide_msg} {percent:>3}%", "{wide_msg} {total_bytes:>10}"),
    }
}

/// The columns of the terminal on stderr.
fn columns() -> u16 {
    Term::stderr().size_checked().map_or(WIDE, |(_, columns)| columns)
}

/// Makes a bar with a name before it.
fn running(size: u64, name: String) -> ProgressBar {
    styled(ProgressBar::new(size), templates(columns()).0).with_message(visible(&name).into_owned())
}

/// Replaces a bar by a line with its name and size.
fn end(bar: &ProgressBar) {
    styled(bar.clone(), templates(columns()).1).finish();
}

/// Templates are constants. If one were wrong, indicatif's own template would be used.
fn styled(bar: ProgressBar, template: &str) -> ProgressBar {
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use indicatif::{ProgressDrawTarget, TermLike};

    use super::*;

    /// A terminal that stores what is written to it.
    #[derive(Clone, Debug)]
    struct Paper {
        columns: u16,
        text: Arc<Mutex<String>>,
    }

    impl TermLike for Paper {
        fn width(&self) -> u16 {
            self.columns
        }

        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(&format!("{text}\n"))
        }

        fn write_str(&self, text: &str) -> io::Result<()> {
            *self.text.lock().unwrap() += text;
            Ok(())
        }

        fn clear_line(&self) -> io::Result<()> {
            self.write_str("\n")
        }

        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_fits_its_terminal() {
        for columns in [20, 49, 50, 72, 89, 90, 200] {
            let paper = Paper { columns, text: Arc::default() };
            let taken = || std::mem::take(&mut *paper.text.lock().unwrap());
            let fits = |text: &str| {
                text.lines().all(|line| console::measure_text_width(line) <= usize::from(columns))
            };
            let target = ProgressDrawTarget::term_like(Box::new(paper.clone()));
            let (running, ended) = templates(columns);
            let bar = styled(ProgressBar::with_draw_target(Some(5_000_000_000), target), running);
            bar.set_message("model-00001-of-00002.safetensors");
            taken();
            bar.set_position(2_500_000_000);
            bar.tick();
            let shown = taken();
            assert!(fits(&shown) && shown.contains(" 50%"), "{columns}: {shown:?}");
            styled(bar.clone(), ended).finish();
            let shown = taken();
            assert!(fits(&shown) && shown.contains("4.66 GiB"), "{columns}: {shown:?}");
        }
    }

    #[test]
    fn the_total_counts_all_files() {
        let progress = Progress::new(2, 30);
        let first = progress.file("a", 10, 4);
        assert_eq!(progress.total.position(), 4);
        first.finish(10);
        let second = progress.file("b", 20, 0);
        second.at(15);
        assert_eq!(progress.total.position(), 25);
        // A server without ranges sends the file again.
        second.at(0);
        assert_eq!(progress.total.position(), 10);
        second.finish(20);
        assert_eq!(progress.total.position(), 30);
    }
}
