//! The output file: what it already holds, and how records are added to it.
//!
//! A record is one line and nothing but records is appended, so a kill at any moment leaves whole records
//! and at most one torn line at the end, which the next run cuts off. The record of a line that is answered again
//! stands behind the old one until the run ends.

use std::fmt::Display;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufReader, Seek};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use moe_engine::usage;

use super::entries::Key;
use super::errors::Errors;
use super::fingerprint::Fingerprint;
use super::known::Known;
use super::records::{Header, copy, scan, write_line};
use super::replace::replace;
use super::settings::{Settings, SettingsFile};
use super::untouched;

/// What becomes of the records of earlier runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Earlier {
    /// They stay, and their lines are not answered again.
    Keep,
    /// Error records make room for new ones, if their lines are answered again.
    RetryErrors,
    /// None stays.
    Overwrite,
}

impl Earlier {
    /// What somebody does whose run did not end.
    pub fn how_to_continue(self) -> &'static str {
        match self {
            Self::Keep | Self::RetryErrors => "run the same command again to continue",
            Self::Overwrite => "run the command again without --overwrite to continue",
        }
    }
}

/// Where records go.
pub struct Journal {
    name: String,
    /// `None`: stdout.
    file: Option<File>,
    /// The length of a file that keeps what is written; `None` for a device or a pipe.
    len: Option<u64>,
    /// Records in the file, earlier runs' included.
    pub records: u64,
    /// Error records of earlier runs whose lines are not answered again yet.
    pub earlier_errors: u64,
    /// Answers of earlier runs.
    pub answers: u64,
    /// The most tokens, of prompts and answers, in a record of earlier runs.
    longest: usize,
    errors: Errors,
    /// The file behind links: what a new one replaces.
    path: PathBuf,
    earlier: Earlier,
    /// The files that were replaced: while one is open, its lock stops a run that opened it before.
    replaced: Vec<File>,
}

impl Journal {
    /// Opens or creates an output file, `-` being stdout, and tells `known` which of its records stay. The others are
    /// still there until [`Self::begin`]: a run that cannot start takes nothing away.
    ///
    /// # Errors
    /// It is the input, another run writes to it, or it holds something else than records; it is
    /// left as it is then.
    pub fn open(path: &Path, input: &Path, earlier: Earlier, known: &mut Known) -> Result<Self> {
        let name = path.display().to_string();
        if path.as_os_str() == "-" {
            return Ok(Self::keeping_nothing("stdout".into(), None));
        }
        let same = |a: PathBuf| input.canonicalize().is_ok_and(|b| a == b);
        if path.canonicalize().is_ok_and(same) {
            return Err(usage(format!("--output {name} is the input; name another file")));
        }
        let cannot = |e: io::Error| usage(format!("--output {name}: cannot open it for writing: {e}"));
        let seekable = path.metadata().is_ok_and(|m| m.is_file()) || !path.exists();
        let file = OpenOptions::new().read(seekable).append(true).create(true).open(path).map_err(cannot)?;
        if !seekable {
            return Ok(Self::keeping_nothing(name, Some(file)));
        }
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(usage(format!("--output {name}: another run is writing to it")));
        }
        let path = path.canonicalize().map_err(cannot)?;
        let mut journal = Self { path, earlier, ..Self::keeping_nothing(name.clone(), None) };
        let len = scan(&file, &name, |record| journal.note(&record, known))?;
        file.set_len(len).with_context(|| format!("cannot cut the torn last line of {name}"))?;
        let journal = Self { file: Some(file), len: Some(len), ..journal };
        journal.check_folder()?;
        Ok(journal)
    }

    /// Whether this run can make the files beside the output that it needs: those of its settings and of an output that
    /// records are taken out of.
    fn check_folder(&self) -> Result<()> {
        if self.earlier == Earlier::Keep && self.records > 0 {
            return Ok(());
        }
        SettingsFile::of(&self.path).check_writable().map_err(|(beside, e)| {
            usage(format!(
                "--output {}: the folder must be writable, too: the run keeps its settings beside the output, and cannot \
                 make {}: {e}; name a file in another folder, or change the folder's permissions",
                self.name,
                beside.display()
            ))
        })
    }

    /// A journal on what cannot be read again.
    fn keeping_nothing(name: String, file: Option<File>) -> Self {
        let path = PathBuf::new();
        let earlier = Earlier::Keep;
        let records = 0;
        let earlier_errors = 0;
        let answers = 0;
        let longest = 0;
        let errors = Errors::default();
        let replaced = Vec::new();
        let len = None;
        Self { name, file, len, records, earlier_errors, answers, longest, errors, path, earlier, replaced }
    }

    fn note(&mut self, record: &Header, known: &mut Known) {
        let number = self.records;
        let custom_id = record.custom_id.as_deref();
        let is_error = record.error.is_some();
        self.records += 1;
        if self.earlier == Earlier::Overwrite {
            return;
        }
        let replaces = self.errors.note(number, &record.id, custom_id, is_error);
        self.earlier_errors += u64::from(is_error);
        self.earlier_errors -= u64::from(replaces);
        self.answers += u64::from(!is_error);
        self.longest = self.longest.max(record.total_tokens());
        if is_error && self.earlier == Earlier::RetryErrors {
            return;
        }
        let request = Fingerprint::of_request_id(&record.response.request_id);
        known.answered(&record.id, custom_id, request);
    }

    /// Compares the settings of the answers that stay with this run's settings, or takes out all records.
    pub fn begin(&mut self, settings: &Settings) -> Result<()> {
        if self.len.is_none() {
            return Ok(());
        }
        let file = SettingsFile::of(&self.path);
        let stays = match self.earlier {
            Earlier::Keep => self.records > 0,
            Earlier::RetryErrors => self.answers > 0,
            Earlier::Overwrite => false,
        };
        if stays {
            return file.check(settings, &self.name, self.longest);
        }
        // In this order a crash leaves no record beside settings that it was not made with.
        if self.earlier == Earlier::Overwrite {
            self.drop_records(self.records, |_, _| false)?;
        }
        file.write(settings)
    }

    /// Leaves the records that stay. What a crash leaves behind is the file before or after.
    fn drop_records(&mut self, dropped: u64, stays: impl Fn(u64, &Header) -> bool) -> Result<()> {
        let Some(file) = self.file.take_if(|_| dropped > 0) else { return Ok(()) };
        let cannot = || format!("cannot take earlier records out of {}; it is as it was", self.name);
        let permissions = file.metadata().with_context(cannot)?.permissions();
        let new = replace(&self.path, |out| {
            (&file).rewind()?;
            copy(BufReader::with_capacity(1 << 20, &file), out, stays)
        })
        .with_context(cannot)?;
        new.set_permissions(permissions).with_context(cannot)?;
        self.len = Some(new.metadata().with_context(cannot)?.len());
        self.file = Some(new);
        self.replaced.push(file);
        self.records -= dropped;
        Ok(())
    }

    /// What somebody does whose run did not end.
    pub fn how_to_continue(&self) -> &'static str {
        match self.len {
            Some(_) => self.earlier.how_to_continue(),
            None => "there is nothing to continue from: only --output FILE keeps what is answered",
        }
    }

    /// Appends a record, a JSON object on one line, of a line that the key names.
    ///
    /// # Errors
    /// The record cannot be written (the disk is full); the ones before are intact.
    pub fn append(&mut self, key: &Key, is_error: bool, record: impl Display) -> Result<()> {
        self.check_untouched()?;
        let written = match &mut self.file {
            Some(file) => write_line(file, record),
            None => write_line(io::stdout().lock(), record),
        };
        if let (Some(file), Some(len)) = (&self.file, &mut self.len) {
            match written {
                Ok(bytes) => *len += bytes,
                // Half a record helps nobody; should this fail too, the next run does it.
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
        let custom_id = key.custom_id.as_deref();
        let replaces = self.errors.note(self.records, &key.id, custom_id, is_error);
        self.earlier_errors = self.earlier_errors.saturating_sub(u64::from(replaces));
        self.records += 1;
        Ok(())
    }

    /// Whether the file is where it was and holds what was written to it: nothing else.
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

    /// Takes out errors whose lines were answered again, and waits until the file is on the disk.
    pub fn finish(mut self) -> Result<()> {
        self.check_untouched()?;
        if self.len.is_some() {
            let errors = std::mem::take(&mut self.errors);
            self.drop_records(errors.superseded, |number, record| {
                let custom_id = record.custom_id.as_deref();
                record.error.is_none() || !errors.is_superseded(number, &record.id, custom_id)
            })?;
        }
        match self.file.filter(|_| self.len.is_some()) {
            Some(file) => file.sync_all().with_context(|| format!("cannot write to {}", self.name)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "journal_tests.rs"]
mod tests;
