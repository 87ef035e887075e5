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

/// Which rank owns which expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ExpertPlacement {
    /// Runs of neighbouring experts; the first `P % ep` ranks own one more.
    #[default]
    Linear,
    /// Rank r owns experts r, r + ep, r + 2 ep, ...
    RoundRobin,
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

/// Which copy of an expert computes a row, where the expert has several. Any choice gives the same result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReplicaChoice {
    /// Copies take turns: copy (row + expert) mod copies.
    #[default]
    RoundRobin,
    /// By a hash of row and expert.
    Hash,
    /// The copy on the rank that owns the row, if it has one; else in turns.
    LocalFirst,
}

/// Names of a choice's variants, each with its aliases. `what` is chosen, for errors.
macro_rules! names {
    ($type:ident, $what:literal, $($variant:ident = $name:literal $(| $alias:literal)*),+) => {
        impl $type {
            /// Every choice.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            /// The canonical name.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name),+
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FromStr for $type {
            type Err = GeometryError;

            fn from_str(name: &str) -> Result<Self, GeometryError> {
                match normalized(name).as_str() {
                    $($name $(| $alias)* => Ok(Self::$variant),)+
                    _ => Err(unknown($what, name, &[$($name),+])),
                }
            }
        }
    };
}

names!(
    EpBackend,
    "MoE backend",
    Disabled = "disabled" | "" | "0" | "none" | "off" | "standard",
    LocalAllreduce = "local_allreduce" | "local_all_reduce" | "tp_ep" | "vllm_tp" | "dp1",
    AllgatherReducescatter = "allgather_reducescatter" | "naive" | "ag_rs" | "all_gather_reduce_scatter",
    DeepEp = "deepep" | "deep_ep"
);
names!(ExpertPlacement, "expert placement", Linear = "linear", RoundRobin = "round_robin");
names!(
    ReplicaChoice,
    "choice of replicas",
    RoundRobin = "round_robin",
    Hash = "hash",
    LocalFirst = "local_first"
);
names!(
    DeepEpMode,
    "DeepEP mode",
    Auto = "auto",
    HighThroughput = "high_throughput",
    LowLatency = "low_latency"
);

impl EpBackend {
    /// Whether this backend exchanges rows between expert-parallel ranks.
    pub fn is_expert_parallel(self) -> bool {
        self != Self::Disabled
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
        if normalized(name) == "auto" {
            return Ok(Self::Auto);
        }
        let names = [&["auto"], &EpBackend::ALL.map(EpBackend::name)[..]].concat();
        name.parse().map(Self::Explicit).map_err(|_| unknown("MoE backend", name, &names))
    }
}

fn normalized(name: &str) -> String {
    name.trim().to_ascii_lowercase().replace('-', "_")
}

fn unknown(what: &str, got: &str, expected: &[&str]) -> GeometryError {
    GeometryError(format!("unknown {what} {got:?}; expected one of {}", expected.join(", ")))
}
