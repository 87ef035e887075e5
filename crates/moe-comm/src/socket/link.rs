//! The connection to one other rank.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};

use crate::lock::lock;
use crate::socket::frame::Outgoing;

/// How long a failing rank tries to send its reason to another rank.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A host that is dead or unreachable is noticed after this time without an answer, up to the interval of the probes.
const SILENCE: Duration = Duration::from_secs(10);
const PROBE: Duration = Duration::from_secs(5);

/// How many unanswered pings it takes before a rank counts as stalled.
const ASKS: u32 = 3;

/// The writing half.
#[derive(Debug)]
pub(super) struct Link {
    stream: TcpStream,
    /// The number of the next frame. The lock is held while a frame is written.
    writing: Mutex<u64>,
    /// How often data has arrived from the other rank.
    heard: Arc<AtomicU64>,
    silent_since: Mutex<SilentSince>,
}

/// The time since which nothing has arrived from a rank, as its waiting ranks see it.
#[derive(Debug)]
struct SilentSince {
    at: Instant,
    /// The value of [`Link::heard`] at that time.
    heard: u64,
    in_vain: u32,
}

/// The conclusion from a rank's silence.
#[derive(Debug, PartialEq)]
pub(super) enum Silence {
    /// It is too short to mean anything.
    Short,
    /// It is time to ask the rank whether it is alive.
    Ask,
    /// The rank does not answer.
    Stalled,
}

/// The reading half. It counts how often data has arrived.
pub(super) struct Hearing {
    stream: TcpStream,
    heard: Arc<AtomicU64>,
}

impl Read for Hearing {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.stream.read(bytes)?;
        self.heard.fetch_add(1, Ordering::Relaxed);
        Ok(read)
    }
}

impl Link {
    /// `timeout` limits the wait for a rank that does not read what is sent to it.
    pub fn new(stream: TcpStream, timeout: Duration) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(None)?;
        // Not every platform accepts any `Duration`, and a day is as good as no limit.
        stream
            .set_write_timeout(Some(timeout.clamp(Duration::from_millis(1), Duration::from_secs(86_400))))?;
        let socket = SockRef::from(&stream);
        let keepalive = TcpKeepalive::new().with_time(SILENCE).with_interval(PROBE);
        #[cfg(target_os = "linux")]
        let keepalive = keepalive.with_retries(2);
        socket.set_tcp_keepalive(&keepalive)?;
        // This sets the same limit for sent data that is not acknowledged.
        #[cfg(target_os = "linux")]
        socket.set_tcp_user_timeout(Some(SILENCE + PROBE * 2))?;
        let silent_since = Mutex::new(SilentSince { at: Instant::now(), heard: 0, in_vain: 0 });
        Ok(Self { stream, writing: Mutex::new(0), heard: Arc::default(), silent_since })
    }

    /// The reading half.
    pub fn reader(&self) -> io::Result<Hearing> {
        Ok(Hearing { stream: self.stream.try_clone()?, heard: self.heard.clone() })
    }

    /// Writes a frame.
    pub fn send(&self, frame: &Outgoing, data: &[u8]) -> io::Result<()> {
        let mut number = lock(&self.writing);
        frame.write(*number, data, &mut &self.stream)?;
        *number += 1;
        Ok(())
    }

    /// Writes a frame without data if that is possible at once. If another frame is being written to the rank, that
    /// frame shows that this rank is alive.
    pub fn send_now(&self, frame: &Outgoing) -> io::Result<()> {
        let mut number = match self.writing.try_lock() {
            Ok(number) => number,
            Err(TryLockError::Poisoned(number)) => number.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        let bytes = frame.start(*number, &[])?;
        match write_now(&self.stream, &bytes) {
            // The buffers are full. The data in them will show that this rank is alive.
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(e) => return Err(e),
            // A frame that was partly written must be completed.
            Ok(written) => (&self.stream).write_all(&bytes[written..])?,
        }
        *number += 1;
        Ok(())
    }

    /// What the silence of a rank means by now. The caller waits for this rank, which may be silent for `limit`.
    ///
    /// The number of unanswered pings counts, and not the time alone. If this process itself was stopped for a long
    /// time, it receives the answers before it pings again.
    pub fn silence(&self, limit: Duration) -> Silence {
        let mut silent_since = lock(&self.silent_since);
        let heard = self.heard.load(Ordering::Relaxed);
        if silent_since.heard != heard {
            *silent_since = SilentSince { at: Instant::now(), heard, in_vain: 0 };
            return Silence::Short;
        }
        if silent_since.at.elapsed() < interval(limit) {
            return Silence::Short;
        }
        silent_since.at = Instant::now();
        silent_since.in_vain += 1;
        if silent_since.in_vain > ASKS { Silence::Stalled } else { Silence::Ask }
    }

    /// Writes a last frame, if that is possible soon, and closes the writing half.
    pub fn close(&self, frame: &Outgoing) {
        let start = Instant::now();
        while start.elapsed() < LAST_WORDS {
            match self.writing.try_lock() {
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(5)),
                Ok(number) => {
                    self.say_last(*number, frame);
                    break;
                }
                Err(TryLockError::Poisoned(number)) => {
                    self.say_last(*number.into_inner(), frame);
                    break;
                }
            }
        }
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// A rank that is gone needs no last frame.
    fn say_last(&self, number: u64, frame: &Outgoing) {
        let _ = self.stream.set_write_timeout(Some(LAST_WORDS));
        let _ = frame.write(number, &[], &mut &self.stream);
    }
}

/// How long a rank may be silent before the next ping.
pub(super) fn interval(limit: Duration) -> Duration {
    limit / (ASKS + 1)
}

/// Writes as much as fits into the buffers of the connection.
#[cfg(target_os = "linux")]
fn write_now(stream: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
    SockRef::from(stream).send_with_flags(bytes, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
}

/// On other systems a write of a few bytes may wait, like any other write.
#[cfg(not(target_os = "linux"))]
fn write_now(mut stream: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
    stream.write(bytes)
}
