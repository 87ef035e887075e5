//! The table of backends of expert parallelism: their names, and which settings each one needs.
//!
//! Names and aliases are InfiniLM's (`moe_ep_backend`). What a backend does is in moe-dispatch.

use std::fmt;
use std::str::FromStr;

use crate::error::GeometryError;
use crate::names::{DeepEpMode, normalized, unknown};

/// How expert rows travel between ranks.
// This enum is exhaustive: each backend must be built where tokens are dispatched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EpBackend {
    /// No expert parallelism: every rank holds all experts, cut along the intermediate size by tp.
    Disabled,
    /// Every rank has the same tokens and runs its own experts; an all-reduce adds the outputs.
    LocalAllreduce,
    /// Rows of all ranks are gathered, each rank runs its own experts, outputs are scattered back.
    AllgatherReducescatter,
    /// All-to-all: each rank receives only the rows that its experts need.
    DeepEp,
}

/// What users and settings need to know about a backend.
#[derive(Clone, Copy, Debug)]
pub struct EpBackendRow {
    /// The backend.
    pub backend: EpBackend,
    /// The canonical name.
    pub name: &'static str,
    /// Other names.
    pub aliases: &'static [&'static str],
    /// Whether each rank holds whole experts; if false, each rank holds a part of every expert.
    pub expert_parallel: bool,
    /// Whether all ranks must process the same tokens, which means dp = 1.
    pub same_tokens: bool,
    /// The modes that it supports in addition to `auto`.
    pub modes: &'static [DeepEpMode],
}

/// Every backend. `auto` chooses the first that fits the other settings.
pub const EP_BACKENDS: [EpBackendRow; 4] = [
    EpBackendRow {
        backend: EpBackend::Disabled,
        name: "disabled",
        aliases: &["", "0", "none", "off", "standard"],
        expert_parallel: false,
        same_tokens: false,
        modes: &[],
    },
    EpBackendRow {
        backend: EpBackend::LocalAllreduce,
        name: "local_allreduce",
        aliases: &["local_all_reduce", "tp_ep", "vllm_tp", "dp1"],
        expert_parallel: true,
        same_tokens: true,
        modes: &[],
    },
    EpBackendRow {
        backend: EpBackend::AllgatherReducescatter,
        name: "allgather_reducescatter",
        aliases: &["naive", "ag_rs", "all_gather_reduce_scatter"],
        expert_parallel: true,
        same_tokens: false,
        modes: &[],
    },
    EpBackendRow {
        backend: EpBackend::DeepEp,
        name: "deepep",
        aliases: &["deep_ep"],
        expert_parallel: true,
        same_tokens: false,
        modes: &[DeepEpMode::HighThroughput, DeepEpMode::LowLatency],
    },
];

// The discriminant of a backend is the index of its row.
const _: () = {
    let mut at = 0;
    while at < EP_BACKENDS.len() {
        assert!(EP_BACKENDS[at].backend as usize == at);
        at += 1;
    }
};

impl EpBackend {
    /// The row of this backend in the table.
    pub fn row(self) -> &'static EpBackendRow {
        &EP_BACKENDS[self as usize]
    }
}

impl fmt::Display for EpBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().name)
    }
}

/// The backend setting: a backend by name, or `auto`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EpBackendChoice {
    /// The first of [`EP_BACKENDS`] that fits: [`EpBackend::Disabled`] for one expert-parallel rank,
    /// [`EpBackend::LocalAllreduce`] for dp = 1, else [`EpBackend::AllgatherReducescatter`].
    #[default]
    Auto,
    /// This backend; it is an error if it does not fit the other settings.
    Explicit(EpBackend),
}

impl EpBackendChoice {
    /// `auto` and the names of the backends that `fits` accepts, as an English list.
    pub fn listed(fits: impl Fn(&EpBackendRow) -> bool) -> String {
        let names: Vec<_> = EP_BACKENDS.iter().filter(|row| fits(row)).map(|row| row.name).collect();
        match names.split_last() {
            Some((last, [])) => format!("auto or {last}"),
            Some((last, names)) => format!("auto, {} or {last}", names.join(", ")),
            None => "auto".to_string(),
        }
    }
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
        let written = normalized(name);
        if written == "auto" {
            return Ok(Self::Auto);
        }
        let row =
            EP_BACKENDS.iter().find(|row| row.name == written || row.aliases.contains(&written.as_str()));
        row.map(|row| Self::Explicit(row.backend)).ok_or_else(|| {
            let names = [&["auto"], &EP_BACKENDS.map(|row| row.name)[..]].concat();
            unknown("MoE backend", name, &names)
        })
    }
}
