//! `xtask eplb what-if`: the balance of a recorded run with other numbers of devices and copies.
//!
//! A placement is planned from the first part of a trace and judged on the steps after it, each by its own peak. It is
//! compared with the usual initial placement, which uses no loads. So the figures describe a run that moves its experts
//! once.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Args;
use moe_eplb::{Loads, Objective, Placement, Topology, layer_par};
use serde_json::json;

use super::input::window;
use super::policy::PolicyOptions;
use super::table::mean;
use crate::trace;

/// What to ask.
#[derive(Args)]
pub struct Options {
    /// Heat trace of a run (`--expert-heat`).
    #[arg(long)]
    trace: PathBuf,
    /// Steps of the trace to use: all, prefill or decode.
    #[arg(long, default_value = "all")]
    stage: String,
    /// Numbers of devices.
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4, 8])]
    devices: Vec<usize>,
    /// Numbers of redundant experts, all devices together.
    #[arg(long, value_delimiter = ',', default_values_t = [0, 8, 16])]
    redundant: Vec<usize>,
    /// Share of the steps from which the plan is made; the other steps judge it.
    #[arg(long, default_value_t = 0.5)]
    share: f64,
    #[command(flatten)]
    policy: PolicyOptions,
    /// Write the rows here as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// One combination.
#[derive(Debug, PartialEq)]
struct Row {
    devices: usize,
    redundant: usize,
    /// Mean over steps and layers of peak over mean device load, with the initial placement and with the plan.
    par_start: f64,
    par_planned: f64,
    /// Number of experts that move to another device.
    moved: usize,
}

/// Computes the combinations and prints them.
pub fn run(options: &Options) -> Result<()> {
    let loads = trace::read(&options.trace, &options.stage)?;
    let rows = rows(&loads, options)?;
    println!("devices  redundant  slots each  PAR at the start  planned  experts moved");
    for row in &rows {
        let each = (loads.experts() + row.redundant) / row.devices;
        println!(
            "{:7}  {:9}  {each:10}  {:16.3}  {:7.3}  {:13}",
            row.devices, row.redundant, row.par_start, row.par_planned, row.moved
        );
    }
    if let Some(path) = &options.json {
        let all: Vec<_> = rows
            .iter()
            .map(|r| json!({"devices": r.devices, "redundant": r.redundant, "par_start": r.par_start, "par_planned": r.par_planned, "moved": r.moved}))
            .collect();
        std::fs::write(path, serde_json::to_string_pretty(&all)?)?;
    }
    Ok(())
}

/// The combinations in which the slots divide evenly over the devices and no device holds an expert twice.
fn rows(loads: &Loads, options: &Options) -> Result<Vec<Row>> {
    ensure!((0.0..1.0).contains(&options.share), "--share {}: expected 0 to below 1", options.share);
    let known = ((loads.steps() as f64 * options.share) as usize).max(1);
    ensure!(known < loads.steps(), "the trace has {} steps; at least two are needed", loads.steps());
    let past = window(loads, 0..known, 16)?;
    let future = known..loads.steps();
    let steps = future.clone().map(|step| window(loads, step..step + 1, 1)).collect::<Result<Vec<_>>>()?;
    let policy = options.policy.build()?;
    let mut rows = Vec::new();
    for &devices in &options.devices {
        for &redundant in &options.redundant {
            let slots = loads.experts() + redundant;
            if devices == 0 || !slots.is_multiple_of(devices) || slots / devices > loads.experts() {
                eprintln!(
                    "{devices} devices, {redundant} redundant: slots that do not divide, or an expert twice on a device"
                );
                continue;
            }
            let topology = Topology::new(loads.experts(), slots, devices)?;
            let start = Placement::initial(&topology, loads.layers())?;
            let plan = policy.plan(&topology, &past, Some(&start))?.placement;
            let judged = |placement: &Placement| judge(&steps, placement, &topology);
            let par_start = judged(&start)?;
            let par_planned = judged(&plan)?;
            rows.push(Row { devices, redundant, par_start, par_planned, moved: plan.moved_from(&start)? });
        }
    }
    Ok(rows)
}

/// Mean over steps and layers.
fn judge(steps: &[Loads], placement: &Placement, topology: &Topology) -> Result<f64> {
    let par = |(step, layer): (&Loads, usize)| {
        let experts = topology.experts();
        let devices = topology.devices();
        layer_par(step.layer(layer), placement.layer(layer), experts, devices, Objective::Episode)
    };
    let all = steps.iter().flat_map(|step| (0..step.layers()).map(move |layer| (step, layer)));
    Ok(mean(&all.map(par).collect::<std::result::Result<Vec<_>, _>>()?))
}

#[cfg(test)]
mod tests {
    use super::super::parsed;
    use super::*;

    #[test]
    fn a_skewed_run_is_balanced_by_places_and_by_copies() {
        // Experts 0 and 1 have high loads and share a device at the start. There are 2 devices and 4 experts.
        let step = [80., 80., 10., 30.];
        let loads = Loads::episodes(6, 1, 4, &step.repeat(6)).unwrap();
        let args = ["--trace", "t", "--devices", "2,3", "--redundant", "0,2"];
        let rows = rows(&loads, &parsed(&args)).unwrap();
        let found: Vec<_> = rows.iter().map(|row| (row.devices, row.redundant)).collect();
        // Four experts do not divide over three devices.
        assert_eq!(found, [(2, 0), (2, 2), (3, 2)]);
        let near = |got: f64, want: f64| assert!((got - want).abs() < 1e-9, "{got}, expected {want}");
        near(rows[0].par_start, 1.6);
        near(rows[0].par_planned, 1.1);
        assert_eq!(rows[0].moved, 2);
        // Copies make nothing worse.
        assert!(rows[1].par_planned < 1.1 + 1e-9 && rows[2].par_planned <= rows[2].par_start);
        let none = Options { share: 1.0, ..parsed(&args) };
        assert!(super::rows(&loads, &none).unwrap_err().to_string().contains("--share 1"));
    }
}
