//! The records of an output: how a record is written, and which parts a later run reads.

use std::collections::HashSet;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::known::name;

/// The beginning of every record, which distinguishes an incomplete record from a different file.
const BEGINNING: &[u8] = br#"{"id":""#;

/// The longest record that is read into memory as a whole, in bytes.
const MAX_REREAD: u64 = 1 << 20;

/// The identity of a record of an earlier run.
#[derive(Deserialize)]
pub struct Header {
    /// Its `id`.
    pub id: String,
    /// The line's `custom_id`, where it has one.
    pub custom_id: Option<String>,
    /// The answer, in the form of the HTTP API.
    #[serde(default)]
    pub response: Response,
    /// If present, the record is an error.
    #[serde(default)]
    pub error: Option<IgnoredAny>,
}

/// The part of a record that is the answer of the HTTP API.
#[derive(Default, Deserialize)]
pub struct Response {
    /// Ends with the fingerprint of the request.
    #[serde(default)]
    pub request_id: String,
    /// The answer.
    #[serde(default)]
    body: Option<Body>,
}

#[derive(Default, Deserialize)]
struct Body {
    #[serde(default)]
    usage: Usage,
}

#[derive(Default, Deserialize)]
struct Usage {
    #[serde(default)]
    total_tokens: usize,
}

impl Header {
    /// The name of its line.
    pub fn name(&self) -> String {
        name(&self.id, self.custom_id.as_deref())
    }

    /// Tokens of its prompts and answers.
    pub fn total_tokens(&self) -> usize {
        self.response.body.as_ref().map_or(0, |body| body.usage.total_tokens)
    }
}

/// Copies the records of a file, except for the ones at these offsets.
pub fn copy_without(mut from: &File, to: &mut impl Write, left_out: &HashSet<u64>) -> io::Result<()> {
    from.rewind()?;
    let mut reader = BufReader::with_capacity(1 << 20, from);
    let mut line = Vec::new();
    let mut at = 0;
    while reader.read_until(b'\n', &mut line)? > 0 {
        if !left_out.contains(&at) {
            to.write_all(&line)?;
        }
        at += line.len() as u64;
        line.clear();
    }
    Ok(())
}

/// The line at this offset of a file; `None` if it is longer than [`MAX_REREAD`].
pub fn read_at(mut file: &File, at: u64) -> io::Result<Option<String>> {
    file.seek(SeekFrom::Start(at))?;
    let mut line = Vec::new();
    BufReader::new(file.take(MAX_REREAD)).read_until(b'\n', &mut line)?;
    Ok(String::from_utf8(line).ok().filter(|line| line.ends_with('\n')))
}

/// Writes a record and its newline part by part, because it may be larger than the memory. Returns the number of bytes.
pub fn write_line(out: impl Write, record: impl Display) -> io::Result<u64> {
    let mut out = BufWriter::with_capacity(1 << 16, Counted { out, bytes: 0 });
    writeln!(out, "{record}")?;
    out.flush()?;
    Ok(out.get_ref().bytes)
}

/// Counts what it writes.
struct Counted<W> {
    out: W,
    bytes: u64,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Reads the records of a file with their offsets; returns its length without an incomplete last line.
pub fn scan(mut file: &File, name: &str, mut note: impl FnMut(Header, u64)) -> Result<u64> {
    file.rewind().with_context(|| format!("cannot read {name}"))?;
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let mut line = Vec::new();
    let mut records = 0;
    let mut len = 0;
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line).with_context(|| format!("cannot read {name}"))?;
        if !line.ends_with(b"\n") {
            let torn = line.starts_with(BEGINNING)
                || BEGINNING.starts_with(&line)
                // Some file systems leave zeros after a write that a power failure interrupted.
                || line.iter().all(|byte| *byte == 0);
            return if torn { Ok(len) } else { not_ours(name, records + 1, "no such record") };
        }
        match serde_json::from_slice(&line) {
            Ok(header) => note(header, len),
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
