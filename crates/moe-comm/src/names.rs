//! The named choices of a parallel configuration, except for the backend ([`EP_BACKENDS`](crate::EP_BACKENDS)), with
//! the names that users write.
//!
//! Names ignore case and surrounding space, and `-` counts as `_`, so that command lines and Python configurations
//! agree.

use std::fmt;
use std::str::FromStr;

use crate::error::GeometryError;

/// Which rank owns which expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ExpertPlacement {
    /// Each rank owns consecutive experts; the first `P % ep` ranks own one more.
    #[default]
    Linear,
    /// Rank r owns experts r, r + ep, r + 2 ep, ...
    RoundRobin,
}

/// The form of the all-to-all backend (DeepEP's two families of kernels).
// This enum is exhaustive: the backend must build each form.
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
// This enum is exhaustive: a layer must say how it spreads rows for each choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReplicaChoice {
    /// Copies take turns: copy (row + expert) mod copies.
    #[default]
    RoundRobin,
    /// The copy is chosen by a hash of row and expert.
    Hash,
    /// The copy on the rank that owns the row, if there is one; otherwise copies take turns.
    LocalFirst,
}

/// Defines the names of a choice's variants, each with its aliases. `what` names the choice in errors.
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

pub(crate) fn normalized(name: &str) -> String {
    name.trim().to_ascii_lowercase().replace('-', "_")
}

pub(crate) fn unknown(what: &'static str, got: &str, expected: &[&str]) -> GeometryError {
    let expected = expected.iter().map(|name| (*name).to_string()).collect();
    GeometryError::UnknownName { what, got: got.to_string(), expected }
}
