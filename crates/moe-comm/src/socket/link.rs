//! One connection to another rank.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};

use crate::round::lock;
use crate::socket::frame::Outgoing;

/// How long a failing rank tries to tell another one why.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A host that is dead or cut off is noticed after this time without an answer, in steps.
const SILENCE: Duration = Duration::from_secs(10);
const PROBE: Duration = Duration::from_secs(5);

/// The writing half.
#[derive(Debug)]
pub(super) struct Link {
    stream: TcpStream,
    /// Held while a frame is written.
    writing: Mutex<()>,
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
        Ok(Self { stream, writing: Mutex::new(()) })
    }

    /// The reading half.
    pub fn reader(&self) -> io::Result<TcpStream> {
        self.stream.try_clone()
    }

    /// Writes a frame.
    pub fn send(&self, frame: &Outgoing, data: &[u8]) -> io::Result<()> {
        let _writing = lock(&self.writing);
        frame.write(data, &mut &self.stream)
    }

    /// Writes a last frame, if that is possible soon, and closes for writing.
    pub fn close(&self, frame: &Outgoing) {
        let start = Instant::now();
        while start.elapsed() < LAST_WORDS {
            match self.writing.try_lock() {
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(5)),
                Ok(_) | Err(TryLockError::Poisoned(_)) => {
                    // A rank that is gone needs no words.
                    let _ = self.stream.set_write_timeout(Some(LAST_WORDS));
                    let _ = frame.write(&[], &mut &self.stream);
                    break;
                }
            }
        }
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}
