//! The records of an output: how one is written, and what a later run reads of it, which is what it is known by.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde::de::IgnoredAny;

/// How every record begins; tells a torn record from a file that is not ours.
const BEGINNING: &[u8] = br#"{"id":""#;

/// What a record of an earlier run is known by.
#[derive(Deserialize)]
pub struct Header {
    /// Its `id`.
    pub id: String,
    /// The line's `custom_id`, where it has one.
    pub custom_id: Option<String>,
    /// What answered it.
    #[serde(default)]
    pub response: Response,
    /// There is one: it is an error.
    #[serde(default)]
    pub error: Option<IgnoredAny>,
}

/// The part of a record that HTTP would answer.
#[derive(Default, Deserialize)]
pub struct Response {
    /// Ends with the fingerprint of what was asked for.
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
    /// Tokens of its prompts and answers.
    pub fn total_tokens(&self) -> usize {
        self.response.body.as_ref().map_or(0, |body| body.usage.total_tokens)
    }
}

/// Copies the lines of records that are wanted.
pub fn copy(
    mut from: impl BufRead,
    to: &mut impl Write,
    wanted: impl Fn(u64, &Header) -> bool,
) -> io::Result<()> {
    let mut line = Vec::new();
    let mut number = 0;
    while from.read_until(b'\n', &mut line)? > 0 {
        if wanted(number, &serde_json::from_slice(&line)?) {
            to.write_all(&line)?;
        }
        line.clear();
        number += 1;
    }
    Ok(())
}

/// Writes a record and its newline part by part: it may be larger than the memory. The bytes that it came to.
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

/// Reads the records of a file; its length without a torn last line.
pub fn scan(file: &File, name: &str, mut note: impl FnMut(Header)) -> Result<u64> {
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
