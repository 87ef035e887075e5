//! The input of a run: lines, or the rows of a table.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use anyhow::Result;

use super::input::{Line, Lines};
use super::tables;

/// Lines, and the error after which none follows.
pub type LineIter = Box<dyn Iterator<Item = io::Result<Line>> + Send>;

/// The input of a run.
pub struct Input {
    /// Its lines that are not blank, or its rows.
    pub lines: LineIter,
    /// The number of rows of a table.
    pub rows: Option<u64>,
    /// The estimated number of lines of a text file.
    pub guess: Option<u64>,
}

impl Input {
    /// Opens a file, or stdin if it is `-`. The prompts of a table may be `questions`.
    ///
    /// # Errors
    /// It cannot be read, or it is neither lines nor a table of requests.
    pub fn open(path: &Path, questions: bool) -> Result<Self> {
        if is_table(path) {
            let (requests, rows) = tables::Requests::open(path, questions)?;
            return Ok(Self { lines: Box::new(requests), rows: Some(rows), guess: None });
        }
        let (lines, guess) = Lines::open(path)?;
        Ok(Self { lines: Box::new(lines), rows: None, guess })
    }
}

/// Whether a file begins as a Parquet file.
fn is_table(path: &Path) -> bool {
    let mut beginning = Vec::new();
    // Opening a pipe and reading from it would take the bytes away.
    let file = path.is_file().then(|| File::open(path).ok()).flatten();
    // `Lines` reports errors.
    file.is_some_and(|file| file.take(tables::MAGIC.len() as u64).read_to_end(&mut beginning).is_ok())
        && beginning == tables::MAGIC
}
