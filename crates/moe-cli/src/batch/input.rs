//! The lines of the input, one at a time and of limited length. A file of any size, compressed or not, needs only the
//! memory of one line.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result};

use super::encoding::{self, Packing};
use crate::error::usage;

/// The longest line that is read, in bytes.
pub const MAX_LINE: usize = 64 << 20;

/// U+FEFF in UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// A line of the input.
pub struct Line {
    /// Its number, from 1.
    pub number: u64,
    /// Its bytes without the line's end; `None` if it is longer than [`MAX_LINE`].
    pub bytes: Option<Vec<u8>>,
}

/// The input as lines that are not blank.
pub struct Lines {
    reader: Box<dyn BufRead + Send>,
    /// The stream, which is opened when the first line is requested.
    stream: Option<Box<dyn BufRead + Send>>,
    max_line: usize,
    number: u64,
}

/// The number of lines, once it is known.
#[derive(Clone, Default)]
pub struct Total(Arc<OnceLock<u64>>);

impl Total {
    /// Counts the lines of a file that are not blank, in parallel with the run: reading alone is much faster than
    /// answering. Other inputs can be read only once.
    pub fn count(path: &Path) -> Self {
        let total = Self::default();
        // Opening a pipe again would wait for a new writer.
        let Some(file) = path.is_file().then(|| File::open(path).ok()).flatten() else { return total };
        let counted = total.clone();
        let count = move || {
            // The code that answers the lines reports read errors.
            if let Ok((text, _)) = encoding::text(BufReader::with_capacity(1 << 20, file)) {
                counted.is(Lines::new(text).map_while(Result::ok).count() as u64);
            }
        };
        // If the thread cannot start, the number is known when the input ends.
        let _ = std::thread::Builder::new().name("count".into()).spawn(count);
        total
    }

    /// A known number.
    pub fn of(lines: u64) -> Self {
        let total = Self::default();
        total.is(lines);
        total
    }

    /// Sets the number.
    pub fn is(&self, lines: u64) {
        // Only the first value is kept.
        let _ = self.0.set(lines);
    }

    /// The number, if it is already known.
    pub fn get(&self) -> Option<u64> {
        self.0.get().copied()
    }
}

impl Lines {
    /// Opens a file, or stdin if it is `-`. Also returns the estimated number of lines, if the file has a size.
    pub fn open(path: &Path) -> Result<(Self, Option<u64>)> {
        let cannot = || format!("--input {}: cannot read it", path.display());
        let wrong = |e: io::Error| match e.kind() {
            io::ErrorKind::InvalidData => {
                usage(format!("--input {}: {e}; expected UTF-8, plain or in gzip or zstd", path.display()))
            }
            _ => anyhow::Error::new(e).context(cannot()),
        };
        if path.as_os_str() == "-" {
            return Ok((Self::of_stream(BufReader::new(io::stdin())), None));
        }
        let file = File::open(path).map_err(|e| usage(format!("{}: {e}", cannot())))?;
        let metadata = file.metadata().with_context(cannot)?;
        if metadata.is_dir() {
            return Err(usage(format!("--input {}: it is a folder; expected a JSONL file", path.display())));
        }
        let mut reader = BufReader::with_capacity(SAMPLE, file);
        let bytes = metadata.len();
        if !metadata.is_file() {
            return Ok((Self::of_stream(reader), None));
        }
        let lines = count(reader.fill_buf().with_context(cannot)?, bytes);
        let (text, packing) = encoding::text(reader).map_err(wrong)?;
        Ok((Self::new(text), (packing == Packing::Plain).then_some(lines)))
    }

    fn new(reader: impl BufRead + Send + 'static) -> Self {
        Self { reader: Box::new(reader), stream: None, max_line: MAX_LINE, number: 0 }
    }

    /// The lines of a stream. Its first byte may come much later.
    fn of_stream(stream: impl BufRead + Send + 'static) -> Self {
        Self { stream: Some(Box::new(stream)), ..Self::new(io::empty()) }
    }

    /// The next line, blank or not.
    fn line(&mut self) -> io::Result<Option<Line>> {
        if let Some(stream) = self.stream.take() {
            self.reader = encoding::text(stream)?.0;
        }
        let mut bytes = Vec::new();
        let limit = self.max_line as u64 + 1;
        let read = self.reader.by_ref().take(limit).read_until(b'\n', &mut bytes)? as u64;
        if read == 0 {
            return Ok(None);
        }
        let whole = read < limit || bytes.ends_with(b"\n");
        if !whole {
            self.reader.skip_until(b'\n')?;
        }
        self.number += 1;
        // Some editors on Windows begin a file with a byte-order mark.
        let text = bytes.strip_prefix(BYTE_ORDER_MARK).filter(|_| self.number == 1).unwrap_or(&bytes);
        let text = text.strip_suffix(b"\n").unwrap_or(text);
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        let bytes = whole.then(|| text.to_vec());
        Ok(Some(Line { number: self.number, bytes }))
    }
}

impl Iterator for Lines {
    type Item = io::Result<Line>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.line() {
                Ok(Some(line)) if line.bytes.as_ref().is_some_and(|bytes| bytes.trim_ascii().is_empty()) => {}
                result => return result.transpose(),
            }
        }
    }
}

/// Number of bytes at the beginning from which the length of lines is estimated.
const SAMPLE: usize = 1 << 16;

/// The estimated number of lines in a file of `bytes` bytes with this beginning.
fn count(beginning: &[u8], bytes: u64) -> u64 {
    let ends = beginning.iter().filter(|byte| **byte == b'\n').count();
    let lines = (bytes as u128 * ends as u128).div_ceil(beginning.len().max(1) as u128);
    (lines as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &'static [u8], max_line: usize) -> Vec<(u64, Option<Vec<u8>>)> {
        let lines = Lines { max_line, ..Lines::new(text) };
        lines.map(|line| line.unwrap()).map(|line| (line.number, line.bytes)).collect()
    }

    #[test]
    fn the_beginning_tells_how_many_lines_there_are() {
        assert_eq!(count(b"12345\n789\n", 1000), 200);
        assert_eq!((count(b"no end", 6), count(b"", 0)), (1, 1));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "one line\n".repeat(100_000)).unwrap();
        let (lines, guess) = Lines::open(file.path()).unwrap();
        let Some(90_000..=110_000) = guess else { panic!("{guess:?}") };
        assert_eq!(lines.count(), 100_000, "and nothing is lost by looking");
    }

    #[test]
    fn lines_are_counted_during_the_work() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "a\n\n  \nb\nc").unwrap();
        let total = Total::count(file.path());
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while total.get().is_none() && std::time::Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert_eq!(total.get(), Some(3));
        assert_eq!(Total::count(Path::new("-")).get(), None, "stdin is read once");
    }

    #[test]
    fn blank_lines_are_counted_and_left_out() {
        let lines = read(b"one\r\n\n  \n two\nlast", 100);
        let want = [(1, "one"), (4, " two"), (5, "last")];
        assert_eq!(lines, want.map(|(n, text)| (n, Some(text.as_bytes().to_vec()))));
    }

    #[test]
    fn a_byte_order_mark_is_no_part_of_the_first_line() {
        let lines = read(b"\xEF\xBB\xBFone\n\xEF\xBB\xBFtwo", 100);
        assert_eq!(lines[0], (1, Some(b"one".to_vec())));
        assert_eq!(lines[1].1.as_deref(), Some(&b"\xEF\xBB\xBFtwo"[..]), "only that of the file");
        assert!(read(b"\xEF\xBB\xBF\n", 100).is_empty());
    }

    #[test]
    fn a_line_that_is_too_long_is_passed_over() {
        let lines = read(b"12345\n123456789 much longer\n1234\n123456", 5);
        let want = [(1, Some("12345")), (2, None), (3, Some("1234")), (4, None)];
        assert_eq!(lines, want.map(|(n, text)| (n, text.map(|t| t.as_bytes().to_vec()))));
    }
}
