//! `xtask eplb bench`: solve on `profile`, judge there and on `heldout`, solve again on `drift`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use moe_eplb::stats::forecast;
use moe_eplb::{Loads, Objective, Placement, par};
use serde_json::{Value, json};

use super::baseline;
use super::policy::{PolicyOptions, objective_name};
use super::small;
use super::table::{mean, percentile};
use super::timing::timed;
use super::workload::{self, Workload};

/// What to benchmark.
#[derive(Args)]
pub struct Options {
    /// Folder of workload files.
    #[arg(long, required_unless_present = "small")]
    workloads: Option<PathBuf>,
    /// Also solve this file of small cases and compare with their proven optima.
    #[arg(long)]
    small: Option<PathBuf>,
    /// Only workloads whose name contains this; repeatable.
    #[arg(long)]
    only: Vec<String>,
    #[command(flatten)]
    policy: PolicyOptions,
    /// Solve on the forecast of the next window instead of the window itself.
    #[arg(long)]
    forecast: bool,
    /// Solve this often and report the fastest run (processor time of the one thread).
    #[arg(long, default_value_t = 3)]
    repeat: usize,
    /// Compare with these figures of another planner (tests/bench/eplb/flashlb_head.json).
    #[arg(long)]
    baseline: Option<PathBuf>,
    /// Write the rows here as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Runs the bench, prints a table and writes the rows.
pub fn run(options: &Options) -> Result<()> {
    let mut rows = Vec::new();
    if let Some(dir) = &options.workloads {
        println!(
            "{:24} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7} {:>9}",
            "workload", "par", "p99", "episode", "heldout", "drift", "moved", "ms"
        );
        for path in workload::files(dir, &options.only)? {
            let workload = workload::read(&path)?;
            for &price in &options.policy.move_price {
                let row = bench_one(&workload, price, options)?;
                print_row(&row);
                rows.push(row);
            }
        }
    }
    if let Some(file) = &options.baseline {
        baseline::compare(&rows, file)?;
    }
    if let Some(file) = &options.small {
        let policy = options.policy.build()?;
        rows.extend(small::run(file, policy.as_ref(), options.policy.effort, options.repeat)?);
    }
    if let Some(out) = &options.json {
        std::fs::write(out, serde_json::to_string_pretty(&rows)?)?;
    }
    Ok(())
}

fn bench_one(workload: &Workload, move_price: f64, options: &Options) -> Result<Value> {
    let policy = options.policy.build_at(move_price)?;
    // Only the incremental policy needs to know where the experts are before the first plan.
    let initial = Placement::initial(&workload.topology, workload.profile.layers())?;
    let start = (policy.name() == "swift").then_some(&initial);
    let seen = if options.forecast { forecast(&workload.profile)? } else { workload.profile.clone() };
    let (plan, timing) = timed(options.repeat, || policy.plan(&workload.topology, &seen, start))?;
    let placement = &plan.placement;
    let aggregate = par(&workload.profile, placement, Objective::Aggregate)?;
    let episode =
        |loads: &Loads, placement| par(loads, placement, Objective::Episode).map(|pars| mean(&pars));
    let bounds: Vec<f64> = plan.certificates.iter().map(|c| c.lower_bound).collect();
    let mut row = json!({
        "workload": workload.name,
        "policy": policy.name(),
        "objective": objective_name(policy.objective()),
        "effort": options.policy.effort,
        "move_price": move_price,
        "layers": workload.profile.layers(),
        "experts": workload.topology.experts(),
        "devices": workload.topology.devices(),
        "slots": workload.topology.slots(),
        "par_mean": mean(&aggregate),
        "par_p99": percentile(&aggregate, 99.0),
        "par_episode_mean": episode(&workload.profile, placement)?,
        "heldout_par_episode_mean": workload.heldout.as_ref().map(|l| episode(l, placement)).transpose()?,
        "lower_bound_mean": mean(&bounds),
        "drift_par_episode_mean": null,
        "moved_fraction": null,
        "solve_ms": timing.solve_ms,
        "solve_wall_ms": timing.wall_ms,
        "optimal": plan.certificates.iter().all(|c| c.is_optimal()),
    });
    if let Some(drift) = &workload.drift {
        let (again, resolve) =
            timed(options.repeat, || policy.plan(&workload.topology, drift, Some(placement)))?;
        let moved = again.placement.moved_from(placement)?;
        row["drift_par_episode_mean"] = json!(episode(drift, &again.placement)?);
        row["drift_par_mean"] = json!(mean(&par(drift, &again.placement, Objective::Aggregate)?));
        row["drift_stale_par_episode_mean"] = json!(episode(drift, placement)?);
        row["moved_fraction"] = json!(moved as f64 / placement.phy2log().len() as f64);
        row["resolve_ms"] = json!(resolve.solve_ms);
    }
    Ok(row)
}

fn print_row(row: &Value) {
    let number = |key: &str| row[key].as_f64().map_or_else(|| "-".to_owned(), |v| format!("{v:.4}"));
    println!(
        "{:24} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7} {:>9.2}{}",
        row["workload"].as_str().unwrap_or_default(),
        number("par_mean"),
        number("par_p99"),
        number("par_episode_mean"),
        number("heldout_par_episode_mean"),
        number("drift_par_episode_mean"),
        number("moved_fraction"),
        row["solve_ms"].as_f64().unwrap_or_default(),
        if row["optimal"] == true { "  optimal" } else { "" },
    );
}
