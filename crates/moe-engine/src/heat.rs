//! `--expert-heat F`: the tokens of every expert, step by step, as a heat trace (version 1, JSON
//! lines). `cargo xtask plot heat` shows one, `cargo xtask eplb` plans expert placements from it.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use moe_eplb::json::{HeatRecord, TraceWriter};
use moe_layer::ExpertHeat;

use crate::error::{Context, Result, ensure};

pub use moe_eplb::heat::Stage;

/// Appends steps to a heat trace.
pub struct HeatWriter {
    path: PathBuf,
    out: BufWriter<File>,
}

impl HeatWriter {
    /// Creates the file, or empties it: two runs in one trace would have the same step numbers.
    pub fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).with_context(|| describe(path))?;
        Ok(Self { path: path.to_path_buf(), out: BufWriter::new(file) })
    }

    /// Appends the expert counts of one step, one line per MoE layer, and flushes them, so that a killed program leaves
    /// whole steps. `step` must count up. A step with any prompt token is [`Stage::Prefill`], even if other sequences
    /// decode in it.
    ///
    /// # Errors
    /// If the model has no experts, or the file cannot be written.
    pub fn write(&mut self, step: u64, stage: Stage, heat: &ExpertHeat) -> Result<()> {
        ensure!(heat.layers() > 0, "there is no expert heat to write: the model has no routed experts");
        self.append(step, stage, heat).with_context(|| describe(&self.path))
    }

    fn append(&mut self, step: u64, stage: Stage, heat: &ExpertHeat) -> io::Result<()> {
        let mut trace = TraceWriter::new(&mut self.out);
        for layer in 0..heat.layers() {
            trace.write(&HeatRecord { step, stage, layer, counts: heat.layer(layer).to_vec() })?;
        }
        self.out.flush()
    }
}

fn describe(path: &Path) -> String {
    format!("cannot write the heat trace {}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use moe_eplb::heat::StageFilter;
    use moe_eplb::json::{TraceReader, trace_loads};

    fn heat(ids: [&[u32]; 2]) -> ExpertHeat {
        let mut heat = ExpertHeat::new(2, 4);
        ids.iter().enumerate().for_each(|(layer, ids)| heat.record(layer, ids));
        heat
    }

    #[test]
    fn what_is_written_is_what_a_planner_reads() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "an older trace").unwrap();
        let mut writer = HeatWriter::create(file.path()).unwrap();
        writer.write(7, Stage::Prefill, &heat([&[0, 1, 1, 3], &[2, 2, 2, 2]])).unwrap();
        // Whole steps are in the file while the run goes on.
        let read = || TraceReader::new(io::BufReader::new(File::open(file.path()).unwrap()));
        let first: Vec<HeatRecord> = read().map(|record| record.unwrap()).collect();
        let record = |layer, counts: &[u64]| HeatRecord {
            step: 7,
            stage: Stage::Prefill,
            layer,
            counts: counts.into(),
        };
        assert_eq!(first, [record(0, &[1, 2, 0, 1]), record(1, &[0, 0, 4, 0])]);
        writer.write(8, Stage::Decode, &heat([&[3, 3], &[0, 1]])).unwrap();
        let loads = trace_loads(read(), StageFilter::Decode).unwrap();
        assert_eq!((loads.steps(), loads.layers(), loads.experts()), (1, 2, 4));
        assert_eq!((loads.layer(0), loads.layer(1)), (&[0., 0., 0., 2.][..], &[1., 1., 0., 0.][..]));
        let text = std::fs::read_to_string(file.path()).unwrap();
        assert_eq!(
            text.lines().last().unwrap(),
            r#"{"v":1,"step":8,"stage":"decode","layer":1,"counts":[1,1,0,0]}"#
        );
    }

    #[test]
    fn errors_name_the_file() {
        let error = HeatWriter::create(Path::new("/no/such/folder/heat.jsonl")).err().unwrap().to_string();
        assert!(error.contains("cannot write the heat trace /no/such/folder/heat.jsonl"), "{error}");
        let file = tempfile::NamedTempFile::new().unwrap();
        let dense = HeatWriter::create(file.path()).unwrap().write(0, Stage::Decode, &ExpertHeat::new(0, 0));
        assert!(dense.unwrap_err().to_string().contains("no routed experts"));
        if cfg!(target_os = "linux") {
            let mut writer = HeatWriter::create(Path::new("/dev/full")).unwrap();
            let error = format!("{:#}", writer.write(0, Stage::Decode, &heat([&[0], &[1]])).unwrap_err());
            assert!(error.contains("/dev/full") && error.contains("No space left"), "{error}");
        }
    }
}
