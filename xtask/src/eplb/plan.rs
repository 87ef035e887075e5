//! `xtask eplb plan`: plans a placement from recorded heat and writes it with its maps.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use moe_eplb::json::{read_expert_map, write_expert_map};
use serde_json::json;

use super::input::{InputOptions, window};
use super::policy::{PolicyOptions, objective_name};

/// What to plan.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    input: InputOptions,
    #[command(flatten)]
    policy: PolicyOptions,
    /// Episodes that the steps are summed to.
    #[arg(long, default_value_t = 16)]
    episodes: usize,
    /// Threads.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// The current placement, as an expert map.
    #[arg(long)]
    current: Option<PathBuf>,
    /// Write the placement here as an expert map (vllm-ascend's format).
    #[arg(long)]
    out: PathBuf,
    /// Write phy2log, log2phy, logcnt and the certificates here.
    #[arg(long)]
    maps: Option<PathBuf>,
}

/// Plans and writes the files.
pub fn run(options: &Options) -> Result<()> {
    let (topology, loads) = options.input.read()?;
    let loads = window(&loads, 0..loads.steps(), options.episodes)?;
    let current = match &options.current {
        Some(path) => {
            let map = serde_json::from_slice(&std::fs::read(path)?)?;
            Some(read_expert_map(&map, topology.experts())?.1)
        }
        None => None,
    };
    let policy = options.policy.build()?;
    let plan = policy.plan_on(&topology, &loads, current.as_ref(), options.threads)?;
    let name = policy.name();
    plan.placement.check().with_context(|| format!("--policy {name} gave a map that no run can load"))?;
    std::fs::write(&options.out, serde_json::to_string(&write_expert_map(&plan.placement))?)?;
    if let Some(path) = &options.maps {
        let (log2phy, width) = plan.placement.log2phy();
        let certificates: Vec<_> = plan
            .certificates
            .iter()
            .map(|c| json!({"par": c.par, "lower_bound": c.lower_bound, "gap": c.gap(), "optimal": c.is_optimal(), "steps": c.steps}))
            .collect();
        let rows = |flat: &[u32], size: usize| flat.chunks(size).map(<[u32]>::to_vec).collect::<Vec<_>>();
        let log2phy: Vec<Vec<&[i32]>> =
            log2phy.chunks(topology.experts() * width).map(|layer| layer.chunks(width).collect()).collect();
        let maps = json!({
            "phy2log": rows(plan.placement.phy2log(), topology.slots()),
            "log2phy": log2phy,
            "logcnt": rows(&plan.placement.logcnt(), topology.experts()),
            "certificates": certificates,
        });
        std::fs::write(path, serde_json::to_string(&maps)?)?;
    }
    let bound = plan.certificates.iter().map(|c| c.lower_bound).sum::<f64>();
    println!(
        "{} layers by the {} objective: mean PAR {:.4}, lower bound {:.4}, {} proven optimal",
        plan.certificates.len(),
        objective_name(policy.objective()),
        plan.mean_par(),
        bound / plan.certificates.len().max(1) as f64,
        plan.certificates.iter().filter(|c| c.is_optimal()).count(),
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::parsed;
    use super::*;

    /// The trace has an expert of which the published algorithm puts two copies on one device.
    #[test]
    fn every_policy_writes_a_map_that_can_be_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let trace = dir.path().join("trace.jsonl");
        let out = dir.path().join("map.json");
        let row = |step: usize, counts: &str| {
            format!("{{\"v\":1,\"step\":{step},\"stage\":\"decode\",\"layer\":0,\"counts\":{counts}}}\n")
        };
        let rows = row(0, "[900,1,1,1,1,1,1,1]") + &row(1, "[100,100,100,100,100,100,100,100]");
        std::fs::write(&trace, rows).unwrap();
        for policy in ["joint", "flashlb", "swift", "deepseek", "deepseek-global"] {
            let args = ["--trace", trace.to_str().unwrap(), "--out", out.to_str().unwrap()];
            let sizes = ["--slots", "12", "--devices", "4", "--policy", policy];
            run(&parsed(&[&args[..], &sizes].concat())).unwrap();
            let map = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
            let (_, placement) = read_expert_map(&map, 8).unwrap();
            placement.check().unwrap_or_else(|e| panic!("{policy}: {e}"));
        }
    }
}
