//! Where recorded heat comes from: a trace, or a workload file read as one.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use moe_eplb::{Loads, Topology};

use super::workload;
use crate::trace;

/// Recorded heat and the machine it is for.
#[derive(Args, Clone, Debug)]
pub struct InputOptions {
    /// Heat trace (JSON lines `{v, step, stage, layer, counts}`).
    #[arg(long, conflicts_with = "workload", requires = "slots", requires = "devices")]
    trace: Option<PathBuf>,
    /// Workload file; each episode is a step.
    #[arg(long)]
    workload: Option<PathBuf>,
    /// Physical slots (experts plus redundant copies).
    #[arg(long)]
    slots: Option<usize>,
    /// Devices.
    #[arg(long)]
    devices: Option<usize>,
    /// Nodes that the devices are spread over.
    #[arg(long, default_value_t = 1)]
    nodes: usize,
    /// Steps of the trace to use: all, prefill or decode.
    #[arg(long, default_value = "all")]
    stage: String,
}

impl InputOptions {
    /// Whether any input was named.
    pub fn is_given(&self) -> bool {
        self.trace.is_some() || self.workload.is_some()
    }

    /// The same machine with this trace.
    pub fn of_trace(self, trace: PathBuf) -> Self {
        Self { trace: Some(trace), ..self }
    }

    /// The machine and the loads of all steps.
    pub fn read(&self) -> Result<(Topology, Loads)> {
        if let Some(path) = &self.workload {
            let workload = workload::read(path)?;
            return Ok((workload.topology, workload.all));
        }
        let (Some(path), Some(slots), Some(devices)) = (&self.trace, self.slots, self.devices) else {
            bail!("give --workload FILE, or --trace FILE with --slots and --devices");
        };
        let loads = trace::read(path, &self.stage)?;
        let topology = Topology::new(loads.experts(), slots, devices)?.with_nodes(self.nodes, 1)?;
        Ok((topology, loads))
    }
}

/// Steps `range` of `loads`, summed to at most `episodes` episodes.
pub fn window(loads: &Loads, range: std::ops::Range<usize>, episodes: usize) -> Result<Loads> {
    let layers = loads.layers();
    let experts = loads.experts();
    let steps = range.len();
    let episodes = episodes.min(steps);
    let mut values = vec![0.0; episodes * layers * experts];
    for (age, step) in range.enumerate() {
        let episode = age * episodes / steps;
        for layer in 0..layers {
            let row = &loads.layer(layer)[step * experts..][..experts];
            let sum = &mut values[(episode * layers + layer) * experts..][..experts];
            sum.iter_mut().zip(row).for_each(|(s, v)| *s += v);
        }
    }
    Ok(Loads::episodes(episodes, layers, experts, &values)?)
}
