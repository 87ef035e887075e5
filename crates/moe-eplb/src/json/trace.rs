//! Heat traces, version 1: one JSON object per line and layer, `{v, step, stage, layer, counts}`.
//!
//! Lines come in the order of the steps, so a trace can be written and read as a stream. A reader
//! refuses versions it does not know.

use std::io::{BufRead, Write};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, expect_len};
use crate::heat::{Stage, StageFilter};
use crate::loads::Loads;

/// Version of the format that this crate writes.
const VERSION: u32 = 1;

/// Tokens per logical expert of one layer in one step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeatRecord {
    /// Engine step.
    pub step: u64,
    /// What the step was doing.
    pub stage: Stage,
    /// MoE layer, counted from 0.
    pub layer: usize,
    /// Tokens of every expert.
    pub counts: Vec<u64>,
}

#[derive(Serialize, Deserialize)]
struct Line<R> {
    v: u32,
    #[serde(flatten)]
    record: R,
}

/// Writes a trace.
pub struct TraceWriter<W> {
    out: W,
}

impl<W: Write> TraceWriter<W> {
    /// Writes to `out`; wrap files in a `BufWriter`.
    pub fn new(out: W) -> Self {
        Self { out }
    }

    /// Appends one line.
    ///
    /// # Errors
    /// If the output fails.
    pub fn write(&mut self, record: &HeatRecord) -> std::io::Result<()> {
        serde_json::to_writer(&mut self.out, &Line { v: VERSION, record })?;
        self.out.write_all(b"\n")
    }
}

/// Reads a trace record by record; empty lines are skipped.
pub struct TraceReader<R> {
    input: R,
    line: usize,
    text: String,
}

impl<R: BufRead> TraceReader<R> {
    /// Reads from `input`.
    pub fn new(input: R) -> Self {
        Self { input, line: 0, text: String::new() }
    }

    fn parse(&self) -> Result<HeatRecord> {
        let line: Line<HeatRecord> =
            serde_json::from_str(&self.text).map_err(|e| self.error(e.to_string()))?;
        if line.v != VERSION {
            let reason = format!("trace version {}; this reader knows version {VERSION}", line.v);
            return Err(self.error(reason));
        }
        Ok(line.record)
    }

    /// An error of the line that was read last.
    fn error(&self, reason: String) -> Error {
        Error::Format { line: self.line, reason }
    }
}

impl<R: BufRead> Iterator for TraceReader<R> {
    type Item = Result<HeatRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            self.text.clear();
            self.line += 1;
            match self.input.read_line(&mut self.text) {
                Ok(0) => return None,
                Ok(_) if self.text.trim().is_empty() => {}
                Ok(_) => return Some(self.parse()),
                Err(e) => return Some(Err(self.error(e.to_string()))),
            }
        }
    }
}

/// All steps of a trace that `filter` admits as loads `[steps, layers, experts]`.
///
/// # Errors
/// If a line is malformed, a step misses or repeats a layer, or experts vary in number.
pub fn trace_loads<R: BufRead>(mut reader: TraceReader<R>, filter: StageFilter) -> Result<Loads> {
    let mut records = Vec::<HeatRecord>::new();
    let mut layers = 0;
    while let Some(record) = reader.next() {
        let record = record?;
        if filter.admits(record.stage) {
            let needed = record.layer.checked_add(1).ok_or_else(|| {
                reader.error(format!("layer {}: expected at most {}", record.layer, usize::MAX - 1))
            })?;
            layers = layers.max(needed);
            records.push(record);
        }
    }
    // A stable sort: repeated lines stay visible below.
    records.sort_by_key(|r| (r.step, r.layer));
    let experts = records.first().ok_or(Error::Empty("recorded steps"))?.counts.len();
    // The memory is sized by the entries that the lines have, not by the number of lines times the first line's
    // experts. A trace whose lines differ is refused below, and must not ask for more memory than its own length.
    let mut values = Vec::with_capacity(records.iter().map(|r| r.counts.len()).sum());
    for (i, record) in records.iter().enumerate() {
        let first = i / layers * layers;
        let repeats = first > 0 && record.step == records[first - 1].step;
        if record.layer != i % layers || record.step != records[first].step || repeats {
            let reason = format!("step {} does not hold each of {layers} layers once", record.step);
            return Err(Error::Format { line: 0, reason });
        }
        expect_len("counts", experts, record.counts.len())?;
        values.extend(record.counts.iter().map(|&c| c as f64));
    }
    if !records.len().is_multiple_of(layers) {
        return Err(Error::Format { line: 0, reason: "the last step misses layers".into() });
    }
    Loads::episodes(records.len() / layers, layers, experts, &values)
}
