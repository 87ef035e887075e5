//! The named choices of a parallel configuration, with the names that users write.
//!
//! Backend names and aliases are those of InfiniLM's `moe_ep_backend`. Names ignore case and
//! surrounding space, and `-` is `_`, so that command lines and Python configurations agree.

use std::fmt;
use std::str::FromStr;

use crate::error::GeometryError;

/// How expert rows travel between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EpBackend {
    /// No expert parallelism: every rank holds all experts, cut along the intermediate size by tp.
    Disabled,
    /// Every rank has the same tokens and runs its own experts; the outputs are added up.
    LocalAllreduce,
    /// Rows of all ranks are gathered, each rank runs its own experts, outputs are scattered back.
    AllgatherReducescatter,
    /// All-to-all: each rank receives only the rows that its experts need.
    DeepEp,
}

impl EpBackend {
    /// Every backend.
    pub const ALL: [EpBackend; 4] =
        [Self::Disabled, Self::LocalAllreduce, Self::AllgatherReducescatter, Self::DeepEp];

    /// The canonical name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Disabled => "disabled",
            Self::LocalAllreduce => "local_allreduce",
            Self::AllgatherReducescatter => "allgather_reducescatter",
            Self::DeepEp => "deepep",
        }
    }

    /// Other names that mean this backend.
    pub fn aliases(self) -> &'static [&'static str] {
        match self {
            Self::Disabled => &["", "0", "none", "off", "standard"],
            Self::LocalAllreduce => &["local_all_reduce", "tp_ep", "vllm_tp", "dp1"],
            Self::AllgatherReducescatter => &["naive", "ag_rs", "all_gather_reduce_scatter"],
            Self::DeepEp => &["deep_ep"],
        }
    }

    /// Whether this backend exchanges rows between expert-parallel ranks.
    pub fn is_expert_parallel(self) -> bool {
        self != Self::Disabled
    }
}

impl fmt::Display for EpBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The backend setting: one by name, or `auto`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EpBackendChoice {
    /// [`EpBackend::Disabled`] for one expert-parallel rank, [`EpBackend::LocalAllreduce`] for
    /// dp = 1, else [`EpBackend::AllgatherReducescatter`].
    #[default]
    Auto,
    /// This one, or an error.
    Explicit(EpBackend),
}

impl From<EpBackend> for EpBackendChoice {
    fn from(backend: EpBackend) -> Self {
        Self::Explicit(backend)
    }
}

impl fmt::Display for EpBackendChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Explicit(backend) => backend.fmt(f),
        }
    }
}

impl FromStr for EpBackendChoice {
    type Err = GeometryError;

    fn from_str(name: &str) -> Result<Self, GeometryError> {
        let key = normalized(name);
        if key == "auto" {
            return Ok(Self::Auto);
        }
        match EpBackend::ALL.into_iter().find(|b| b.name() == key || b.aliases().contains(&key.as_str())) {
            Some(backend) => Ok(Self::Explicit(backend)),
            None => {
                let names = EpBackend::ALL.map(EpBackend::name).join(", ");
                Err(unknown("MoE backend", name, format!("auto, {names}")))
            }
        }
    }
}

/// Which rank owns which expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ExpertPlacement {
    /// Runs of neighbouring experts; the first `P % ep` ranks own one more.
    #[default]
    Linear,
    /// Rank r owns experts r, r + ep, r + 2 ep, ...
    RoundRobin,
}

impl ExpertPlacement {
    /// Every placement.
    pub const ALL: [ExpertPlacement; 2] = [Self::Linear, Self::RoundRobin];

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::RoundRobin => "round_robin",
        }
    }
}

impl fmt::Display for ExpertPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ExpertPlacement {
    type Err = GeometryError;

    fn from_str(name: &str) -> Result<Self, GeometryError> {
        let key = normalized(name);
        Self::ALL
            .into_iter()
            .find(|p| p.name() == key)
            .ok_or_else(|| unknown("expert placement", name, Self::ALL.map(Self::name).join(", ")))
    }
}

/// The form of the all-to-all backend (DeepEP's two families of kernels).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeepEpMode {
    /// Low latency for decode steps, high throughput for the others.
    #[default]
    Auto,
    /// Exact counts, Standard activation format.
    HighThroughput,
    /// A fixed maximum per rank, BatchedExperts activation format.
    LowLatency,
}

impl DeepEpMode {
    /// Every mode.
    pub const ALL: [DeepEpMode; 3] = [Self::Auto, Self::HighThroughput, Self::LowLatency];

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::HighThroughput => "high_throughput",
            Self::LowLatency => "low_latency",
        }
    }
}

impl fmt::Display for DeepEpMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DeepEpMode {
    type Err = GeometryError;

    fn from_str(name: &str) -> Result<Self, GeometryError> {
        let key = normalized(name);
        Self::ALL
            .into_iter()
            .find(|m| m.name() == key)
            .ok_or_else(|| unknown("DeepEP mode", name, Self::ALL.map(Self::name).join(", ")))
    }
}

fn normalized(name: &str) -> String {
    name.trim().to_ascii_lowercase().replace('-', "_")
}

fn unknown(what: &'static str, got: &str, expected: String) -> GeometryError {
    GeometryError(format!("unknown {what} {got:?}; expected one of {expected}"))
}
