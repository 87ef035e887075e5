//! `xtask eplb`: benchmark, plan, record, replay and plot expert placements with moe-eplb.

mod baseline;
mod bench;
mod input;
mod plan;
mod plot;
mod policy;
mod record;
mod replay;
mod scale;
mod small;
mod table;
mod timing;
mod what_if;
mod workload;

use anyhow::Result;
use clap::Subcommand;

/// The tasks around expert placement.
#[derive(Subcommand)]
pub enum Command {
    /// Solve workload files and judge the placements.
    Bench(bench::Options),
    /// Heat trace in, placement and maps out.
    Plan(plan::Options),
    /// How planning time grows with the model.
    Scale(scale::Options),
    /// Run a model with its expert heat recorded; replay that, and draw it.
    Record(record::Options),
    /// What a policy would have done on a trace: balance, bytes moved, stalls.
    Replay(replay::Options),
    /// What other numbers of devices and copies would do for a recorded run.
    WhatIf(what_if::Options),
    /// Draw PAR over time, heat maps, before and after, moves per step, cost.
    Plot(plot::Options),
}

/// Runs one task.
pub fn run(command: &Command) -> Result<()> {
    match command {
        Command::Bench(options) => bench::run(options),
        Command::Plan(options) => plan::run(options),
        Command::Scale(options) => scale::run(options),
        Command::Record(options) => record::run(options),
        Command::Replay(options) => replay::run(options),
        Command::WhatIf(options) => what_if::run(options),
        Command::Plot(options) => plot::run(options),
    }
}
