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
        let fail = |reason: String| Error::Format { line: self.line, reason };
        let line: Line<HeatRecord> = serde_json::from_str(&self.text).map_err(|e| fail(e.to_string()))?;
        if line.v != VERSION {
            return Err(fail(format!("trace version {}; this reader knows version {VERSION}", line.v)));
        }
        Ok(line.record)
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
                Err(e) => return Some(Err(Error::Format { line: self.line, reason: e.to_string() })),
            }
        }
    }
}

/// All steps of a trace that `filter` admits as loads `[steps, layers, experts]`.
///
/// # Errors
/// If a line is malformed, a step misses or repeats a layer, or experts vary in number.
pub fn trace_loads<R: BufRead>(reader: TraceReader<R>, filter: StageFilter) -> Result<Loads> {
    let mut records: Vec<HeatRecord> = Vec::new();
    for record in reader {
        let record = record?;
        if filter.admits(record.stage) {
            records.push(record);
        }
    }
    // A stable sort: repeated lines stay visible below.
    records.sort_by_key(|r| (r.step, r.layer));
    let experts = records.first().ok_or(Error::Empty("recorded steps"))?.counts.len();
    let layers = records.iter().map(|r| r.layer).max().unwrap_or(0) + 1;
    let mut values = Vec::with_capacity(records.len() * experts);
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
