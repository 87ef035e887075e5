//! Metrics of a run for the program that started it: a line of JSON from time to time, and one at the end.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use moe_engine::engine::Stats;
use serde_json::{Value, json};
use tracing::warn;

use super::progress::Progress;
use crate::cli::BatchArgs;
use crate::error::usage;

/// The version of the fields.
const VERSION: u32 = 1;

/// The file of the metrics.
pub struct Metrics {
    file: File,
    every: Duration,
    /// When a line is due.
    due: Instant,
}

impl Metrics {
    /// Opens the file that the flags name; lines are appended to it.
    ///
    /// # Errors
    /// It cannot be written, or it is the input or the output.
    pub fn open(args: &BatchArgs) -> Result<Option<Self>> {
        let Some(path) = &args.metrics else { return Ok(None) };
        let wrong = |what: String| usage(format!("--metrics {}: {what}", path.display()));
        let is = |other: &Path| {
            path.canonicalize().is_ok_and(|path| other.canonicalize().is_ok_and(|o| o == path))
        };
        for (other, what) in [(&args.input, "input"), (&args.output, "output")] {
            if is(other) {
                return Err(wrong(format!("it is the {what}; name another file")));
            }
        }
        let file = OpenOptions::new().append(true).create(true).open(path);
        let file = file.map_err(|e| wrong(format!("cannot open it for writing: {e}")))?;
        let every = args.progress_interval;
        Ok(Some(Self { file, every, due: Instant::now() + every }))
    }

    /// Whether it is time for a line.
    pub fn is_due(&self) -> bool {
        Instant::now() >= self.due
    }

    /// Appends a line by one write. A file that takes nothing is a warning: the answers are worth more.
    pub fn write(&mut self, state: &str, progress: &Progress, stats: &Stats) {
        self.due = Instant::now() + self.every;
        let line = line(state, progress, stats).to_string() + "\n";
        if let Err(e) = self.file.write_all(line.as_bytes()) {
            warn!("cannot write a line of --metrics: {e}");
        }
    }
}

fn line(state: &str, progress: &Progress, stats: &Stats) -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    let mut line = json!({"v": VERSION, "time": now, "state": state});
    line.as_object_mut().into_iter().for_each(|line| line.extend(progress.counters()));
    line["cached_prompt_tokens"] = stats.cached_prompt_tokens.into();
    line["steps"] = stats.steps.into();
    line["preemptions"] = stats.preemptions.into();
    line["peak_kv_blocks"] = stats.peak_kv_blocks.into();
    line["kv_blocks"] = stats.kv_blocks.into();
    line
}

#[cfg(test)]
mod tests {
    use super::super::input::Total;
    use super::*;

    #[test]
    fn a_line_has_counters_of_lines_tokens_and_blocks() {
        let mut progress = Progress::new(Total::default(), Duration::from_secs(10));
        (progress.read, progress.answered, progress.errors) = (9, 5, 1);
        let stats = Stats { cached_prompt_tokens: 48, kv_blocks: 100, ..Stats::default() };
        let line = line("running", &progress, &stats);
        let some = ["v", "state", "read", "done", "errors", "cached_prompt_tokens", "kv_blocks", "cost"];
        let want =
            [json!(1), json!("running"), json!(9), json!(5), json!(1), json!(48), json!(100), Value::Null];
        assert_eq!(some.map(|name| line[name].clone()), want);
        assert!(line["time"].as_f64().unwrap() > 1.7e9 && !line.to_string().contains('\n'));
    }
}
