//! The lines of the input, one at a time and of bounded length: a file of any size passes through
//! the memory of one line.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result};
use moe_engine::usage;

/// The longest line that is read whole, in bytes.
pub const MAX_LINE: usize = 64 << 20;

/// U+FEFF in UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// A line of the input.
pub struct Line {
    /// Its number, from 1.
    pub number: u64,
    /// Bytes of the input up to its end.
    pub end: u64,
    /// Its bytes without white space around; `None` if it is longer than [`MAX_LINE`].
    pub bytes: Option<Vec<u8>>,
}

/// The input as lines that are not blank.
pub struct Lines {
    reader: Box<dyn BufRead + Send>,
    max_line: usize,
    number: u64,
    end: u64,
}

/// How much there is to read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Size {
    /// Bytes.
    pub bytes: u64,
    /// Lines, if all are as long as the first ones.
    pub lines: u64,
}

impl Lines {
    /// Opens a file, or stdin if it is `-`; also its size, if it has one.
    pub fn open(path: &Path) -> Result<(Self, Option<Size>)> {
        if path.as_os_str() == "-" {
            return Ok((Self::new(BufReader::new(io::stdin())), None));
        }
        let cannot = || format!("--input {}: cannot read it", path.display());
        let file = File::open(path).map_err(|e| usage(format!("{}: {e}", cannot())))?;
        let metadata = file.metadata().with_context(cannot)?;
        if metadata.is_dir() {
            return Err(usage(format!("--input {}: it is a folder; expected a JSONL file", path.display())));
        }
        let mut reader = BufReader::with_capacity(SAMPLE, file);
        let bytes = metadata.len();
        let size = match metadata.is_file() {
            true => Some(Size { bytes, lines: count(reader.fill_buf().with_context(cannot)?, bytes) }),
            false => None,
        };
        Ok((Self::new(reader), size))
    }

    fn new(reader: impl BufRead + Send + 'static) -> Self {
        Self { reader: Box::new(reader), max_line: MAX_LINE, number: 0, end: 0 }
    }

    /// The next line, blank or not.
    fn line(&mut self) -> io::Result<Option<Line>> {
        let mut bytes = Vec::new();
        let limit = self.max_line as u64 + 1;
        let mut read = self.reader.by_ref().take(limit).read_until(b'\n', &mut bytes)? as u64;
        if read == 0 {
            return Ok(None);
        }
        let whole = read < limit || bytes.ends_with(b"\n");
        if !whole {
            read += self.reader.skip_until(b'\n')? as u64;
        }
        self.number += 1;
        self.end += read;
        // Editors on Windows begin a file with a byte-order mark.
        let text = bytes.strip_prefix(BYTE_ORDER_MARK).filter(|_| self.number == 1).unwrap_or(&bytes);
        let bytes = whole.then(|| text.trim_ascii().to_vec());
        Ok(Some(Line { number: self.number, end: self.end, bytes }))
    }
}

impl Iterator for Lines {
    type Item = io::Result<Line>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.line() {
                Ok(Some(line)) if line.bytes.as_ref().is_some_and(Vec::is_empty) => {}
                result => return result.transpose(),
            }
        }
    }
}

/// Bytes of the beginning that tell how long lines are.
const SAMPLE: usize = 1 << 16;

/// Lines of a file of this many bytes that begins so.
fn count(beginning: &[u8], bytes: u64) -> u64 {
    let ends = beginning.iter().filter(|byte| **byte == b'\n').count();
    let lines = (bytes as u128 * ends as u128).div_ceil(beginning.len().max(1) as u128);
    (lines as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &'static [u8], max_line: usize) -> Vec<(u64, u64, Option<Vec<u8>>)> {
        let lines = Lines { max_line, ..Lines::new(text) };
        lines.map(|line| line.unwrap()).map(|line| (line.number, line.end, line.bytes)).collect()
    }

    #[test]
    fn the_beginning_tells_how_many_lines_there_are() {
        assert_eq!(count(b"12345\n789\n", 1000), 200);
        assert_eq!((count(b"no end", 6), count(b"", 0)), (1, 1));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "one line\n".repeat(100_000)).unwrap();
        let (lines, size) = Lines::open(file.path()).unwrap();
        let Some(Size { bytes: 900_000, lines: 90_000..=110_000 }) = size else { panic!("{size:?}") };
        assert_eq!(lines.count(), 100_000, "and nothing is lost by looking");
    }

    #[test]
    fn blank_lines_are_counted_and_left_out() {
        let lines = read(b"one\r\n\n  \n two\nlast", 100);
        let want = [(1, 5, "one"), (4, 14, "two"), (5, 18, "last")];
        assert_eq!(lines, want.map(|(n, end, text)| (n, end, Some(text.as_bytes().to_vec()))));
    }

    #[test]
    fn a_byte_order_mark_is_no_part_of_the_first_line() {
        let lines = read(b"\xEF\xBB\xBFone\n\xEF\xBB\xBFtwo", 100);
        assert_eq!(lines[0], (1, 7, Some(b"one".to_vec())));
        assert_eq!(lines[1].2.as_deref(), Some(&b"\xEF\xBB\xBFtwo"[..]), "only that of the file");
        assert!(read(b"\xEF\xBB\xBF\n", 100).is_empty());
    }

    #[test]
    fn a_line_that_is_too_long_is_passed_over() {
        let lines = read(b"12345\n123456789 much longer\n1234\n123456", 5);
        let want = [(1, 6, Some("12345")), (2, 28, None), (3, 33, Some("1234")), (4, 39, None)];
        assert_eq!(lines, want.map(|(n, end, text)| (n, end, text.map(|t| t.as_bytes().to_vec()))));
    }
}
