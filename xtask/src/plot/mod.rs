//! `xtask plot`: plots of what runs have recorded, and the charts that other tasks use too.

pub mod charts;
mod heat;
pub mod heatmap;

use anyhow::Result;
use clap::Subcommand;

/// The pictures.
#[derive(Subcommand)]
pub enum Command {
    /// Heat map of a heat trace: layers x experts.
    Heat(heat::Options),
}

/// Makes one plot.
pub fn run(command: &Command) -> Result<()> {
    match command {
        Command::Heat(options) => heat::run(options),
    }
}
