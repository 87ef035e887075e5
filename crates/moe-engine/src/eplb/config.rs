//! Settings of load balancing. They have vLLM's names where vLLM has the setting.

use std::str::FromStr;
use std::time::Duration;

use moe_eplb::policy::{Deepseek, FlashLb, Joint, Policy, Swift};
use serde::{Deserialize, Serialize};

use crate::error::{Result, usage};

/// When experts move, and how much at a time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EplbConfig {
    /// Number of latest steps from whose counts a plan is made.
    pub window: usize,
    /// Number of counted steps from one plan to the next.
    pub interval: usize,
    /// Number of steps after which an unfinished plan is dropped.
    pub plan_steps: usize,
    /// How placements are found.
    pub policy: EplbPolicy,
    /// The largest number of experts that move for one plan, all layers together.
    pub max_moves: Option<usize>,
    /// The largest number of bytes that are sent between two steps, all ranks together; at least one expert moves.
    pub bytes_per_step: usize,
    /// The time limit for a layer's experts to arrive. After that they stay where they were.
    pub move_timeout: Duration,
    /// The gain in peak over mean load that a layer's new placement must have.
    pub min_gain: f64,
    /// Whether a layer moves only if the time that it saves until the next plan is more than its bytes cost.
    pub must_pay: bool,
}

impl Default for EplbConfig {
    fn default() -> Self {
        Self {
            window: 1000,
            interval: 3000,
            plan_steps: 100,
            policy: EplbPolicy::Joint,
            max_moves: None,
            bytes_per_step: 64 << 20,
            move_timeout: Duration::from_secs(600),
            min_gain: 0.02,
            must_pay: true,
        }
    }
}

impl EplbConfig {
    /// # Errors
    /// A setting that cannot be, by its flag: a [`UsageError`](crate::UsageError).
    pub fn check(&self) -> Result<()> {
        const MOST: usize = u32::MAX as usize;
        for (flag, value) in [
            ("`eplb.window`", self.window),
            ("`eplb.interval`", self.interval),
            ("`eplb.plan_steps`", self.plan_steps),
            ("`eplb.max_moves`", self.max_moves.unwrap_or(1)),
        ] {
            if !(1..=MOST).contains(&value) {
                return Err(usage(format!("{flag} {value}: expected 1 to {MOST}")));
            }
        }
        if self.bytes_per_step == 0 {
            return Err(usage("`eplb.bytes_per_step` 0: expected bytes, at least 1"));
        }
        if self.move_timeout.is_zero() {
            return Err(usage("`eplb.move_timeout` 0: expected seconds, at least 1"));
        }
        if self.min_gain.is_nan() || self.min_gain < 0.0 {
            return Err(usage(format!("`eplb.min_gain` {}: expected a number of at least 0", self.min_gain)));
        }
        Ok(())
    }
}

/// A way to find placements; the README of moe-eplb compares them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum EplbPolicy {
    /// Copies and places searched together, with a price on moves.
    #[default]
    Joint,
    /// FlashLB's tree search.
    FlashLb,
    /// Few exchanges, after SwiftBalance.
    Swift,
    /// DeepSeek's, which is vLLM's default.
    Deepseek,
}

/// The gain that moving every slot would need: with 8 ranks 15 to 19 % of the slots then move after a drift, at a cost
/// of 0.01 of the balance (README of moe-eplb).
const MOVE_PRICE: f64 = 0.07;

impl EplbPolicy {
    /// Every policy.
    pub const ALL: [Self; 4] = [Self::Joint, Self::FlashLb, Self::Swift, Self::Deepseek];

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Joint => "joint",
            Self::FlashLb => "flashlb",
            Self::Swift => "swift",
            Self::Deepseek => "deepseek",
        }
    }

    pub(super) fn build(self) -> Box<dyn Policy + Send> {
        match self {
            Self::Joint => Box::new(Joint { move_price: MOVE_PRICE, ..Joint::default() }),
            Self::FlashLb => Box::new(FlashLb::default()),
            Self::Swift => Box::new(Swift::default()),
            Self::Deepseek => Box::new(Deepseek::default()),
        }
    }
}

impl FromStr for EplbPolicy {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|policy| policy.name() == name);
        // vLLM calls DeepSeek's algorithm its default.
        let found = found.or((name == "default").then_some(Self::Deepseek));
        found.ok_or_else(|| format!("unknown policy {name:?}; expected joint, flashlb, swift or deepseek"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_have_names_and_settings_are_checked_by_flag() {
        for policy in EplbPolicy::ALL {
            assert_eq!(policy.name().parse(), Ok(policy));
            assert_eq!(policy.build().name(), policy.name());
        }
        assert!("random".parse::<EplbPolicy>().unwrap_err().contains("expected joint"));
        assert!(EplbConfig::default().check().is_ok());
        assert!(EplbConfig { bytes_per_step: usize::MAX, ..EplbConfig::default() }.check().is_ok());
        for (config, flag) in [
            (EplbConfig { window: 0, ..EplbConfig::default() }, "`eplb.window` 0"),
            (EplbConfig { interval: 1 << 40, ..EplbConfig::default() }, "`eplb.interval`"),
            (EplbConfig { max_moves: Some(0), ..EplbConfig::default() }, "`eplb.max_moves` 0"),
            (
                EplbConfig { bytes_per_step: 0, ..EplbConfig::default() },
                "`eplb.bytes_per_step` 0: expected bytes, at least 1",
            ),
            (EplbConfig { move_timeout: Duration::ZERO, ..EplbConfig::default() }, "`eplb.move_timeout` 0"),
            (EplbConfig { min_gain: f64::NAN, ..EplbConfig::default() }, "`eplb.min_gain` NaN"),
        ] {
            let error = config.check().unwrap_err().to_string();
            assert!(error.contains(flag), "{error}");
        }
    }
}
