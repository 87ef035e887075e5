//! `xtask eplb scale`: measures how planning time grows with the model, at equal shape per device.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use moe_eplb::policy::{Joint, Policy};
use moe_eplb::{Loads, Objective, Topology};
use serde_json::json;

use super::policy::objective_name;
use super::timing::timed;

/// What to sweep.
#[derive(Args)]
pub struct Options {
    /// Largest number of experts; halved down to 32.
    #[arg(long, default_value_t = 1024)]
    experts: usize,
    /// Layers.
    #[arg(long, default_value_t = 8)]
    layers: usize,
    /// Search steps per slot.
    #[arg(long, default_value_t = Joint::DEFAULT_EFFORT)]
    effort: u32,
    /// Solve this often and report the fastest run.
    #[arg(long, default_value_t = 9)]
    repeat: usize,
    /// Write the rows here; `plot --scaling` plots them.
    #[arg(long)]
    json: PathBuf,
}

/// Eight experts and one redundant slot per device, as large deployments have.
const EXPERTS_PER_DEVICE: usize = 8;
const EPISODES: usize = 16;

/// Runs the sweep.
pub fn run(options: &Options) -> Result<()> {
    let mut rows = Vec::new();
    for objective in [Objective::Aggregate, Objective::Episode] {
        let policy = Joint { objective, effort: options.effort, ..Joint::default() };
        let mut experts = options.experts;
        while experts >= 32 {
            let devices = experts / EXPERTS_PER_DEVICE;
            let topology = Topology::new(experts, experts + devices, devices)?;
            let loads = popular(options.layers, experts)?;
            let (_, timing) = timed(options.repeat, || policy.plan(&topology, &loads, None))?;
            let per_expert = timing.solve_ms * 1e3 / (experts * options.layers) as f64;
            println!(
                "{experts:5} experts, {}: {:8.2} ms, {per_expert:.2} us per expert and layer",
                objective_name(objective),
                timing.solve_ms
            );
            rows.push(json!({
                "workload": "scale/popularity by rank",
                "objective": objective_name(objective),
                "effort": options.effort,
                "experts": experts,
                "layers": options.layers,
                "devices": devices,
                "solve_ms": timing.solve_ms,
            }));
            experts /= 2;
        }
    }
    std::fs::write(&options.json, serde_json::to_string_pretty(&rows)?)?;
    Ok(())
}

/// Loads that fall with the rank of an expert, shuffled, with noise of a third over the episodes.
fn popular(layers: usize, experts: usize) -> Result<Loads> {
    let mut state = 1u64;
    let mut random = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as usize) % n
    };
    let mut values = vec![0.0; EPISODES * layers * experts];
    for layer in 0..layers {
        let mut rank: Vec<usize> = (0..experts).collect();
        (1..experts).rev().for_each(|i| rank.swap(i, random(i + 1)));
        for episode in 0..EPISODES {
            for (e, r) in rank.iter().enumerate() {
                let noise = 1.0 + (random(1000) as f64 - 500.0) / 1500.0;
                // The curve is so flat that no expert has more load than its copies can carry.
                values[(episode * layers + layer) * experts + e] = noise * 1e5 / (8.0 + *r as f64);
            }
        }
    }
    Ok(Loads::episodes(EPISODES, layers, experts, &values)?)
}
