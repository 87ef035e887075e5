//! Where the records of a run are in the end: in the file to which they are appended, or in a table that is made of it.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::replace::{replace, sibling};
use super::tables;
use crate::error::usage;

/// The ending of a name that asks for a table.
const TABLE: &str = "parquet";

/// The place of the records.
pub struct Target {
    /// The file to which they are appended.
    pub journal: PathBuf,
    /// The Parquet file that is made of it.
    table: Option<PathBuf>,
}

impl Target {
    /// The target of a run. The records of a table that an earlier run has finished are put back into lines, so that
    /// this run can continue.
    ///
    /// # Errors
    /// The output is the input or another file than such a table, or this program has no Parquet.
    pub fn of(output: &Path, input: &Path) -> Result<Self> {
        if !output.extension().is_some_and(|ending| ending.eq_ignore_ascii_case(TABLE)) {
            return Ok(Self { journal: output.to_path_buf(), table: None });
        }
        let name = output.display();
        let wrong = |e: anyhow::Error| usage(format!("--output {name}: {e:#}"));
        tables::available().map_err(wrong)?;
        let journal = sibling(output, ".jsonl");
        if output.exists() {
            let table = output.canonicalize().with_context(|| format!("cannot read {name}"))?;
            if input.canonicalize().is_ok_and(|input| input == table) {
                return Err(usage(format!("--output {name} is the input; name another file")));
            }
            let read =
                if journal.exists() { tables::check(&table) } else { tables::restore(&table, &journal) };
            read.map_err(wrong)?;
            return Ok(Self { journal, table: Some(table) });
        }
        Ok(Self { journal, table: Some(output.to_path_buf()) })
    }

    /// What a user should know of a run that ends early.
    pub fn unfinished(&self) -> String {
        match &self.table {
            Some(table) => {
                let journal = self.journal.display();
                format!("; {journal} has the records so far, {} is written at the end", table.display())
            }
            None => String::new(),
        }
    }

    /// Makes the table of a run that has answered everything, and removes the file of which it was made. A crash
    /// leaves one of them or both, each whole.
    pub fn finish(&self) -> Result<()> {
        let Some(table) = &self.table else { return Ok(()) };
        let journal = self.journal.display();
        let records = File::open(&self.journal).with_context(|| format!("cannot read {journal}"))?;
        if let Err(TryLockError::WouldBlock) = records.try_lock() {
            bail!("another run is writing to {journal}; it will write {}", table.display());
        }
        let written = replace(table, |out| tables::write(&records, out).map_err(io::Error::other));
        written.with_context(|| {
            format!("cannot write {}; {journal} has all records, run the same command again", table.display())
        })?;
        fs::remove_file(&self.journal).with_context(|| format!("cannot remove {journal}"))
    }
}
