//! How the processes of a world find each other: through the address of rank 0.
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
//! The connection to rank 0 stays. Every connection begins with a [`handshake`](super::handshake) in which both sides prove that
//! they know the world's secret. What does not is a stranger: it is refused, told why, and the world forms without it. What does and
//! has other settings is a rank that was started wrongly, which is an error on all ranks. A world without a secret cannot tell the
//! two apart, so there it is refused as a stranger.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use candle_core::{Result, bail};

use crate::error::plain;
use crate::launch::Launch;
use crate::round::{foreign, label};
use crate::socket::comm::SocketComm;
use crate::socket::door::{Door, Guest};
use crate::socket::handshake::{Answer, Ask, Patience, answer, ask, hear_answer, refuse};
use crate::socket::reach::{listen, reach, resolve};
use crate::socket::secret::{Exchange, Key, WorldSecret, nonce};
use crate::socket::timeouts::SocketTimeouts;

/// Rank 0 waits for the others until its own deadline, which may be a little later than another rank's.
const LATER: Duration = Duration::from_secs(10);

/// How a process joins its world.
pub struct Join<'a> {
    /// Its place, and where rank 0 is.
    pub launch: &'a Launch,
    /// What must be equal on all ranks, by name: a difference is an error that names it.
    pub settings: Vec<(String, String)>,
    /// What only the ranks of this world know. Without it any process that says the right settings gets a seat.
    pub secret: Option<WorldSecret>,
    /// How long to wait.
    pub timeouts: SocketTimeouts,
    /// Where rank 0 listens, if it does already; else it binds the master's port.
    pub listener: Option<TcpListener>,
    /// Asked now and then while ranks are missing: an error ends the wait.
    pub alive: &'a dyn Fn() -> Result<()>,
}

impl<'a> Join<'a> {
    /// With the default timeouts and without a secret.
    pub fn new(launch: &'a Launch, settings: Vec<(String, String)>) -> Self {
        let timeouts = SocketTimeouts::default();
        Self { launch, settings, secret: None, timeouts, listener: None, alive: &|| Ok(()) }
    }
}

impl SocketComm {
    /// Forms the world of `join.launch` with the other processes, and is its rank there.
    ///
    /// # Errors
    /// Ranks that do not appear in time, that have other settings or the same number; a master that
    /// cannot be reached, or is no rank of this program; a port that is taken. All ranks that have
    /// appeared get an error in bounded time.
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

/// A rank that has come to rank 0, and waits for the others.
struct Seat {
    stream: TcpStream,
    exchange: Exchange,
    /// Where it listens.
    address: SocketAddr,
}

impl Seat {
    /// Whether its process has ended since it came.
    fn is_left(&self) -> bool {
        let left = self.stream.set_nonblocking(true).map(|()| match self.stream.peek(&mut [0]) {
            Ok(bytes) => bytes == 0,
            Err(e) => e.kind() != std::io::ErrorKind::WouldBlock,
        });
        let back = self.stream.set_nonblocking(false);
        back.is_err() || left.unwrap_or(true)
    }
}

/// Rank 0: lets all others in, then tells each where the others are.
fn host(join: Join, deadline: Instant) -> Result<Streams> {
    let world_size = join.launch.world_size;
    let mut seats: Vec<Option<Seat>> = (0..world_size).map(|_| None).collect();
    let seated = seat_all(join, deadline, &mut seats);
    let guests = || seats.iter().flatten();
    if let Err(e) = seated {
        let why = plain(&e);
        guests().for_each(|seat| drop(refuse(&seat.stream, &why)));
        return Err(e);
    }
    let world = nonce()?;
    let addresses: Vec<SocketAddr> = guests().map(|seat| seat.address).collect();
    for Seat { stream, exchange, .. } in guests() {
        answer(stream, exchange, &Answer::Welcome { world, addresses: addresses.clone() })?;
    }
    Ok(seats.into_iter().map(|seat| seat.map(|seat| seat.stream)).collect())
}

fn seat_all(join: Join, deadline: Instant, seats: &mut [Option<Seat>]) -> Result<()> {
    let Launch { master_addr, master_port, world_size, .. } = join.launch;
    let key = Key::new(join.secret.as_ref());
    let listeners = match join.listener {
        Some(listener) => vec![listener],
        None => listen(master_addr, *master_port)?,
    };
    let mut door = Door::new(listeners, &key)?;
    let mut left = BTreeSet::new();
    loop {
        vacate(seats, &mut left);
        let missing: Vec<usize> =
            (1..*world_size).filter(|&r| seats.get(r).is_none_or(Option::is_none)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let Some(Guest { stream, from, ask, exchange }) = door.next(deadline, join.alive)? else {
            let missing = label(&missing, &[]);
            let limit = join.timeouts.rendezvous;
            let ended: Vec<usize> = left.into_iter().filter(|&rank| seats[rank].is_none()).collect();
            let ended = match ended.is_empty() {
                true => String::new(),
                false => format!("; {} came and ended", label(&ended, &[])),
            };
            bail!(
                "{missing} did not appear within {limit:?} (MOE_RENDEZVOUS_TIMEOUT){}{ended}",
                door.report()
            )
        };
        vacate(seats, &mut left);
        match admit(ask, *world_size, &join.settings, seats) {
            Ok((rank, address)) => {
                if let Some(seat) = seats.get_mut(rank) {
                    *seat = Some(Seat { stream, exchange, address });
                }
            }
            // It may be what is left of another run: only a secret tells that it is none.
            Err(why) if !key.secret => door.turn_away(&stream, from, &foreign(&why)),
            Err(why) => {
                let why = foreign(&why);
                // It may be gone already.
                let _ = refuse(&stream, &why);
                bail!("{why}")
            }
        }
    }
}

/// Frees the seats of processes that have ended while they waited: they may be started again.
fn vacate(seats: &mut [Option<Seat>], left: &mut BTreeSet<usize>) {
    for (rank, seat) in seats.iter_mut().enumerate() {
        if seat.take_if(|seat| seat.is_left()).is_some() {
            left.insert(rank);
        }
    }
}

/// The rank and the address of a process that may join, or why it may not.
fn admit(
    ask: Ask,
    expected: usize,
    own: &[(String, String)],
    seats: &[Option<Seat>],
) -> std::result::Result<(usize, SocketAddr), String> {
    let Ask::Join { rank, world_size, listens, settings } = ask else {
        return Err("a rank of another world".to_string());
    };
    if world_size != expected {
        return Err(format!("rank {rank} is of a world of {world_size} ranks, rank 0 of one of {expected}"));
    }
    match seats.get(rank) {
        Some(None) if rank > 0 => {}
        Some(Some(Seat { address, .. })) => {
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

/// The first setting that differs, with rank 0's and the other rank's value.
fn difference(own: &[(String, String)], other: &[(String, String)]) -> Option<(String, String, String)> {
    let value = |of: &[(String, String)], name: &str| {
        of.iter().find(|(n, _)| n == name).map_or("none".to_string(), |(_, value)| value.clone())
    };
    let names = own.iter().chain(other).map(|(name, _)| name);
    names.map(|name| (name.clone(), value(own, name), value(other, name))).find(|(_, a, b)| a != b)
}

/// Any other rank: reaches rank 0, learns where the others are, and connects to each.
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
    // The address by which this process reaches rank 0 is one by which others reach this process.
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

/// What is wrong with a host, to follow its name.
fn complaint(e: &std::io::Error) -> String {
    match e.kind() {
        std::io::ErrorKind::PermissionDenied => format!("says: {e}"),
        _ => format!("ended, or is no rank of this program: {e}"),
    }
}

/// A rank's connections to the others.
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

    /// Lets the higher ranks in.
    fn accept(&mut self, listener: TcpListener, patience: &Patience) -> Result<()> {
        let mut door = Door::new(vec![listener], &self.key)?;
        while let Some(missing) = (self.rank + 1..self.streams.len()).find(|&r| self.streams[r].is_none()) {
            let Some(Guest { stream, from, ask, exchange }) = door.next(patience.until, patience.alive)?
            else {
                bail!("rank {missing} did not connect in time{}", door.report())
            };
            match ask {
                Ask::Link { rank }
                    if rank > self.rank && self.streams.get(rank).is_some_and(Option::is_none) =>
                {
                    answer(&stream, &exchange, &Answer::Linked)?;
                    self.streams[rank] = Some(stream);
                }
                _ => door.turn_away(&stream, from, "no rank of this world that is missing here"),
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
        let own = settings(&[("--tp", "2"), ("--dtype", "f32")]);
        assert_eq!(difference(&own, &own), None);
        let differs = |other: &[(&str, &str)]| difference(&own, &settings(other)).unwrap();
        let named =
            |name: &str, own: &str, other: &str| (name.to_string(), own.to_string(), other.to_string());
        assert_eq!(differs(&[("--tp", "2"), ("--dtype", "bf16")]), named("--dtype", "f32", "bf16"));
        assert_eq!(differs(&[("--tp", "2")]), named("--dtype", "f32", "none"));
        assert_eq!(differs(&[("--tp", "2"), ("--dtype", "f32"), ("--dp", "3")]), named("--dp", "none", "3"));
    }
}
