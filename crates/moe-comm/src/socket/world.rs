//! State that all groups of one process share: the connections, the data that has arrived, the first failure.

use std::io::{self, BufReader, ErrorKind};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::Result;

use crate::error::CommError;
use crate::lock::lock;
use crate::round::foreign;
use crate::round::wait::{Outcome, Stop, sleep};
use crate::socket::frame::{Begun, Frame, Frames, Outgoing};
use crate::socket::inbox::Inbox;
use crate::socket::link::{Hearing, Link, Silence, interval};

/// Bytes of data that may be read before it is checked that there is room for them.
const LITTLE: u64 = 1 << 20;

/// Why a rank of an earlier generation is lost, if this rank learns it only from the ranks of the new one.
const LEFT_OUT: &str = "the other ranks went on without it";

/// How long a rank that cannot write waits until the reason arrives.
const REASON: Duration = Duration::from_secs(1);

/// The world as one process sees it.
pub(super) struct World {
    pub rank: usize,
    pub timeout: Duration,
    /// Indexed by rank; there is no link from a rank to itself.
    links: Vec<Option<Link>>,
    failure: OnceLock<String>,
    /// How the world survives the loss of replicas, if it does.
    survival: OnceLock<Survival>,
    /// Why each generation has ended; each but the last one has lost a rank.
    ends: Vec<OnceLock<String>>,
    pub inbox: Mutex<Inbox>,
    pub changed: Condvar,
    groups: AtomicU64,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "World(rank {} of {})", self.rank, self.links.len())
    }
}

/// How a world survives the loss of replicas.
#[derive(Clone, Copy, Debug)]
pub(super) struct Survival {
    /// The number of ranks of a replica.
    pub replica: usize,
    /// Whether replicas share collectives. Then all of them give up what they do, and form a new generation.
    pub regroups: bool,
}

/// Keeps the connections open. When the last clone is dropped, this rank says goodbye.
#[derive(Debug)]
pub(super) struct Member(pub Arc<World>);

impl Drop for Member {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl World {
    /// Makes the world of `rank` with a connection to every other rank, and a reading thread for each.
    pub fn start(rank: usize, streams: Vec<Option<TcpStream>>, timeout: Duration) -> Result<Arc<Member>> {
        let links = streams.into_iter().map(|stream| stream.map(|s| Link::new(s, timeout)).transpose());
        let links = links.collect::<io::Result<Vec<_>>>()?;
        let readers = links.iter().map(|link| link.as_ref().map(Link::reader).transpose());
        let readers = readers.collect::<io::Result<Vec<_>>>()?;
        let world = Arc::new(Self {
            rank,
            timeout,
            inbox: Mutex::new(Inbox::new(links.len())),
            ends: links.iter().map(|_| OnceLock::new()).collect(),
            links,
            failure: OnceLock::new(),
            survival: OnceLock::new(),
            changed: Condvar::new(),
            groups: AtomicU64::new(1),
        });
        let member = Arc::new(Member(world.clone()));
        for (from, stream) in readers.into_iter().enumerate() {
            let Some(stream) = stream else { continue };
            let world = world.clone();
            let name = format!("from-rank-{from}");
            thread::Builder::new().name(name).spawn(move || world.read(from, stream))?;
        }
        Ok(member)
    }

    pub fn size(&self) -> usize {
        self.links.len()
    }

    /// A new id for a group that this rank leads. No other rank uses the same id.
    pub fn new_group(&self) -> u64 {
        (self.rank as u64) << 40 | self.groups.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether a rank can have given this id to a group that it leads.
    pub fn is_group_of(rank: usize, group: u64) -> bool {
        group >> 40 == rank as u64 && group & ((1 << 40) - 1) > 0
    }

    /// The first failure.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// The first failure as text for this rank's errors.
    pub fn report(&self) -> String {
        self.tell(self.failure().unwrap_or("unknown failure"))
    }

    fn tell(&self, cause: &str) -> String {
        format!("rank {} of {}: {cause}", self.rank, self.size())
    }

    /// Fails if the world has failed, or if this generation of it has ended.
    pub fn check(&self, generation: usize) -> Result<()> {
        let cause = self.failure().or_else(|| self.why_ended(generation));
        cause.map_or(Ok(()), |cause| Err(CommError(self.tell(cause)).into()))
    }

    /// Fails every group of every rank, unless the world has failed before.
    pub fn fail(&self, cause: String) {
        if self.failure.set(cause).is_err() {
            return;
        }
        self.notify();
        self.last_words(&Outgoing::abort(self.failure().unwrap_or_default()));
    }

    /// From now on the loss of a rank ends its replica alone: ranks that follow each other.
    pub fn survive(&self, survival: Survival) {
        let _ = self.survival.set(Survival { replica: survival.replica.max(1), ..survival });
    }

    fn regroups(&self) -> bool {
        self.survival.get().is_some_and(|survival| survival.regroups)
    }

    /// Why a generation has ended, if it has.
    pub fn why_ended(&self, generation: usize) -> Option<&str> {
        self.ends.get(generation)?.get().map(String::as_str)
    }

    /// The first generation that has not ended.
    pub fn next_generation(&self) -> usize {
        self.ends.iter().take_while(|end| end.get().is_some()).count()
    }

    /// Ends a generation on all ranks, if the world forms new ones. Otherwise the world fails.
    pub fn give_up(&self, generation: usize, why: String) {
        if !self.regroups() {
            return self.fail(why);
        }
        if self.end(generation, &why) {
            self.notify();
            self.tell_end(generation, &why);
        }
    }

    /// Notes that a generation has ended. Returns whether that is new.
    fn end(&self, generation: usize, why: &str) -> bool {
        let ends = self.ends.iter().take(generation + 1);
        ends.map(|end| end.set(why.to_string()).is_ok()).last().unwrap_or(false)
    }

    fn tell_end(&self, generation: usize, why: &str) {
        let frame = Outgoing::end(generation, why);
        for (rank, link) in self.links.iter().enumerate() {
            let Some(link) = link.as_ref().filter(|_| !lock(&self.inbox).has_ended(rank)) else { continue };
            // If the connection broke, its reading thread reports that.
            let _ = link.send(&frame, &[]);
        }
    }

    /// Begins a generation of these ranks. All others are lost.
    pub fn form(&self, generation: usize, members: &[usize]) {
        let others: Vec<usize> = (0..self.size()).filter(|rank| !members.contains(rank)).collect();
        let (others, ended) = {
            let mut inbox = lock(&self.inbox);
            inbox.formed = (generation, members.to_vec());
            let why = members.iter().find_map(|&rank| inbox.why_lost(rank)).map(str::to_string);
            let ended = why.filter(|why| self.end(generation, why));
            (others.into_iter().filter(|&rank| inbox.lose(rank, LEFT_OUT)).collect::<Vec<_>>(), ended)
        };
        if let Some(why) = ended {
            self.tell_end(generation, &why);
        }
        self.shut_out(&others, LEFT_OUT);
    }

    /// Tells ranks that are lost to end.
    fn shut_out(&self, ranks: &[usize], why: &str) {
        let links = ranks.iter().filter_map(|&rank| self.links.get(rank)?.as_ref());
        links.for_each(|link| link.close(&Outgoing::abort(why)));
    }

    /// Another rank has ended without a goodbye, or nothing can be expected of it. If the world survives the loss of
    /// replicas, and this is not the replica of this rank or of rank 0, the ranks of that replica are lost, and the
    /// ones that still run are told to end; if replicas share collectives, the generation ends. Otherwise the world
    /// fails.
    pub fn lose(&self, rank: usize, why: String) {
        let Some(&Survival { replica: size, regroups }) = self.survival.get() else { return self.fail(why) };
        let replica = rank / size;
        if replica == 0 || replica == self.rank / size {
            return self.fail(why);
        }
        let ranks = replica * size..((replica + 1) * size).min(self.links.len());
        let (lost, ended) = {
            let mut inbox = lock(&self.inbox);
            let (generation, members) = &inbox.formed;
            let ended = Some(*generation).filter(|_| regroups && ranks.clone().any(|r| members.contains(&r)));
            // A thread that learns that the rank is lost finds that the generation has ended, too.
            let ended = ended.filter(|&generation| self.end(generation, &why));
            (ranks.filter(|&rank| inbox.lose(rank, &why)).collect::<Vec<_>>(), ended)
        };
        self.changed.notify_all();
        if let Some(generation) = ended {
            self.tell_end(generation, &why);
        }
        self.shut_out(&lost, &why);
    }

    /// Writes a frame to a rank. A rank that has left normally or was lost gets nothing; callers that wait for the rank
    /// learn that. A rank that takes nothing is [lost](Self::lose).
    pub fn send(&self, to: usize, frame: &Outgoing, data: &[u8]) -> Outcome<()> {
        let Some(link) = self.links.get(to).and_then(Option::as_ref) else { return Ok(()) };
        if lock(&self.inbox).why_lost(to).is_some() {
            return Ok(());
        }
        let Err(e) = link.send(frame, data) else { return Ok(()) };
        // Usually the rank has failed, and a frame with the reason is on its way.
        let start = Instant::now();
        let mut inbox = lock(&self.inbox);
        loop {
            if self.failure().is_some() {
                return Err(Stop::Failed);
            }
            if inbox.has_ended(to) {
                return Ok(());
            }
            let left = REASON.saturating_sub(start.elapsed());
            if left.is_zero() {
                break;
            }
            inbox = sleep(&self.changed, inbox, left);
        }
        drop(inbox);
        let cause = match e.kind() {
            // That is not the other rank's fault.
            ErrorKind::InvalidInput => return Err(Stop::Cause(e.to_string())),
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                format!("rank {to} stalled: it took nothing for {:?}", self.timeout)
            }
            _ => format!("rank {to} cannot be reached: {e}"),
        };
        self.lose(to, cause);
        Err(Stop::Failed)
    }

    /// Says goodbye, unless the world has failed.
    fn close(&self) {
        lock(&self.inbox).over = true;
        self.changed.notify_all();
        if self.failure().is_none() {
            self.last_words(&Outgoing::Bye);
        }
    }

    /// Pings the given ranks if they have been silent. The caller waits for these ranks. A rank that does not answer
    /// has stopped, so nothing can be expected of it: it is [lost](Self::lose).
    pub fn look_after(&self, ranks: &[usize]) {
        for &rank in ranks {
            let Some(link) = self.links.get(rank).and_then(Option::as_ref) else { continue };
            match link.silence(self.timeout) {
                Silence::Short => {}
                // If the connection broke, its reading thread reports that.
                Silence::Ask => drop(link.send_now(&Outgoing::Ping)),
                Silence::Stalled if lock(&self.inbox).has_ended(rank) => {}
                Silence::Stalled => {
                    let limit = self.timeout;
                    self.lose(
                        rank,
                        format!("rank {rank} stalled: it has given no sign of life for {limit:?}"),
                    );
                }
            }
        }
    }

    /// How long to sleep between two checks of silent ranks.
    pub fn look_interval(&self) -> Duration {
        interval(self.timeout)
    }

    fn last_words(&self, frame: &Outgoing) {
        self.links.iter().flatten().for_each(|link| link.close(frame));
    }

    /// Makes waiting threads check again. The lock is taken first, so that no thread can miss this between its check
    /// and its sleep.
    fn notify(&self) {
        drop(lock(&self.inbox));
        self.changed.notify_all();
    }

    /// Receives a rank's frames until the rank ends.
    fn read(&self, from: usize, stream: Hearing) {
        let mut frames = Frames::new(BufReader::with_capacity(1 << 16, stream));
        let end = loop {
            match self.read_one(from, &mut frames) {
                Ok(true) => {}
                Ok(false) => break format!("rank {from} died: its connection closed"),
                Err(e) if e.kind() == ErrorKind::InvalidData => {
                    break format!("rank {from} broke the protocol: {e}");
                }
                Err(e) => break format!("rank {from} died or cannot be reached: {e}"),
            }
        };
        let (gone, over) = {
            let inbox = lock(&self.inbox);
            (inbox.is_gone(from), inbox.over)
        };
        if !gone && !over {
            self.lose(from, end);
        }
    }

    /// Receives a frame; false if there are no more.
    fn read_one(&self, from: usize, frames: &mut Frames<BufReader<Hearing>>) -> io::Result<bool> {
        let wrong = |what: String| io::Error::new(ErrorKind::InvalidData, what);
        let Some(begun) = frames.begin()? else { return Ok(false) };
        let Begun { frame, bytes, .. } = &begun;
        // Large data is refused before it is read if there is no room for it. Little data is checked where it is
        // stored.
        if *bytes > LITTLE {
            lock(&self.inbox).room(from, frame, *bytes).map_err(wrong)?;
        }
        let frame = frames.finish(begun)?;
        self.take(from, frame).map_err(wrong)?;
        Ok(true)
    }

    fn take(&self, from: usize, frame: Frame) -> std::result::Result<(), String> {
        {
            let mut inbox = lock(&self.inbox);
            match frame {
                Frame::Post { group, head, data } => inbox.post(group, from, (head, data))?,
                Frame::Leave { group } => inbox.leave(group, from)?,
                // All that wait for a lost rank are told that nothing comes.
                Frame::Message(..) if inbox.why_lost(from).is_some() => {}
                Frame::Message(generation, message) => inbox.message(from, generation, message)?,
                Frame::End(..) if !self.regroups() => {
                    return Err("it ended the only generation of this world".to_string());
                }
                // A rank that goes on has told that its generation has ended before others form the next one.
                Frame::End(generation, _) if generation > self.next_generation() => {
                    return Err(format!(
                        "it ended generation {generation}; expected at most {}",
                        self.next_generation()
                    ));
                }
                Frame::End(generation, why) => drop(self.end(generation, &foreign(&why))),
                Frame::Bye => inbox.bye(from),
                Frame::Abort(cause) => {
                    drop(inbox);
                    self.lose(from, foreign(&cause));
                    return Ok(());
                }
                Frame::Ping => {
                    drop(inbox);
                    if let Some(link) = self.links.get(from).and_then(Option::as_ref) {
                        // This thread must not wait. If the connection broke, the end of the stream reports that.
                        let _ = link.send_now(&Outgoing::Pong);
                    }
                    return Ok(());
                }
                // Its arrival was noted; a pong carries nothing else.
                Frame::Pong => return Ok(()),
            }
        }
        self.changed.notify_all();
        Ok(())
    }
}
