//! Going on with the ranks that are left: a new generation of the world.
//!
//! ```text
//! rank r                            rank 0
//! its generation has ended          its generation has ended
//! Left {facts} ───────────────────► waits for all that are not lost; the ones that say nothing are lost
//!                                   checks the facts
//!             ◄──── Formed {group, ranks}
//! ```
//! Connections are kept. Every message belongs to a generation, and messages of an older one are dropped. If another
//! rank is lost meanwhile, all begin again with the next generation.

use std::thread;
use std::time::{Duration, Instant};

use candle_core::{Error, Result, bail};

use crate::error::CommError;
use crate::lock::lock;
use crate::socket::comm::SocketComm;
use crate::socket::messages::{Messages, News};
use crate::socket::world::World;

/// How often rank 0 looks for messages of the ranks that are left.
const LOOK: Duration = Duration::from_millis(2);

/// What each rank that is left tells rank 0, with the rank's number in the first generation.
type Facts = Vec<(usize, Vec<u8>)>;

impl SocketComm {
    /// The ranks of this communicator, as they were numbered in the first generation.
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    /// Why the generation of this communicator has ended, if it has and the world goes on.
    pub fn why_ended(&self) -> Option<&str> {
        self.world().why_ended(self.generation).filter(|_| self.world().failure().is_none())
    }

    /// Why a rank of this communicator was lost, if it was.
    pub fn why_lost(&self, rank: usize) -> Option<String> {
        lock(&self.world().inbox).why_lost(*self.members.get(rank)?).map(str::to_string)
    }

    /// Forms a new generation from the ranks that are left, after the generation of this communicator has ended. Each
    /// of these ranks calls it, as soon as nothing of it uses the old generation. `facts` are for rank 0, whose `check`
    /// gets the facts of all ranks that are left, with the ranks' first numbers, and may refuse to go on with them.
    /// Rank 0 waits for a rank as long as for a collective.
    ///
    /// # Errors
    /// The world has failed; `check` failed; all ranks are left, so the next generation would end as this one did.
    pub fn regroup(&self, facts: &[u8], check: impl Fn(&[(usize, Vec<u8>)]) -> Result<()>) -> Result<Self> {
        loop {
            let generation = self.world().next_generation();
            let all = (0..self.world().size()).collect();
            let messages = Messages { member: self.member.clone(), generation, members: all };
            let formed = match self.world().rank {
                0 => self.lead(&messages, facts, &check),
                _ => self.follow(&messages, facts),
            };
            let again = self.world().failure().is_none() && self.world().why_ended(generation).is_some();
            match formed {
                Err(_) if again => {}
                formed => return formed,
            }
        }
    }

    /// Rank 0 decides which ranks go on.
    fn lead(
        &self,
        messages: &Messages,
        own: &[u8],
        check: impl Fn(&[(usize, Vec<u8>)]) -> Result<()>,
    ) -> Result<Self> {
        let world = self.world();
        let mut facts = self.hear(messages)?;
        world.check(messages.generation)?;
        facts.push((0, own.to_vec()));
        facts.retain(|(rank, _)| !messages.is_lost(*rank));
        facts.sort_unstable();
        let members: Vec<usize> = facts.iter().map(|(rank, _)| *rank).collect();
        if members == lock(&world.inbox).formed.1 {
            let why = self.why_ended().unwrap_or("a collective failed");
            return Err(
                CommError(format!("{why}; no rank is lost, so there is nothing to go on without")).into()
            );
        }
        check(&facts)?;
        let group = world.new_group();
        let told = postcard::to_stdvec(&(group, &members)).map_err(Error::wrap)?;
        members.iter().skip(1).try_for_each(|&rank| messages.send(rank, &told))?;
        self.form(messages.generation, group, members)
    }

    /// The facts of the other ranks that are left. The ones that say nothing for too long are lost.
    fn hear(&self, messages: &Messages) -> Result<Facts> {
        let world = self.world();
        let start = Instant::now();
        let mut facts = Facts::new();
        let mut awaited: Vec<usize> = (1..world.size()).filter(|&rank| !messages.is_lost(rank)).collect();
        while !awaited.is_empty() {
            match messages.try_recv_any(&awaited)? {
                Some((rank, news)) => {
                    awaited.retain(|&other| other != rank);
                    if let News::Message(told) = news {
                        facts.push((rank, told));
                    }
                }
                None if start.elapsed() > world.timeout => {
                    let limit = world.timeout;
                    for rank in std::mem::take(&mut awaited) {
                        world.lose(
                            rank,
                            format!("rank {rank} stalled: it took part in nothing for {limit:?}"),
                        );
                    }
                }
                None => thread::sleep(LOOK),
            }
        }
        Ok(facts)
    }

    /// Any other rank learns which ranks go on.
    fn follow(&self, messages: &Messages, facts: &[u8]) -> Result<Self> {
        messages.send(0, facts)?;
        let Some(told) = messages.recv(0)? else { bail!("rank 0 left while the others waited for it") };
        let Formed { group, members } = Formed::read(&told, self.world().size())?;
        self.form(messages.generation, group, members)
    }

    fn form(&self, generation: usize, group: u64, members: Vec<usize>) -> Result<Self> {
        let formed = self.of_generation(generation, group, members)?;
        self.world().form(generation, &formed.members);
        Ok(formed)
    }
}

/// The ranks that go on.
struct Formed {
    /// The id of their communicator.
    group: u64,
    members: Vec<usize>,
}

impl Formed {
    /// Reads what rank 0 of a world of `size` ranks sends.
    fn read(told: &[u8], size: usize) -> Result<Self> {
        let (group, members): (u64, Vec<usize>) = match postcard::take_from_bytes(told) {
            Ok((formed, [])) => formed,
            _ => bail!("rank 0 sent no ranks that go on"),
        };
        let in_order = members.is_sorted_by(|a, b| a < b) && members.first() == Some(&0);
        if !in_order || members.last() >= Some(&size) || !World::is_group_of(0, group) {
            bail!("rank 0 names ranks that cannot go on: {members:?} of {size}, as group {group}")
        }
        Ok(Self { group, members })
    }
}

/// Reads which ranks go on after a loss, as a rank of a world of `size` ranks reads it from rank 0. Returns how many.
///
/// # Errors
/// Any error that keeps the rank from going on with them.
pub fn check_formed(told: &[u8], size: usize) -> Result<usize> {
    Formed::read(told, size).map(|formed| formed.members.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ranks_of_the_world_in_order_go_on() -> Result<()> {
        let told =
            |group: u64, members: &[usize]| postcard::to_stdvec(&(group, members)).map_err(Error::wrap);
        assert_eq!(check_formed(&told(7, &[0, 2, 3])?, 4)?, 3);
        let wrong =
            [(7, &[1, 2][..]), (7, &[0, 4]), (7, &[0, 2, 2]), (7, &[]), (0, &[0, 1]), (1 << 40 | 1, &[0, 1])];
        for (group, members) in wrong {
            let error = check_formed(&told(group, members)?, 4).unwrap_err().to_string();
            assert!(error.contains("cannot go on") && error.contains("of 4"), "{error}");
        }
        let mut longer = told(7, &[0, 1])?;
        longer.push(0);
        for told in [&longer[..], &longer[..2], &[]] {
            let error = check_formed(told, 4).unwrap_err().to_string();
            assert!(error.contains("sent no ranks"), "{error}");
        }
        Ok(())
    }
}
