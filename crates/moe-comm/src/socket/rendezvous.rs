//! How the processes of a world find each other: through the address of rank 0.
//!
//! ```text
//! rank r                          rank 0
//! listen on a free port
//! connect (again and again) ────► accept
//! Join {rank, size, address,  ──► compare with its own settings;
//!       settings}                 a difference is an error on all ranks
//!          ◄── Welcome {secret, addresses of all}, once all ranks are here
//! connect to ranks 1..r, with the secret; accept ranks r+1..
//! ```
//! The connection to rank 0 stays. What does not speak this protocol is turned away, and the world
//! forms without it.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{Result, bail};

use crate::launch::Launch;
use crate::round::label;
use crate::socket::comm::SocketComm;
use crate::socket::handshake::{Answer, Door, Hello, hear, say};
use crate::socket::timeouts::SocketTimeouts;

/// Between two attempts to reach a rank.
const PAUSE: Duration = Duration::from_millis(100);

/// How a process joins its world.
pub struct Join<'a> {
    /// Its place, and where rank 0 is.
    pub launch: &'a Launch,
    /// What must be equal on all ranks, by name: a difference is an error that names it.
    pub settings: Vec<(String, String)>,
    /// How long to wait.
    pub timeouts: SocketTimeouts,
    /// Where rank 0 listens, if it does already; else it binds the master's port.
    pub listener: Option<TcpListener>,
    /// Asked now and then while ranks are missing: an error ends the wait.
    pub alive: &'a dyn Fn() -> Result<()>,
}

impl<'a> Join<'a> {
    /// With the default timeouts.
    pub fn new(launch: &'a Launch, settings: Vec<(String, String)>) -> Self {
        Self { launch, settings, timeouts: SocketTimeouts::default(), listener: None, alive: &|| Ok(()) }
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
        let (rank, timeout) = (join.launch.rank, join.timeouts.collective);
        let Some(deadline) = Instant::now().checked_add(join.timeouts.rendezvous) else {
            bail!("the time limit of {:?} for all ranks to appear is too long", join.timeouts.rendezvous)
        };
        let streams = match rank {
            0 => host(join, deadline),
            _ => attend(join, deadline),
        };
        match streams {
            Ok(streams) => SocketComm::start(rank, streams, timeout),
            Err(e) => bail!("rank {rank} cannot form the world: {}", crate::round::plain(&e)),
        }
    }
}

type Streams = Vec<Option<TcpStream>>;

/// Rank 0: lets all others in, then tells each where the others are.
fn host(join: Join, deadline: Instant) -> Result<Streams> {
    let world_size = join.launch.world_size;
    let mut seats: Vec<Option<(TcpStream, SocketAddr)>> = (0..world_size).map(|_| None).collect();
    let seated = seat_all(join, deadline, &mut seats);
    let guests = || seats.iter().flatten();
    if let Err(e) = seated {
        let why = crate::round::plain(&e);
        guests().for_each(|(stream, _)| drop(say(stream, &Answer::Refused(why.clone()))));
        return Err(e);
    }
    let secret = RandomState::new().build_hasher().finish();
    let addresses: Vec<SocketAddr> = guests().map(|(_, address)| *address).collect();
    for (stream, _) in guests() {
        say(stream, &Answer::Welcome { secret, addresses: addresses.clone() })?;
    }
    Ok(seats.into_iter().map(|seat| seat.map(|(stream, _)| stream)).collect())
}

fn seat_all(join: Join, deadline: Instant, seats: &mut [Option<(TcpStream, SocketAddr)>]) -> Result<()> {
    let Launch { master_addr, master_port, world_size, .. } = join.launch;
    let listener = match join.listener {
        Some(listener) => listener,
        None => match bind(master_addr, *master_port) {
            Ok(listener) => listener,
            Err(e) => bail!("cannot listen on port {master_port} (MASTER_PORT): {e}; choose another one"),
        },
    };
    let mut door = Door::new(listener)?;
    loop {
        let missing: Vec<usize> =
            (1..*world_size).filter(|&r| seats.get(r).is_none_or(Option::is_none)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let Some((stream, hello)) = door.next(deadline, join.alive)? else {
            let (missing, limit) = (label(&missing, &[]), join.timeouts.rendezvous);
            let strangers = door.strangers();
            bail!("{missing} did not appear within {limit:?} (MOE_RENDEZVOUS_TIMEOUT){strangers}")
        };
        match admit(hello, *world_size, &join.settings, seats) {
            Ok((rank, address)) => {
                if let Some(seat) = seats.get_mut(rank) {
                    *seat = Some((stream, address));
                }
            }
            Err(Refusal::Stranger(why)) => door.turn_away(&stream, &why),
            Err(Refusal::World(why)) => {
                say(&stream, &Answer::Refused(why.clone()))?;
                bail!("{why}")
            }
        }
    }
}

enum Refusal {
    /// It is not one of ours: the world forms without it.
    Stranger(String),
    /// The world cannot form.
    World(String),
}

/// The rank and the address of a process that may join.
fn admit(
    hello: Hello,
    expected: usize,
    own: &[(String, String)],
    seats: &[Option<(TcpStream, SocketAddr)>],
) -> std::result::Result<(usize, SocketAddr), Refusal> {
    let Hello::Join { rank, world_size, listens, settings } = hello else {
        return Err(Refusal::Stranger("a rank of another world".to_string()));
    };
    let world = |why| Err(Refusal::World(why));
    if world_size != expected {
        return world(format!(
            "rank {rank} is of a world of {world_size} ranks, rank 0 of one of {expected}"
        ));
    }
    match seats.get(rank) {
        Some(None) if rank > 0 => {}
        Some(Some((_, other))) => {
            return world(format!("two processes are rank {rank}: one listens at {other}, one at {listens}"));
        }
        _ => {
            return world(format!(
                "a process at {listens} is rank {rank}, which rank 0 is or the world lacks"
            ));
        }
    }
    match difference(own, &settings) {
        Some((name, own, other)) => world(format!(
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
    let master = || format!("rank 0 at {master_addr}:{master_port}");
    let stream = match reach(|| (master_addr.as_str(), *master_port).to_socket_addrs(), deadline, join.alive)?
    {
        Ok(stream) => stream,
        Err(e) => bail!("cannot reach {} within {:?}: {e}", master(), join.timeouts.rendezvous),
    };
    let listener = bind(master_addr, 0)?;
    let ip = stream.local_addr()?.ip().to_canonical();
    let listens = SocketAddr::new(ip, listener.local_addr()?.port());
    let settings = join.settings.clone();
    let hello = Hello::Join { rank: *rank, world_size: *world_size, listens, settings };
    // Rank 0 waits for the others until its own deadline, which may be a little later.
    let patience = deadline.saturating_duration_since(Instant::now()) + Duration::from_secs(10);
    let answer = say(&stream, &hello).and_then(|()| hear(&stream, patience));
    let (secret, addresses) = match answer {
        Ok(Answer::Welcome { secret, addresses }) if addresses.len() + 1 == *world_size => {
            (secret, addresses)
        }
        Ok(Answer::Refused(why)) => bail!("{} says: {why}", master()),
        Ok(_) => bail!("{} answers for another world", master()),
        Err(e) => bail!("{} ended, or is no rank of this program: {e}", master()),
    };
    // A rank on the host of rank 0 may only know itself by its loopback address.
    let host = stream.peer_addr()?.ip().to_canonical();
    let address = |a: &SocketAddr| match a.ip().is_loopback() {
        true => SocketAddr::new(host, a.port()),
        false => *a,
    };
    let mut streams: Streams = (0..*world_size).map(|_| None).collect();
    streams[0] = Some(stream);
    for (low, a) in (1..*rank).zip(&addresses) {
        streams[low] = Some(link(low, address(a), *rank, secret, deadline, join.alive)?);
    }
    let mut door = Door::new(listener)?;
    while let Some(missing) = (rank + 1..*world_size).find(|&r| streams[r].is_none()) {
        let Some((stream, hello)) = door.next(deadline, join.alive)? else {
            bail!("rank {missing} did not connect in time{}", door.strangers())
        };
        match hello {
            Hello::Link { rank: high, secret: theirs }
                if theirs == secret && high > *rank && streams.get(high).is_some_and(Option::is_none) =>
            {
                say(&stream, &Answer::Linked)?;
                streams[high] = Some(stream);
            }
            _ => door.turn_away(&stream, "a process that is no rank of this world"),
        }
    }
    Ok(streams)
}

/// Connects to a lower rank.
fn link(
    to: usize,
    address: SocketAddr,
    rank: usize,
    secret: u64,
    deadline: Instant,
    alive: &dyn Fn() -> Result<()>,
) -> Result<TcpStream> {
    let stream = match reach(|| Ok([address].into_iter()), deadline, alive)? {
        Ok(stream) => stream,
        Err(e) => bail!("cannot reach rank {to} at {address}: {e}"),
    };
    let patience = deadline.saturating_duration_since(Instant::now());
    match say(&stream, &Hello::Link { rank, secret }).and_then(|()| hear(&stream, patience)) {
        Ok(Answer::Linked) => Ok(stream),
        Ok(Answer::Refused(why)) => bail!("rank {to} at {address} refuses: {why}"),
        Ok(_) => bail!("rank {to} at {address} is of another world"),
        Err(e) => bail!("rank {to} at {address} ended, or is no rank of this program: {e}"),
    }
}

/// Connects to the first address that answers, until the deadline. The outer error is `alive`'s.
fn reach<A: Iterator<Item = SocketAddr>>(
    resolve: impl Fn() -> io::Result<A>,
    deadline: Instant,
    alive: &dyn Fn() -> Result<()>,
) -> Result<io::Result<TcpStream>> {
    loop {
        let mut last = io::Error::other("its name has no address");
        match resolve() {
            Ok(addresses) => {
                for address in addresses {
                    let left = deadline.saturating_duration_since(Instant::now());
                    let attempt = left.clamp(Duration::from_millis(1), Duration::from_secs(5));
                    match TcpStream::connect_timeout(&address, attempt) {
                        // A port that nobody listens on may be given to the connection itself.
                        Ok(stream) if stream.local_addr().ok() != stream.peer_addr().ok() => {
                            return Ok(Ok(stream));
                        }
                        Ok(_) => last = io::ErrorKind::ConnectionRefused.into(),
                        Err(e) => last = e,
                    }
                }
            }
            Err(e) => last = e,
        }
        alive()?;
        if Instant::now() + PAUSE >= deadline {
            return Ok(Err(last));
        }
        thread::sleep(PAUSE);
    }
}

/// Listens where all ranks can reach it: on the loopback interface if the master is named by it,
/// else on all, IPv6 and IPv4.
fn bind(master_addr: &str, port: u16) -> io::Result<TcpListener> {
    let literal: Option<IpAddr> = match master_addr {
        "localhost" => Some(Ipv4Addr::LOCALHOST.into()),
        name => name.trim_matches(['[', ']']).parse().ok(),
    };
    match literal {
        Some(ip) if ip.is_loopback() => TcpListener::bind((ip, port)),
        _ => TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
            .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))),
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

    #[test]
    fn listeners_face_the_master() {
        let ip = |master: &str| bind(master, 0).unwrap().local_addr().unwrap().ip();
        assert!(ip("127.0.0.1").is_loopback() && ip("localhost").is_loopback());
        assert!(ip("host0").is_unspecified() && ip("10.1.2.3").is_unspecified());
    }
}
