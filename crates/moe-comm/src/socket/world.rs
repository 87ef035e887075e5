//! What all groups of one process share: the connections, what has arrived, the first failure.

use std::io::{self, BufReader, ErrorKind};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{Error, Result};

use crate::lock::lock;
use crate::round::foreign;
use crate::round::wait::{Outcome, Stop, sleep};
use crate::socket::frame::{Begun, Frame, Frames, Outgoing};
use crate::socket::inbox::Inbox;
use crate::socket::link::{Hearing, Link, Silence, interval};

/// Bytes of data that are read before it is known whether there is room for them.
const LITTLE: u64 = 1 << 20;

/// How long a rank that cannot write waits for the reason to arrive.
const REASON: Duration = Duration::from_secs(1);

/// One process's side of the world.
pub(super) struct World {
    pub rank: usize,
    pub timeout: Duration,
    /// By rank; none to itself.
    links: Vec<Option<Link>>,
    failure: OnceLock<String>,
    pub inbox: Mutex<Inbox>,
    pub changed: Condvar,
    groups: AtomicU64,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "World(rank {} of {})", self.rank, self.links.len())
    }
}

/// Keeps the connections open; the last one to be dropped says goodbye.
#[derive(Debug)]
pub(super) struct Member(pub Arc<World>);

impl Drop for Member {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl World {
    /// The world of `rank`, with a connection to every other rank, and a reader for each.
    pub fn start(rank: usize, streams: Vec<Option<TcpStream>>, timeout: Duration) -> Result<Arc<Member>> {
        let links = streams.into_iter().map(|stream| stream.map(|s| Link::new(s, timeout)).transpose());
        let links = links.collect::<io::Result<Vec<_>>>()?;
        let readers = links.iter().map(|link| link.as_ref().map(Link::reader).transpose());
        let readers = readers.collect::<io::Result<Vec<_>>>()?;
        let world = Arc::new(Self {
            rank,
            timeout,
            inbox: Mutex::new(Inbox::new(links.len())),
            links,
            failure: OnceLock::new(),
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

    /// The id of a group that this rank leads: no other rank gives the same.
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

    /// The first failure as this rank reports it.
    pub fn report(&self) -> String {
        format!("rank {} of {}: {}", self.rank, self.size(), self.failure().unwrap_or("unknown failure"))
    }

    /// The first failure as an error of this rank.
    pub fn error(&self) -> Error {
        Error::msg(self.report())
    }

    /// Fails every group of every rank, unless the world has failed before.
    pub fn fail(&self, cause: String) {
        if self.failure.set(cause).is_err() {
            return;
        }
        self.notify();
        self.last_words(&Outgoing::abort(self.failure().unwrap_or_default()));
    }

    /// Writes a frame to a rank. One that has left in order gets nothing: who waits for it learns that.
    pub fn send(&self, to: usize, frame: &Outgoing, data: &[u8]) -> Outcome<()> {
        let Some(link) = self.links.get(to).and_then(Option::as_ref) else { return Ok(()) };
        let Err(e) = link.send(frame, data) else { return Ok(()) };
        // Mostly the rank has failed, and says so in a frame that is on its way.
        let start = Instant::now();
        let mut inbox = lock(&self.inbox);
        loop {
            if self.failure().is_some() {
                return Err(Stop::Failed);
            }
            if inbox.is_gone(to) {
                return Ok(());
            }
            let left = REASON.saturating_sub(start.elapsed());
            if left.is_zero() {
                break;
            }
            inbox = sleep(&self.changed, inbox, left);
        }
        Err(Stop::Cause(match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                format!("rank {to} stalled: it took nothing for {:?}", self.timeout)
            }
            _ => format!("rank {to} cannot be reached: {e}"),
        }))
    }

    /// Says goodbye, unless the world has failed.
    fn close(&self) {
        lock(&self.inbox).over = true;
        self.changed.notify_all();
        if self.failure().is_none() {
            self.last_words(&Outgoing::Bye);
        }
    }

    /// Asks those of these ranks, which are waited for, that have been silent, whether they live.
    ///
    /// # Errors
    /// One that does not answer has stopped: nothing can be expected of it.
    pub fn look_after(&self, ranks: &[usize]) -> Outcome<()> {
        for &rank in ranks {
            let Some(link) = self.links.get(rank).and_then(Option::as_ref) else { continue };
            match link.silence(self.timeout) {
                Silence::Short => {}
                // A connection that broke is told by its reader.
                Silence::Ask => drop(link.send_now(&Outgoing::Ping)),
                Silence::Stalled if lock(&self.inbox).is_gone(rank) => {}
                Silence::Stalled => {
                    let limit = self.timeout;
                    return Err(Stop::Cause(format!(
                        "rank {rank} stalled: it has given no sign of life for {limit:?}"
                    )));
                }
            }
        }
        Ok(())
    }

    /// How long to sleep between two looks after ranks.
    pub fn look_interval(&self) -> Duration {
        interval(self.timeout)
    }

    fn last_words(&self, frame: &Outgoing) {
        self.links.iter().flatten().for_each(|link| link.close(frame));
    }

    /// Makes waiting threads look again. Locking first closes the gap between their look and sleep.
    fn notify(&self) {
        drop(lock(&self.inbox));
        self.changed.notify_all();
    }

    /// Takes a rank's frames until it ends.
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
            self.fail(end);
        }
    }

    /// Takes a frame; false if there are no more.
    fn read_one(&self, from: usize, frames: &mut Frames<BufReader<Hearing>>) -> io::Result<bool> {
        let wrong = |what: String| io::Error::new(ErrorKind::InvalidData, what);
        let Some(begun) = frames.begin()? else { return Ok(false) };
        let Begun { frame, bytes, .. } = &begun;
        // What has no place is not read; of little data that is soon enough found where they are kept.
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
                Frame::Message(message) => inbox.message(from, message)?,
                Frame::Bye => inbox.bye(from),
                Frame::Abort(cause) => {
                    drop(inbox);
                    self.fail(foreign(&cause));
                    return Ok(());
                }
                Frame::Ping => {
                    drop(inbox);
                    if let Some(link) = self.links.get(from).and_then(Option::as_ref) {
                        // This thread must not wait; a connection that broke is told by its end.
                        let _ = link.send_now(&Outgoing::Pong);
                    }
                    return Ok(());
                }
                // That it came is all that it says.
                Frame::Pong => return Ok(()),
            }
        }
        self.changed.notify_all();
        Ok(())
    }
}
