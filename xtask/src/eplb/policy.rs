//! The options that name a policy.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use moe_eplb::Objective;
use moe_eplb::policy::{Deepseek, FlashLb, Joint, Policy, Swift};

/// Which policy, and how hard it tries.
#[derive(Args, Clone, Debug)]
pub struct PolicyOptions {
    /// deepseek, deepseek-global, flashlb, swift or joint.
    #[arg(long, default_value = "joint")]
    pub policy: String,
    /// What to minimise; deepseek and swift always use the aggregate.
    #[arg(long, value_enum, default_value_t = ObjectiveName::Episode)]
    pub objective: ObjectiveName,
    /// Search steps per slot (joint only).
    #[arg(long, default_value_t = Joint::DEFAULT_EFFORT)]
    pub effort: u32,
    /// PAR that transferring every slot would have to gain (joint only). The bench takes several.
    #[arg(long, default_values_t = [0.0])]
    pub move_price: Vec<f64>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum ObjectiveName {
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
    pub fn build(&self) -> Result<Box<dyn Policy>> {
        self.build_at(self.move_price.first().copied().unwrap_or(0.0))
    }

    /// The same as `build`, with another price of moves.
    pub fn build_at(&self, move_price: f64) -> Result<Box<dyn Policy>> {
        let objective = self.objective.get();
        Ok(match self.policy.as_str() {
            "deepseek" => Box::new(Deepseek::default()),
            "deepseek-global" => Box::new(Deepseek { global: true, ..Deepseek::default() }),
            "swift" => Box::new(Swift::default()),
            "flashlb" => Box::new(FlashLb { objective, ..FlashLb::default() }),
            "joint" => Box::new(Joint { objective, effort: self.effort, move_price, ..Joint::default() }),
            other => {
                bail!("unknown policy `{other}`; expected deepseek, deepseek-global, flashlb, swift or joint")
            }
        })
    }
}

/// How the bench rows spell an objective.
pub fn objective_name(objective: Objective) -> &'static str {
    match objective {
        Objective::Aggregate => "aggregate",
        Objective::Episode => "episode",
    }
}
