//! The output file: what it already holds, and how records are added to it.
//!
//! A record is one line and is appended by one write, so a kill at any moment leaves whole records
//! and at most one torn line at the end, which the next run cuts off.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, Seek, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use moe_engine::usage;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::fingerprint::Fingerprint;
use super::known::Known;
use super::replace::replace;
use super::settings::{Settings, SettingsFile};

/// How every record begins; tells a torn record from a file that is not ours.
const BEGINNING: &[u8] = br#"{"id":""#;

/// What becomes of the records of earlier runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Earlier {
    /// They stay, and their lines are not answered again.
    Keep,
    /// Those that are errors make room for new ones.
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

    fn keeps(self, record: &Header) -> bool {
        match self {
            Self::Keep => true,
            Self::RetryErrors => record.error.is_none(),
            Self::Overwrite => false,
        }
    }
}

/// Where records go.
pub struct Journal {
    name: String,
    /// `None`: stdout.
    file: Option<File>,
    /// The length of a file that keeps what is written: not that of a device or a pipe.
    len: Option<u64>,
    /// Records in it, earlier runs' included.
    pub records: u64,
    /// Those of earlier runs that are errors and stay.
    pub earlier_errors: u64,
    /// The file behind links: what a new one replaces.
    path: PathBuf,
    earlier: Earlier,
    /// Records that [`Self::begin`] takes out.
    dropped: u64,
    /// The file that was replaced: while it is open, its lock stops a run that opened it before.
    replaced: Option<File>,
}

/// What a record of an earlier run is known by.
#[derive(Deserialize)]
struct Header {
    id: String,
    custom_id: Option<String>,
    #[serde(default)]
    response: Response,
    #[serde(default)]
    error: Option<IgnoredAny>,
}

#[derive(Default, Deserialize)]
struct Response {
    #[serde(default)]
    request_id: String,
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
        Ok(Self { file: Some(file), len: Some(len), ..journal })
    }

    /// A journal on what cannot be read again.
    fn keeping_nothing(name: String, file: Option<File>) -> Self {
        let (path, earlier) = (PathBuf::new(), Earlier::Keep);
        let (records, earlier_errors, dropped) = (0, 0, 0);
        Self { name, file, len: None, records, earlier_errors, path, earlier, dropped, replaced: None }
    }

    fn note(&mut self, record: &Header, known: &mut Known) {
        self.records += 1;
        if !self.earlier.keeps(record) {
            self.dropped += 1;
            return;
        }
        self.earlier_errors += u64::from(record.error.is_some());
        let request = Fingerprint::of_request_id(&record.response.request_id);
        known.answered(&record.id, record.custom_id.as_deref(), request);
    }

    /// Compares the settings of the records that stay with those of this run, and takes out the other records.
    pub fn begin(&mut self, settings: &Settings) -> Result<()> {
        if self.len.is_none() {
            return Ok(());
        }
        let file = SettingsFile::of(&self.path);
        if self.records > self.dropped {
            file.check(settings, &self.name)?;
            return self.drop_records();
        }
        // In this order a crash leaves no record beside settings that it was not made with.
        self.drop_records()?;
        file.write(settings)
    }

    /// What a crash leaves behind is the file before or after.
    fn drop_records(&mut self) -> Result<()> {
        let Some(file) = self.file.take_if(|_| self.dropped > 0) else { return Ok(()) };
        let earlier = self.earlier;
        let cannot = || format!("cannot take earlier records out of {}; it is as it was", self.name);
        let permissions = file.metadata().with_context(cannot)?.permissions();
        let new = replace(&self.path, |out| {
            (&file).rewind()?;
            copy(BufReader::with_capacity(1 << 20, &file), out, |record| earlier.keeps(record))
        })
        .with_context(cannot)?;
        new.set_permissions(permissions).with_context(cannot)?;
        self.len = Some(new.metadata().with_context(cannot)?.len());
        self.file = Some(new);
        self.replaced = Some(file);
        self.records -= self.dropped;
        Ok(())
    }

    /// Appends a record, a JSON object on one line.
    ///
    /// # Errors
    /// The record cannot be written (the disk is full); the ones before are intact.
    pub fn append(&mut self, mut record: String) -> Result<()> {
        record.push('\n');
        let bytes = record.as_bytes();
        let written = match &mut self.file {
            Some(file) => file.write_all(bytes),
            None => {
                let mut out = io::stdout().lock();
                out.write_all(bytes).and_then(|()| out.flush())
            }
        };
        if let (Some(file), Some(len)) = (&self.file, &mut self.len) {
            match written {
                Ok(()) => *len += bytes.len() as u64,
                // Half a record helps nobody; should this fail too, the next run does it.
                Err(_) => drop(file.set_len(*len)),
            }
        }
        written.with_context(|| {
            format!(
                "cannot write to {}; its {} records are intact, {}",
                self.name,
                self.records,
                self.earlier.how_to_continue()
            )
        })?;
        self.records += 1;
        Ok(())
    }

    /// Waits until the file is on the disk.
    pub fn finish(self) -> Result<()> {
        match self.file.filter(|_| self.len.is_some()) {
            Some(file) => file.sync_all().with_context(|| format!("cannot write to {}", self.name)),
            None => Ok(()),
        }
    }
}

/// Copies the lines of records that are wanted.
fn copy(mut from: impl BufRead, to: &mut impl Write, wanted: impl Fn(&Header) -> bool) -> io::Result<()> {
    let mut line = Vec::new();
    while from.read_until(b'\n', &mut line)? > 0 {
        if wanted(&serde_json::from_slice(&line)?) {
            to.write_all(&line)?;
        }
        line.clear();
    }
    Ok(())
}

/// Reads the records of a file; its length without a torn last line.
fn scan(file: &File, name: &str, mut note: impl FnMut(Header)) -> Result<u64> {
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let (mut line, mut records, mut len) = (Vec::new(), 0, 0);
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line).with_context(|| format!("cannot read {name}"))?;
        if !line.ends_with(b"\n") {
            let torn = line.starts_with(BEGINNING)
                || BEGINNING.starts_with(&line)
                // What some file systems leave of a write that a power failure interrupted.
                || line.iter().all(|byte| *byte == 0);
            return if torn { Ok(len) } else { not_ours(name, records + 1, "no such record") };
        }
        match serde_json::from_slice(&line) {
            Ok(header) => note(header),
            Err(e) => return not_ours(name, records + 1, &e.to_string()),
        }
        records += 1;
        len += read as u64;
    }
}

fn not_ours<T>(name: &str, line: u64, why: &str) -> Result<T> {
    bail!(
        "--output {name} holds something else than records of this command (line {line}: {why}); it is left as it \
         is, name another file"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(path: &Path) -> Result<(Journal, Known)> {
        open_for(path, Earlier::Keep)
    }

    fn open_for(path: &Path, earlier: Earlier) -> Result<(Journal, Known)> {
        let mut known = Known::with_lines(0);
        Ok((Journal::open(path, Path::new("in.jsonl"), earlier, &mut known)?, known))
    }

    #[test]
    fn errors_make_room_when_the_run_begins() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.jsonl");
        let good = r#"{"id":"request-1","custom_id":"a","response":{},"error":null}"#;
        let bad = r#"{"id":"request-2","custom_id":"b","response":{},"error":{"error":{"message":"no"}}}"#;
        let before = format!("{good}\n{bad}\n");
        let text = || std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, &before).unwrap();
        assert_eq!(open(&path).unwrap().0.earlier_errors, 1);
        let (mut journal, known) = open_for(&path, Earlier::RetryErrors).unwrap();
        assert!(known.is_done(1, Some("a")) && !known.is_done(2, Some("b")));
        assert_eq!(text(), before, "a run that cannot start takes nothing away");
        journal.begin(&Settings::default()).unwrap();
        assert_eq!((journal.records, journal.earlier_errors, text()), (1, 0, format!("{good}\n")));
        assert!(open(&path).is_err(), "the new file is locked as the old one was");
        journal.append(good.replace("a", "b")).unwrap();
        assert_eq!(text().lines().count(), 2);
        drop(journal);
        let (mut journal, known) = open_for(&path, Earlier::Overwrite).unwrap();
        assert!(!known.is_done(1, Some("a")));
        journal.begin(&Settings::default()).unwrap();
        assert_eq!((journal.records, text().as_str()), (0, ""));
        assert!(Earlier::Overwrite.how_to_continue().contains("without"), "or it would begin again");
    }

    #[test]
    fn a_torn_last_line_is_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.jsonl");
        let whole = r#"{"id":"request-1","custom_id":"a","response":{},"error":null}"#;
        for torn in ["", "{", r#"{"id":"#, r#"{"id":"request-2","custom_id":"b","resp"#, "\0\0\0"] {
            std::fs::write(&path, format!("{whole}\n{torn}")).unwrap();
            let (mut journal, known) = open(&path).unwrap();
            assert_eq!(journal.records, 1);
            assert!(known.is_done(1, Some("a")) && !known.is_done(2, Some("b")));
            journal.append(r#"{"id":"request-2","custom_id":"b"}"#.into()).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            assert_eq!(text, format!("{whole}\n{{\"id\":\"request-2\",\"custom_id\":\"b\"}}\n"), "{torn:?}");
        }
    }

    #[test]
    fn a_file_of_something_else_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notes.txt");
        for text in ["my notes\n", "my notes", "{\"id\": 5}\n", "[1]\n{\"id\":\"", "\u{1}\0"] {
            std::fs::write(&path, text).unwrap();
            let error = format!("{:#}", open(&path).err().unwrap());
            assert!(error.contains("notes.txt") && error.contains("line 1"), "{error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
    }

    #[test]
    fn two_runs_cannot_write_to_one_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.jsonl");
        let first = open(&path).unwrap();
        let error = open(&path).err().unwrap().to_string();
        assert!(error.contains("another run"), "{error}");
        drop(first);
        assert!(open(&path).is_ok());
    }

    fn open_input_as(output: &Path, input: &Path) -> Result<Journal> {
        Journal::open(output, input, Earlier::Overwrite, &mut Known::with_lines(0))
    }

    #[test]
    fn the_input_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("in.jsonl");
        std::fs::write(&path, "").unwrap();
        let other = dir.path().join(".").join("in.jsonl");
        let error = open_input_as(&other, &path).err().unwrap().to_string();
        assert!(error.contains("is the input"), "{error}");
    }
}
