//! `xtask eplb plot`: plots of a replay (SVG).

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use clap::Args;
use plotters::prelude::SeriesLabelPosition;

use super::replay::{Outcome, ReplayOptions, replay};
use crate::plot::charts::{self, Frame, Series};
use crate::plot::heatmap::{self, Bar, Grid};

/// What to plot.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    replay: ReplayOptions,
    /// Layer of the expert heat map.
    #[arg(long, default_value_t = 0)]
    layer: usize,
    /// Folder for the pictures.
    #[arg(long)]
    out: PathBuf,
}

/// Replays a trace and plots the outcome.
pub fn run(options: &Options) -> Result<()> {
    std::fs::create_dir_all(&options.out)?;
    pictures(&replay(&options.replay)?, options.layer, &options.out)
}

/// Plots a replay, with the expert heat map of `layer`.
pub fn pictures(outcome: &Outcome, layer: usize, out: &Path) -> Result<()> {
    let layers = outcome.loads.layers();
    ensure!(layer < layers, "--layer {layer}: expected less than {layers}, the MoE layers of the trace");
    over_time(outcome, &out.join("par_over_time.svg"))?;
    expert_heat(outcome, layer, &out.join("expert_heat.svg"))?;
    before_after(outcome, &out.join("before_after.svg"))?;
    moves(outcome, &out.join("moves.svg"))
}

fn over_time(outcome: &Outcome, path: &Path) -> Result<()> {
    let line = |values: &[f64]| values.iter().enumerate().map(|(i, &v)| (i as f64, v)).collect::<Vec<_>>();
    let moves = outcome.events.iter().map(|e| (e.0 as f64, outcome.par[e.0])).collect();
    charts::draw(
        path,
        Frame {
            title: "Balance over time",
            x: "step",
            y: "peak / mean device load (mean over layers)",
            legend: SeriesLabelPosition::MiddleRight,
        },
        &[
            Series::line("placement never changed", line(&outcome.par_static)),
            Series::line("rebalanced", line(&outcome.par)),
            Series::points("layers moved after this step", moves),
        ],
    )
}

/// The number of experts that move to another device after each step. No file is written if none moves.
fn moves(outcome: &Outcome, path: &Path) -> Result<()> {
    if outcome.events.is_empty() {
        return Ok(());
    }
    let mut moved = vec![0.0; outcome.par.len()];
    outcome.events.iter().for_each(|&(step, _, transfers, _)| moved[step] += transfers as f64);
    let values = moved.into_iter().enumerate().map(|(step, count)| (step as f64, count)).collect();
    charts::draw(
        path,
        Frame {
            title: "Moves",
            x: "step",
            y: "experts that come to another device, all layers",
            legend: SeriesLabelPosition::UpperRight,
        },
        &[Series::line("experts moved after this step", values)],
    )
}

/// Experts (hottest first) against steps.
fn expert_heat(outcome: &Outcome, layer: usize, path: &Path) -> Result<()> {
    let experts = outcome.loads.experts();
    let rows: Vec<&[f64]> = outcome.loads.layer(layer).chunks(experts).collect();
    let total = |e: usize| rows.iter().map(|r| r[e]).sum::<f64>();
    let mut order: Vec<usize> = (0..experts).collect();
    order.sort_by(|&a, &b| total(b).total_cmp(&total(a)).then(a.cmp(&b)));
    let mean = (0..experts).map(total).sum::<f64>() / (experts * rows.len()) as f64;
    let cell = |x: usize, y: usize| rows[x][order[y]] / mean.max(f64::MIN_POSITIVE);
    let title = format!("Load of each expert over the mean expert, layer {layer}");
    heatmap::draw(
        path,
        ("step", "expert, hottest first"),
        &[Grid { title, width: rows.len(), height: experts, cell: &cell }],
        // Values above four times the mean have the same colour.
        &Bar { range: (0.0, 4.0), label: &decimal },
    )
}

/// Device loads of every layer on the last steps, with the first and with the last placement.
fn before_after(outcome: &Outcome, path: &Path) -> Result<()> {
    let devices = outcome.topology.devices();
    let layers = outcome.loads.layers();
    let k = outcome.topology.slots_per_device();
    let steps = outcome.loads.steps();
    let experts = outcome.loads.experts();
    let loads_of = |placement: &moe_eplb::Placement| -> Vec<f64> {
        let mut grid = Vec::new();
        for layer in 0..layers {
            let mut sum = vec![0.0; experts];
            for row in outcome.loads.layer(layer).chunks(experts).skip(steps - steps.min(8)) {
                sum.iter_mut().zip(row).for_each(|(s, v)| *s += v);
            }
            let slots = placement.layer(layer);
            let mut copies = vec![0.0; experts];
            slots.iter().for_each(|&e| copies[e as usize] += 1.0);
            let mean = sum.iter().sum::<f64>() / devices as f64;
            let load = |row: &[u32]| row.iter().map(|&e| sum[e as usize] / copies[e as usize]).sum::<f64>();
            grid.extend(slots.chunks(k).map(|row| load(row) / mean.max(f64::MIN_POSITIVE)));
        }
        grid
    };
    let before = loads_of(&outcome.first);
    let after = loads_of(&outcome.last);
    let at = |grid: &[f64], x: usize, y: usize| grid[y * devices + x];
    heatmap::draw(
        path,
        ("device", "layer"),
        &[
            Grid { title: "before".into(), width: devices, height: layers, cell: &|x, y| at(&before, x, y) },
            Grid { title: "after".into(), width: devices, height: layers, cell: &|x, y| at(&after, x, y) },
        ],
        &Bar { range: (0.0, 2.0), label: &decimal },
    )
}

fn decimal(value: &f64) -> String {
    format!("{value:.1}")
}
