//! `xtask eplb`: benchmark, plan, record, replay and plot expert placements with moe-eplb.

mod baseline;
mod bench;
mod input;
mod plan;
mod plot;
mod record;
mod replay;
mod scale;
mod small;
mod table;
mod what_if;
mod workload;

use anyhow::{Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use moe_eplb::policy::{Deepseek, FlashLb, Joint, Policy, Swift};
use moe_eplb::{Objective, policy};

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

/// Which policy, and how hard it tries.
#[derive(Args, Clone, Debug)]
pub struct PolicyOptions {
    /// deepseek, deepseek-global, flashlb, swift or joint.
    #[arg(long, default_value = "joint")]
    policy: String,
    /// What to minimise; deepseek and swift always use the aggregate.
    #[arg(long, value_enum, default_value_t = ObjectiveName::Episode)]
    objective: ObjectiveName,
    /// Search steps per slot (joint only).
    #[arg(long, default_value_t = Joint::DEFAULT_EFFORT)]
    effort: u32,
    /// PAR that transferring every slot would have to gain (joint only). The bench takes several.
    #[arg(long, default_values_t = [0.0])]
    move_price: Vec<f64>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ObjectiveName {
    Aggregate,
    Episode,
}

impl ObjectiveName {
    fn get(self) -> Objective {
        match self {
            Self::Aggregate => Objective::Aggregate,
            Self::Episode => Objective::Episode,
        }
    }
}

impl PolicyOptions {
    /// The policy that the options name.
    fn build(&self) -> Result<Box<dyn Policy>> {
        self.build_at(self.move_price.first().copied().unwrap_or(0.0))
    }

    /// As `build`, with another price of moves.
    fn build_at(&self, move_price: f64) -> Result<Box<dyn Policy>> {
        let objective = self.objective.get();
        Ok(match self.policy.as_str() {
            "deepseek" => Box::new(Deepseek::default()),
            "deepseek-global" => Box::new(Deepseek { global: true, ..Deepseek::default() }),
            "swift" => Box::new(Swift::default()),
            "flashlb" => Box::new(FlashLb { objective, ..FlashLb::default() }),
            "joint" => {
                Box::new(policy::Joint { objective, effort: self.effort, move_price, ..Joint::default() })
            }
            other => {
                bail!("unknown policy `{other}`; expected deepseek, deepseek-global, flashlb, swift or joint")
            }
        })
    }
}

/// How the bench rows spell an objective.
fn objective_name(objective: Objective) -> &'static str {
    match objective {
        Objective::Aggregate => "aggregate",
        Objective::Episode => "episode",
    }
}
