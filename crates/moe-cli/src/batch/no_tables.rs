//! The functions of `tables` in a program without the feature `parquet`: each says so.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Result, bail};

use super::input::Line;
use crate::error::usage;

/// The first bytes of a Parquet file.
pub const MAGIC: &[u8] = b"PAR1";

/// What a user must do.
const WITHOUT: &str = "this program was built without the feature `parquet`; build it with --features parquet, or use \
     JSON lines";

/// Fails: no table can be read or written.
pub fn available() -> Result<()> {
    bail!(WITHOUT)
}

/// The rows of a table: there are none.
pub enum Requests {}

impl Requests {
    /// Fails.
    pub fn open(path: &Path, _questions: bool) -> Result<(Self, u64)> {
        Err(usage(format!("--input {}: it is a Parquet file, and {WITHOUT}", path.display())))
    }
}

impl Iterator for Requests {
    type Item = io::Result<Line>;

    fn next(&mut self) -> Option<Self::Item> {
        match *self {}
    }
}

/// Fails.
pub fn check(_table: &Path) -> Result<()> {
    available()
}

/// Fails.
pub fn restore(_table: &Path, _records: &Path) -> Result<()> {
    available()
}

/// Fails.
pub fn write(_records: &File, _table: &mut impl Write) -> Result<()> {
    available()
}
