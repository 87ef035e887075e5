//! The processes that are left when a rank is lost form the world again.

use std::collections::BTreeMap;
use std::sync::Arc;

use moe_comm::Communicator;

use super::processes::Processes;
use super::wire::{decode, encode};
use crate::engine::host_memory;
use crate::error::Result;

impl Processes {
    /// Whether a rank was lost, or a collective failed, and the ranks that are left may [`regroup`](Self::regroup).
    pub fn may_regroup(&self) -> bool {
        self.world.why_ended().is_some()
    }

    /// Forms the world again from the ranks that are left, once nothing of this process uses the old one. They get new
    /// numbers, in the same order. Returns why the others were lost. Rank 0 passes what each host has to `check`.
    ///
    /// # Errors
    /// The error of `check`; no rank was lost; the world has failed.
    pub fn regroup(&mut self, check: impl Fn(&Hosts) -> Result<()>) -> Result<Vec<String>> {
        let told = encode(&(self.host.start, host_memory()))?;
        let next = self.world.regroup(&told, |facts| Ok(check(&hosts(facts)?)?))?;
        let left = next.members();
        let lost = (0..self.world.world_size()).filter(|&rank| !left.contains(&self.world.members()[rank]));
        let mut whys: Vec<String> = lost.filter_map(|rank| self.world.why_lost(rank)).collect();
        whys.dedup();
        let here = left.iter().filter(|rank| self.host.contains(rank)).count();
        self.local_world_size = self.local_world_size.map(|_| here);
        self.messages = next.messages();
        self.world = Arc::new(next);
        Ok(whys)
    }

    /// Fails the run on all ranks.
    pub fn fail(&self, why: &str) {
        self.world.fail_world(why);
    }
}

/// The free memory of each host, if it is known, and its ranks.
pub(crate) type Hosts = BTreeMap<usize, (Option<u64>, Vec<usize>)>;

/// The hosts of the ranks that are left. The last rank of a host that gave up its memory has found most of it free.
fn hosts(facts: &[(usize, Vec<u8>)]) -> Result<Hosts> {
    let mut hosts = Hosts::new();
    for (rank, (_, told)) in facts.iter().enumerate() {
        let (host, free): (usize, Option<u64>) = decode(told)?;
        let (most, ranks) = hosts.entry(host).or_default();
        *most = free.max(*most);
        ranks.push(rank);
    }
    Ok(hosts)
}
