//! `xtask eplb`: benchmark, plan, record, replay and plot expert placements with moe-eplb.

mod baseline;
mod bench;
mod input;
mod plan;
mod plot;
mod policy;
mod record;
mod replay;
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
    /// Plan a placement from a heat trace and write it with its maps.
    Plan(plan::Options),
    /// Run a model and record its expert heat, then replay and plot it.
    Record(record::Options),
    /// Show what a policy would have done on a trace: balance, bytes moved, stalls.
    Replay(replay::Options),
    /// Show the balance of a recorded run with other numbers of devices and copies.
    WhatIf(what_if::Options),
    /// Plot PAR over time, heat maps, before and after, moves per step.
    Plot(plot::Options),
}

/// Runs one task.
pub fn run(command: &Command) -> Result<()> {
    match command {
        Command::Bench(options) => bench::run(options),
        Command::Plan(options) => plan::run(options),
        Command::Record(options) => record::run(options),
        Command::Replay(options) => replay::run(options),
        Command::WhatIf(options) => what_if::run(options),
        Command::Plot(options) => plot::run(options),
    }
}

/// The options that a command line gives.
#[cfg(test)]
fn parsed<T: clap::Args + clap::FromArgMatches>(args: &[&str]) -> T {
    let command = T::augment_args(clap::Command::new("x").no_binary_name(true));
    T::from_arg_matches(&command.get_matches_from(args)).unwrap()
}
