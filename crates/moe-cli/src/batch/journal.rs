//! The output file: the records that it already has, and how records are added.
//!
//! A record is one line, and only records are appended. So a kill at any moment leaves whole records and at most one
//! incomplete line at the end, which the next run removes. If a line is answered again, its new record stands after the
//! old one until the run ends.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::entries::Key;
use super::fingerprint::Fingerprint;
use super::known::{Answered, Known};
use super::records::{Header, copy_without, read_at, scan, write_line};
use super::replace::{replace, sibling};
use super::settings::{self, Settings};
use super::untouched;
use crate::error::usage;

/// What happens to the records of earlier runs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Earlier {
    /// They stay, and their lines are not answered again.
    #[default]
    Keep,
    /// Error records are replaced by new ones if their lines are answered again.
    RetryErrors,
    /// All are removed.
    Overwrite,
}

/// The destination of records.
#[derive(Default)]
pub struct Journal {
    name: String,
    /// `None`: stdout.
    file: Option<File>,
    /// The length of a file that can be read again; `None` for a device or a pipe.
    len: Option<u64>,
    /// Number of records in the file, including the records of earlier runs.
    pub records: u64,
    /// Number of answers of earlier runs.
    pub answers: u64,
    /// The largest number of tokens (prompts and answers) in a record of earlier runs.
    longest: usize,
    /// Error records of earlier runs whose lines were not answered again yet: the line's name and the record's offset.
    errors: HashMap<String, u64>,
    /// Offsets of the error records whose lines were answered again.
    superseded: HashSet<u64>,
    /// The file to which links lead, which a new file replaces.
    path: PathBuf,
    earlier: Earlier,
}

impl Journal {
    /// Opens or creates an output file (`-` is stdout), and informs `known` which of its records stay. The other
    /// records are kept until [`Self::begin`], so that a run that cannot start removes nothing.
    ///
    /// # Errors
    /// It is the input, another run writes to it, or it contains something other than records. Then it is not changed.
    pub fn open(path: &Path, input: &Path, earlier: Earlier, known: &mut Known) -> Result<Self> {
        let name = path.display().to_string();
        if path.as_os_str() == "-" {
            return Ok(Self { name: "stdout".into(), ..Self::default() });
        }
        let same = |a: PathBuf| input.canonicalize().is_ok_and(|b| a == b);
        if path.canonicalize().is_ok_and(same) {
            return Err(usage(format!("--output {name} is the input; name another file")));
        }
        let cannot = |e: io::Error| usage(format!("--output {name}: cannot open it for writing: {e}"));
        let seekable = path.metadata().is_ok_and(|m| m.is_file()) || !path.exists();
        let file = OpenOptions::new().read(seekable).append(true).create(true).open(path).map_err(cannot)?;
        if !seekable {
            return Ok(Self { name, file: Some(file), ..Self::default() });
        }
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(usage(format!("--output {name}: another run is writing to it")));
        }
        let path = path.canonicalize().map_err(cannot)?;
        let mut journal = Self { name: name.clone(), path, earlier, ..Self::default() };
        let len = scan(&file, &name, |record, at| journal.note(&record, at, known))?;
        file.set_len(len).with_context(|| format!("cannot cut the torn last line of {name}"))?;
        let journal = Self { file: Some(file), len: Some(len), ..journal };
        journal.check_folder()?;
        Ok(journal)
    }

    /// Fails if this run cannot create the files next to the output that it needs: the settings, and the temporary file
    /// for an output from which records are removed.
    fn check_folder(&self) -> Result<()> {
        if self.earlier == Earlier::Keep && self.records > 0 {
            return Ok(());
        }
        let file = settings::file_of(&self.path);
        let probe = sibling(&file, ".probe");
        let made = File::create(&probe).and_then(|_| fs::remove_file(&probe));
        made.map_err(|e| {
            usage(format!(
                "--output {}: the folder must be writable, too: the run keeps its settings next to the output, and \
                 cannot make {}: {e}; name a file in another folder, or change the folder's permissions",
                self.name,
                file.display()
            ))
        })
    }

    fn note(&mut self, record: &Header, at: u64, known: &mut Known) {
        self.records += 1;
        if self.earlier == Earlier::Overwrite {
            return;
        }
        let name = record.name();
        let is_error = record.error.is_some();
        self.superseded.extend(self.errors.remove(&name));
        self.answers += u64::from(!is_error);
        self.longest = self.longest.max(record.total_tokens());
        if !is_error || self.earlier == Earlier::Keep {
            let request = Fingerprint::of_request_id(&record.response.request_id);
            known.note(&name, Answered { at, request });
        }
        if is_error {
            self.errors.insert(name, at);
        }
    }

    /// Number of error records of earlier runs whose lines were not answered again yet.
    pub fn earlier_errors(&self) -> u64 {
        self.errors.len() as u64
    }

    /// Compares the settings of the kept answers with this run's settings, or removes all records.
    pub fn begin(&mut self, settings: &Settings) -> Result<()> {
        if self.len.is_none() {
            return Ok(());
        }
        let stays = match self.earlier {
            Earlier::Keep => self.records > 0,
            Earlier::RetryErrors => self.answers > 0,
            Earlier::Overwrite => false,
        };
        if stays {
            return settings.check(&self.path, self.longest);
        }
        // With this order a crash never leaves a record together with settings from which it was not made.
        if let (Earlier::Overwrite, Some(output)) = (self.earlier, &self.file) {
            output.set_len(0).with_context(|| format!("cannot take earlier records out of {}", self.name))?;
            self.len = Some(0);
            self.records = 0;
        }
        settings.write(&self.path)
    }

    /// The flag with which a user continues an interrupted run.
    pub fn how_to_continue(&self) -> &'static str {
        match (self.len, self.earlier) {
            (None, _) => "there is nothing to continue from: only --output FILE keeps what is answered",
            (_, Earlier::Overwrite) => "run the command again without --overwrite to continue",
            (_, Earlier::Keep | Earlier::RetryErrors) => "run the same command again to continue",
        }
    }

    /// Appends a record (a JSON object on one line) for the line with this key. Returns its offset, if the output can
    /// be read again.
    ///
    /// # Errors
    /// The record cannot be written (the disk is full); earlier records are intact.
    pub fn append(&mut self, key: &Key, record: impl Display) -> Result<Option<u64>> {
        self.check_untouched()?;
        let at = self.len;
        let written = match &mut self.file {
            Some(file) => write_line(file, record),
            None => write_line(io::stdout().lock(), record),
        };
        if let (Some(file), Some(len)) = (&self.file, &mut self.len) {
            match written {
                Ok(bytes) => *len += bytes,
                // A partial record is useless. If this fails too, the next run removes it.
                Err(_) => drop(file.set_len(*len)),
            }
        }
        written.map(drop).with_context(|| {
            let intact = match self.len {
                Some(_) => format!("its {} records are intact, ", self.records),
                None => String::new(),
            };
            format!("cannot write to {}; {intact}{}", self.name, self.how_to_continue())
        })?;
        self.superseded.extend(self.errors.remove(&key.name()));
        self.records += 1;
        Ok(at)
    }

    /// The text of the record at this offset; `None` if it is too long to be in memory.
    pub fn record_at(&self, at: u64) -> Result<Option<String>> {
        let Some(file) = &self.file else { return Ok(None) };
        read_at(file, at).with_context(|| format!("cannot read {} again", self.name))
    }

    /// Fails unless the file is still at its path and contains only what was written to it.
    fn check_untouched(&self) -> Result<()> {
        let (Some(file), Some(len)) = (&self.file, self.len) else { return Ok(()) };
        let change = untouched::change(file, &self.path, len);
        match change.with_context(|| format!("cannot look at {}", self.name))? {
            None => Ok(()),
            Some(change) => bail!(
                "{}: another program {change}; records of this run are lost; {}",
                self.name,
                self.how_to_continue()
            ),
        }
    }

    /// Removes errors whose lines were answered again, and waits until the file is on the disk.
    pub fn finish(self) -> Result<()> {
        self.check_untouched()?;
        let (Some(file), Some(_)) = (&self.file, self.len) else { return Ok(()) };
        if self.superseded.is_empty() {
            return file.sync_all().with_context(|| format!("cannot write to {}", self.name));
        }
        let removed = self.drop_superseded(file);
        removed.with_context(|| format!("cannot take earlier records out of {}; it is as it was", self.name))
    }

    /// Removes the error records that a later record of the same line follows. A crash leaves either the old or the new
    /// file.
    fn drop_superseded(&self, file: &File) -> io::Result<()> {
        let new = replace(&self.path, |out| copy_without(file, out, &self.superseded))?;
        new.set_permissions(file.metadata()?.permissions())
    }
}

#[cfg(test)]
#[path = "journal_tests.rs"]
mod tests;
