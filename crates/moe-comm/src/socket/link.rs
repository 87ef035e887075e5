//! One connection to another rank.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};

use crate::lock::lock;
use crate::socket::frame::Outgoing;

/// How long a failing rank tries to tell another one why.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A host that is dead or cut off is noticed after this time without an answer, in steps.
const SILENCE: Duration = Duration::from_secs(10);
const PROBE: Duration = Duration::from_secs(5);

/// How often a rank that is waited for is asked in vain whether it lives, before it counts as stalled.
const ASKS: u32 = 3;

/// The writing half.
#[derive(Debug)]
pub(super) struct Link {
    stream: TcpStream,
    /// The number of the next frame; held while a frame is written.
    writing: Mutex<u64>,
    /// How often something has come from the other rank.
    heard: Arc<AtomicU64>,
    asked: Mutex<Asked>,
}

/// Since when nothing has come from a rank, as seen by those that wait for it.
#[derive(Debug)]
struct Asked {
    at: Instant,
    /// [`Link::heard`] then.
    heard: u64,
    in_vain: u32,
}

/// What a rank's silence means.
#[derive(Debug, PartialEq)]
pub(super) enum Silence {
    /// Nothing yet.
    Short,
    /// It is to be asked.
    Ask,
    /// It does not answer.
    Stalled,
}

/// The reading half: notes that something has come.
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
    /// `timeout` bounds the wait for a rank that takes nothing.
    pub fn new(stream: TcpStream, timeout: Duration) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(None)?;
        // Not every platform takes any Duration; a day is as good as no limit.
        stream
            .set_write_timeout(Some(timeout.clamp(Duration::from_millis(1), Duration::from_secs(86_400))))?;
        let socket = SockRef::from(&stream);
        let keepalive = TcpKeepalive::new().with_time(SILENCE).with_interval(PROBE);
        #[cfg(target_os = "linux")]
        let keepalive = keepalive.with_retries(2);
        socket.set_tcp_keepalive(&keepalive)?;
        // The same for data that nobody acknowledges.
        #[cfg(target_os = "linux")]
        socket.set_tcp_user_timeout(Some(SILENCE + PROBE * 2))?;
        let asked = Mutex::new(Asked { at: Instant::now(), heard: 0, in_vain: 0 });
        Ok(Self { stream, writing: Mutex::new(0), heard: Arc::default(), asked })
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

    /// Writes a frame without data if that can be done at once: a rank that is being written to hears from this one anyway.
    pub fn send_now(&self, frame: &Outgoing) -> io::Result<()> {
        let mut number = match self.writing.try_lock() {
            Ok(number) => number,
            Err(TryLockError::Poisoned(number)) => number.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        let bytes = frame.start(*number, &[])?;
        match write_now(&self.stream, &bytes) {
            // Full buffers: what waits there will be a sign of life.
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(e) => return Err(e),
            // Half a frame cannot stay.
            Ok(written) => (&self.stream).write_all(&bytes[written..])?,
        }
        *number += 1;
        Ok(())
    }

    /// What it means that a rank, which is waited for, has sent nothing since this was asked last. A rank may be silent for `limit`.
    ///
    /// What counts is how often it was asked in vain and not the time alone: a process that was itself stopped for long hears
    /// the answers before it has asked again.
    pub fn silence(&self, limit: Duration) -> Silence {
        let mut asked = lock(&self.asked);
        let heard = self.heard.load(Ordering::Relaxed);
        if asked.heard != heard {
            *asked = Asked { at: Instant::now(), heard, in_vain: 0 };
            return Silence::Short;
        }
        if asked.at.elapsed() < interval(limit) {
            return Silence::Short;
        }
        asked.at = Instant::now();
        asked.in_vain += 1;
        if asked.in_vain > ASKS { Silence::Stalled } else { Silence::Ask }
    }

    /// Writes a last frame, if that is possible soon, and closes for writing.
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

    /// A rank that is gone needs no words.
    fn say_last(&self, number: u64, frame: &Outgoing) {
        let _ = self.stream.set_write_timeout(Some(LAST_WORDS));
        let _ = frame.write(number, &[], &mut &self.stream);
    }
}

/// How long a rank is silent before it is asked, and asked again.
pub(super) fn interval(limit: Duration) -> Duration {
    limit / (ASKS + 1)
}

/// Writes what fits into the buffers of the connection.
#[cfg(target_os = "linux")]
fn write_now(stream: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
    SockRef::from(stream).send_with_flags(bytes, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
}

/// Elsewhere a write of a few bytes may wait, as any write.
#[cfg(not(target_os = "linux"))]
fn write_now(mut stream: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
    stream.write(bytes)
}
