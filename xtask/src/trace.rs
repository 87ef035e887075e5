//! Heat traces (JSON lines `{v, step, stage, layer, counts}`) as loads.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, Result, bail};
use moe_eplb::Loads;
use moe_eplb::heat::StageFilter;
use moe_eplb::json::{TraceReader, trace_loads};

/// The loads `[steps, layers, experts]` of a trace's steps of a stage: all, prefill or decode.
pub fn read(path: &Path, stage: &str) -> Result<Loads> {
    let filter = match stage {
        "all" => StageFilter::All,
        "prefill" => StageFilter::Prefill,
        "decode" => StageFilter::Decode,
        other => bail!("unknown stage `{other}`; expected all, prefill or decode"),
    };
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let loads = trace_loads(TraceReader::new(BufReader::new(file)), filter);
    loads.with_context(|| format!("cannot use the {stage} steps of the trace {}", path.display()))
}
