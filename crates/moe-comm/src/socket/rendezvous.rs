//! How the processes of a world find each other, by the address of rank 0.
//!
//! ```text
//! rank r                          rank 0
//! connect (again and again) ────► accept
//! listen on a free port
//! Join {rank, size, address,  ──► compare with its own settings
//!       settings}
//!          ◄── Welcome {identity of the world, addresses of all}, once all ranks are here
//! connect to ranks 1..r; accept ranks r+1..
//! ```
//! The connection to rank 0 stays open. Every connection begins with a [`handshake`](super::handshake) in which both
//! processes prove that they know the world's secret. A process that does not know it is a stranger: it is refused with
//! a reason, and the world forms without it. A process that knows the secret and has other settings is a rank that was
//! started wrongly, which is an error on all ranks. A world without a secret cannot tell these two cases apart, so it
//! refuses such a process as a stranger.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use candle_core::{Result, bail};

use crate::error::plain;
use crate::launch::Launch;
use crate::round::{foreign, label};
use crate::socket::admission::{Admission, Guest};
use crate::socket::comm::SocketComm;
use crate::socket::handshake::{Answer, Ask, Patience, answer, ask, hear_answer, refuse};
use crate::socket::reach::{listen, reach, resolve};
use crate::socket::secret::{Exchange, Key, WorldSecret, nonce};
use crate::socket::timeouts::SocketTimeouts;

/// Other ranks wait this much longer for the answer of rank 0, whose own deadline may be a little later than theirs.
const LATER: Duration = Duration::from_secs(10);

/// How a process joins its world.
pub struct Join<'a> {
    /// The place of this process, and the address of rank 0.
    pub launch: &'a Launch,
    /// Settings that must be equal on all ranks, by name. A difference is an error that names the setting.
    pub settings: Vec<(String, String)>,
    /// A text that only the ranks of this world know. Without it any process with the right settings gets a place.
    pub secret: Option<WorldSecret>,
    /// The time limits.
    pub timeouts: SocketTimeouts,
    /// The listener of rank 0, if there is one already; otherwise rank 0 binds the port of the master.
    pub listener: Option<TcpListener>,
    /// Called now and then while ranks are missing; its error ends the wait.
    pub alive: &'a dyn Fn() -> Result<()>,
}

impl<'a> Join<'a> {
    /// Uses the default timeouts and no secret.
    pub fn new(launch: &'a Launch, settings: Vec<(String, String)>) -> Self {
        let timeouts = SocketTimeouts::default();
        Self { launch, settings, secret: None, timeouts, listener: None, alive: &|| Ok(()) }
    }
}

impl SocketComm {
    /// Forms the world of `join.launch` with the other processes, and returns this process's rank in it.
    ///
    /// # Errors
    /// Ranks that do not appear in time, that have other settings, or that have the same number; a master that cannot
    /// be reached, or is not a rank of this program; a port that is in use. All ranks that have appeared get an error
    /// in bounded time.
    pub fn connect(join: Join<'_>) -> Result<SocketComm> {
        let rank = join.launch.rank;
        let timeout = join.timeouts.collective;
        let Some(deadline) = Instant::now().checked_add(join.timeouts.rendezvous) else {
            bail!("the time limit of {:?} for all ranks to appear is too long", join.timeouts.rendezvous)
        };
        let streams = match rank {
            0 => host(join, deadline),
            _ => attend(join, deadline),
        };
        match streams {
            Ok(streams) => SocketComm::start(rank, streams, timeout),
            Err(e) => bail!("rank {rank} cannot form the world: {}", plain(&e)),
        }
    }
}

type Streams = Vec<Option<TcpStream>>;

/// A rank that has connected to rank 0 and waits for the others.
struct JoinedRank {
    stream: TcpStream,
    exchange: Exchange,
    /// The address where it listens.
    address: SocketAddr,
}

impl JoinedRank {
    /// Whether its process has ended since it connected.
    fn is_left(&self) -> bool {
        let left = self.stream.set_nonblocking(true).map(|()| match self.stream.peek(&mut [0]) {
            Ok(bytes) => bytes == 0,
            Err(e) => e.kind() != std::io::ErrorKind::WouldBlock,
        });
        let back = self.stream.set_nonblocking(false);
        back.is_err() || left.unwrap_or(true)
    }
}

/// Rank 0: admits all other ranks, then sends each the addresses of the others.
fn host(join: Join, deadline: Instant) -> Result<Streams> {
    let world_size = join.launch.world_size;
    let mut joined: Vec<Option<JoinedRank>> = (0..world_size).map(|_| None).collect();
    let all_joined = join_all(join, deadline, &mut joined);
    let guests = || joined.iter().flatten();
    if let Err(e) = all_joined {
        let why = plain(&e);
        guests().for_each(|rank| drop(refuse(&rank.stream, &why)));
        return Err(e);
    }
    let world = nonce()?;
    let addresses: Vec<SocketAddr> = guests().map(|rank| rank.address).collect();
    for JoinedRank { stream, exchange, .. } in guests() {
        answer(stream, exchange, &Answer::Welcome { world, addresses: addresses.clone() })?;
    }
    Ok(joined.into_iter().map(|rank| rank.map(|rank| rank.stream)).collect())
}

fn join_all(join: Join, deadline: Instant, joined: &mut [Option<JoinedRank>]) -> Result<()> {
    let Launch { master_addr, master_port, world_size, .. } = join.launch;
    let key = Key::new(join.secret.as_ref());
    let listeners = match join.listener {
        Some(listener) => vec![listener],
        None => listen(master_addr, *master_port)?,
    };
    let mut admission = Admission::new(listeners, &key)?;
    let mut left = BTreeSet::new();
    loop {
        vacate(joined, &mut left);
        let missing: Vec<usize> =
            (1..*world_size).filter(|&r| joined.get(r).is_none_or(Option::is_none)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let Some(Guest { stream, from, ask, exchange }) = admission.next(deadline, join.alive)? else {
            let missing = label(&missing, &[]);
            let limit = join.timeouts.rendezvous;
            let ended: Vec<usize> = left.into_iter().filter(|&rank| joined[rank].is_none()).collect();
            let ended = match ended.is_empty() {
                true => String::new(),
                false => format!("; {} came and ended", label(&ended, &[])),
            };
            bail!(
                "{missing} did not appear within {limit:?} (MOE_RENDEZVOUS_TIMEOUT){}{ended}",
                admission.report()
            )
        };
        vacate(joined, &mut left);
        match admit(ask, *world_size, &join.settings, joined) {
            Ok((rank, address)) => {
                if let Some(place) = joined.get_mut(rank) {
                    *place = Some(JoinedRank { stream, exchange, address });
                }
            }
            // The process may be left over from another run: only a secret can rule that out.
            Err(why) if !key.secret => admission.turn_away(&stream, from, &foreign(&why)),
            Err(why) => {
                let why = foreign(&why);
                // The other process may already be gone.
                let _ = refuse(&stream, &why);
                bail!("{why}")
            }
        }
    }
}

/// Frees the places of processes that ended while they waited, so that they can be started again.
fn vacate(joined: &mut [Option<JoinedRank>], left: &mut BTreeSet<usize>) {
    for (rank, place) in joined.iter_mut().enumerate() {
        if place.take_if(|rank| rank.is_left()).is_some() {
            left.insert(rank);
        }
    }
}

/// The rank and the address of a process that may join, or the reason why it may not.
fn admit(
    ask: Ask,
    expected: usize,
    own: &[(String, String)],
    joined: &[Option<JoinedRank>],
) -> std::result::Result<(usize, SocketAddr), String> {
    let Ask::Join { rank, world_size, listens, settings } = ask else {
        return Err("a rank of another world".to_string());
    };
    if world_size != expected {
        return Err(format!("rank {rank} is of a world of {world_size} ranks, rank 0 of one of {expected}"));
    }
    match joined.get(rank) {
        Some(None) if rank > 0 => {}
        Some(Some(JoinedRank { address, .. })) => {
            return Err(format!("two processes are rank {rank}: one listens at {address}, one at {listens}"));
        }
        _ => {
            return Err(format!("a process at {listens} is rank {rank}, which rank 0 is or the world lacks"));
        }
    }
    match difference(own, &settings) {
        Some((name, own, other)) => Err(format!(
            "rank {rank} has {name} {other}, but rank 0 has {own}; start all ranks with the same settings"
        )),
        None => Ok((rank, listens)),
    }
}

/// The first setting that differs, with the value of rank 0 and of the other rank.
fn difference(own: &[(String, String)], other: &[(String, String)]) -> Option<(String, String, String)> {
    let value = |of: &[(String, String)], name: &str| {
        of.iter().find(|(n, _)| n == name).map_or("none".to_string(), |(_, value)| value.clone())
    };
    let names = own.iter().chain(other).map(|(name, _)| name);
    names.map(|name| (name.clone(), value(own, name), value(other, name))).find(|(_, a, b)| a != b)
}

/// Any other rank: connects to rank 0, receives the addresses of the others, and connects to each.
fn attend(join: Join, deadline: Instant) -> Result<Streams> {
    let Launch { rank, world_size, master_addr, master_port, .. } = join.launch;
    let rank = *rank;
    let world_size = *world_size;
    let key = Key::new(join.secret.as_ref());
    let patience = Patience { until: deadline, alive: join.alive };
    let master = || format!("rank 0 at {master_addr}:{master_port}");
    let stream = match reach(|| resolve(master_addr, *master_port), &patience)? {
        Ok(stream) => stream,
        Err(e) => bail!("cannot reach {} within {:?}: {e}", master(), join.timeouts.rendezvous),
    };
    // This process has an address at its end of the connection to rank 0; other ranks can reach it there, too.
    let listener = TcpListener::bind((stream.local_addr()?.ip(), 0))?;
    let own = listener.local_addr()?;
    let listens = SocketAddr::new(own.ip().to_canonical(), own.port());
    let request = Ask::Join { rank, world_size, listens, settings: join.settings.clone() };
    let longer = Patience { until: deadline + LATER, alive: join.alive };
    let said =
        ask(&stream, &key, &request, &longer).and_then(|exchange| hear_answer(&stream, &exchange, &longer));
    let (world, addresses) = match said {
        Ok(Answer::Welcome { world, addresses }) if addresses.len() + 1 == world_size => (world, addresses),
        Ok(_) => bail!("{} answers for another world", master()),
        Err(e) => bail!("{} {}", master(), complaint(&e)),
    };
    let mut links =
        Links { rank, key: key.of_world(&world), streams: (0..world_size).map(|_| None).collect() };
    links.streams[0] = Some(stream);
    for (low, address) in (1..rank).zip(&addresses) {
        links.streams[low] = Some(links.reach(low, *address, &patience)?);
    }
    links.accept(listener, &patience)?;
    Ok(links.streams)
}

/// The error of a host; it follows the host's name in a message.
fn complaint(e: &std::io::Error) -> String {
    match e.kind() {
        std::io::ErrorKind::PermissionDenied => format!("says: {e}"),
        _ => format!("ended, or is no rank of this program: {e}"),
    }
}

/// Makes a rank's connections to the others.
struct Links {
    rank: usize,
    key: Key,
    streams: Streams,
}

impl Links {
    /// Connects to a lower rank.
    fn reach(&self, to: usize, address: SocketAddr, patience: &Patience) -> Result<TcpStream> {
        let stream = match reach(|| Ok(vec![address]), patience)? {
            Ok(stream) => stream,
            Err(e) => bail!("cannot reach rank {to} at {address}: {e}"),
        };
        let said = ask(&stream, &self.key, &Ask::Link { rank: self.rank }, patience)
            .and_then(|exchange| hear_answer(&stream, &exchange, patience));
        match said {
            Ok(Answer::Linked) => Ok(stream),
            Ok(_) => bail!("rank {to} at {address} is of another world"),
            Err(e) => bail!("rank {to} at {address} {}", complaint(&e)),
        }
    }

    /// Accepts the connections of the higher ranks.
    fn accept(&mut self, listener: TcpListener, patience: &Patience) -> Result<()> {
        let mut admission = Admission::new(vec![listener], &self.key)?;
        while let Some(missing) = (self.rank + 1..self.streams.len()).find(|&r| self.streams[r].is_none()) {
            let Some(Guest { stream, from, ask, exchange }) =
                admission.next(patience.until, patience.alive)?
            else {
                bail!("rank {missing} did not connect in time{}", admission.report())
            };
            match ask {
                Ask::Link { rank }
                    if rank > self.rank && self.streams.get(rank).is_some_and(Option::is_none) =>
                {
                    answer(&stream, &exchange, &Answer::Linked)?;
                    self.streams[rank] = Some(stream);
                }
                _ => admission.turn_away(&stream, from, "no rank of this world that is missing here"),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let settings = |values: &[(&str, &str)]| -> Vec<(String, String)> {
            values.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
        };
        let own = settings(&[("`tp`", "2"), ("`dtype`", "f32")]);
        assert_eq!(difference(&own, &own), None);
        let differs = |other: &[(&str, &str)]| difference(&own, &settings(other)).unwrap();
        let named =
            |name: &str, own: &str, other: &str| (name.to_string(), own.to_string(), other.to_string());
        assert_eq!(differs(&[("`tp`", "2"), ("`dtype`", "bf16")]), named("`dtype`", "f32", "bf16"));
        assert_eq!(differs(&[("`tp`", "2")]), named("`dtype`", "f32", "none"));
        assert_eq!(differs(&[("`tp`", "2"), ("`dtype`", "f32"), ("`dp`", "3")]), named("`dp`", "none", "3"));
    }
}
