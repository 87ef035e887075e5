//! What a rank says about a collective when it enters it, and whether the ranks agree.
//!
//! The argument checks in [`check`](crate::check), which every communicator shares, make a [`Call`]. Ranks (threads or
//! processes) compare their calls before they read any data.

use std::fmt;

use candle_core::DType;
use moe_kernels::Dims;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

use crate::collective::{Collective, ReduceOp};

/// The collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Op {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    Barrier,
    Split,
    /// The replay of recorded collectives.
    #[cfg(feature = "nccl")]
    Replay,
}

impl Op {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
            Self::Split => "split",
            #[cfg(feature = "nccl")]
            Self::Replay => "the replay of a graph",
        }
    }
}

impl Op {
    /// Whether ranks pass a colour and a key.
    pub(crate) fn is_split(self) -> bool {
        self == Self::Split
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Collective<'_> {
    pub(crate) fn op(&self) -> Op {
        match self {
            Self::AllReduce { .. } => Op::AllReduce,
            Self::AllGather { .. } => Op::AllGather,
            Self::ReduceScatter { .. } => Op::ReduceScatter,
            Self::AllToAll { .. } => Op::AllToAll,
            Self::Broadcast { .. } => Op::Broadcast,
            Self::Barrier => Op::Barrier,
        }
    }
}

/// Row counts of a collective.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Counts {
    /// No rows are moved.
    None,
    /// Rows of each rank, the same on every rank.
    PerRank(Vec<usize>),
    /// Rows sent to and received from each rank.
    Pairwise { send: Vec<usize>, recv: Vec<usize> },
}

impl Counts {
    /// Whether there is one count for each of `size` ranks, and their sum does not overflow.
    pub(crate) fn are_of(&self, size: usize) -> bool {
        let fit = |counts: &[usize]| {
            counts.len() == size && counts.iter().try_fold(0usize, |n, &count| n.checked_add(count)).is_some()
        };
        match self {
            Self::None => true,
            Self::PerRank(counts) => fit(counts),
            Self::Pairwise { send, recv } => fit(send) && fit(recv),
        }
    }
}

impl fmt::Debug for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::PerRank(counts) => counts.fmt(f),
            Self::Pairwise { send, recv } => write!(f, "{send:?} sent, {recv:?} received"),
        }
    }
}

/// A rank's entry into a collective.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Call {
    pub op: Op,
    pub reduce: Option<ReduceOp>,
    #[serde(with = "by_name")]
    pub dtype: Option<DType>,
    /// The dims that must agree: all of them, or only the row dims where the number of rows may differ.
    #[serde(with = "by_list")]
    pub dims: Option<Dims>,
    pub root: Option<usize>,
    pub counts: Counts,
}

impl Call {
    /// A call without data.
    pub(crate) fn bare(op: Op) -> Self {
        Self { op, reduce: None, dtype: None, dims: None, root: None, counts: Counts::None }
    }
}

/// Serialises a dtype as its name.
mod by_name {
    use super::*;

    pub fn serialize<S: Serializer>(dtype: &Option<DType>, to: S) -> Result<S::Ok, S::Error> {
        dtype.map(|dtype| dtype.as_str()).serialize(to)
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<Option<DType>, D::Error> {
        let name: Option<String> = Deserialize::deserialize(from)?;
        name.map(|name| name.parse().map_err(D::Error::custom)).transpose()
    }
}

/// Serialises dims as a list.
mod by_list {
    use super::*;

    pub fn serialize<S: Serializer>(dims: &Option<Dims>, to: S) -> Result<S::Ok, S::Error> {
        dims.as_deref().serialize(to)
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<Option<Dims>, D::Error> {
        let dims: Option<Vec<usize>> = Deserialize::deserialize(from)?;
        dims.map(|dims| Dims::new(&dims).map_err(D::Error::custom)).transpose()
    }
}

/// What the ranks' calls disagree about, if anything; `label` names a set of ranks.
pub(crate) fn disagreement(calls: &[&Call], label: impl Fn(&[usize]) -> String) -> Option<String> {
    let first = calls.first()?;
    if calls.iter().all(|call| same(first, call)) {
        return unmatched_rows(calls, &label);
    }
    type Aspect = fn(&Call) -> String;
    // The order matters: the first difference explains the later ones.
    let aspects: [(&str, Aspect); 6] = [
        ("collective", |c| c.op.to_string()),
        ("reduction", |c| c.reduce.map_or_else(|| "none".to_string(), |r| r.to_string())),
        ("dtype", |c| c.dtype.map_or("none", |d| d.as_str()).to_string()),
        ("dims", |c| format!("{:?}", c.dims.as_deref().unwrap_or(&[]))),
        ("root", |c| format!("{:?}", c.root.unwrap_or(0))),
        ("counts", |c| format!("{:?}", c.counts)),
    ];
    aspects.iter().find_map(|(what, value)| {
        let groups = grouped(calls, value);
        let list: Vec<String> = groups.iter().map(|(v, ranks)| format!("{v} on {}", label(ranks))).collect();
        let what = match *what {
            "collective" => what.to_string(),
            "dims" if first.counts != Counts::None => format!("dims after the first in {}", first.op),
            _ => format!("{what} in {}", first.op),
        };
        (groups.len() > 1).then(|| format!("ranks disagree about the {what}: {}", list.join(", ")))
    })
}

/// The values of an aspect, each with the ranks that have it.
fn grouped(calls: &[&Call], value: impl Fn(&Call) -> String) -> Vec<(String, Vec<usize>)> {
    let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
    for (rank, call) in calls.iter().enumerate() {
        let value = value(call);
        match groups.iter_mut().find(|(v, _)| *v == value) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((value, vec![rank])),
        }
    }
    groups
}

/// Equality of everything that every rank must pass alike.
fn same(a: &Call, b: &Call) -> bool {
    let counts = match (&a.counts, &b.counts) {
        (Counts::Pairwise { .. }, Counts::Pairwise { .. }) => true,
        (a, b) => a == b,
    };
    counts && (a.op, a.reduce, a.dtype, a.dims, a.root) == (b.op, b.reduce, b.dtype, b.dims, b.root)
}

/// A pair of ranks where one sends a different number of rows than the other expects.
fn unmatched_rows(calls: &[&Call], label: &impl Fn(&[usize]) -> String) -> Option<String> {
    for (from, sender) in calls.iter().enumerate() {
        for (to, receiver) in calls.iter().enumerate() {
            let (Counts::Pairwise { send, .. }, Counts::Pairwise { recv, .. }) =
                (&sender.counts, &receiver.counts)
            else {
                return None;
            };
            let sent = *send.get(to)?;
            let expected = *recv.get(from)?;
            if sent != expected {
                let op = sender.op;
                let from = label(&[from]);
                let to = label(&[to]);
                return Some(format!(
                    "ranks disagree about the counts in {op}: {from} sends {sent} rows to {to}, which expects {expected}"
                ));
            }
        }
    }
    None
}
