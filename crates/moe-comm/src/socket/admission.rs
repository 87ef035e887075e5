//! Admits processes to the world. Each handshake runs on its own thread, so that no process waits for another.

use std::io::{self, ErrorKind};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::Result;

use crate::socket::handshake::{Ask, HELLO, hear_ask, refuse};
use crate::socket::secret::{Exchange, Key};

/// The largest number of connections that may be in their handshake at the same time.
const MAX_GUESTS: usize = 256;

/// How long a connection may take for its handshake while others wait for its place. A member of the world needs
/// milliseconds.
const PATIENT: Duration = Duration::from_secs(1);

/// Pause between two checks for a new connection: the first pause, and the longest.
const PAUSE: Duration = Duration::from_micros(200);
const LONG_PAUSE: Duration = Duration::from_millis(20);

/// The listeners of a process, and the connections that are in their handshake.
pub(super) struct Admission {
    listeners: Vec<TcpListener>,
    key: Key,
    send: Sender<Greeted>,
    greeted: Receiver<Greeted>,
    /// Connections whose handshake has not ended, the oldest first.
    inside: Vec<(Instant, Weak<TcpStream>)>,
    strangers: usize,
    last_stranger: String,
    /// Why no connection could be accepted, if accepting failed.
    fault: Option<io::Error>,
}

/// A process that has proved that it knows the key.
pub(super) struct Guest {
    pub stream: TcpStream,
    pub from: SocketAddr,
    pub ask: Ask,
    pub exchange: Exchange,
}

/// A connection, and the result of its handshake.
struct Greeted {
    stream: Arc<TcpStream>,
    from: SocketAddr,
    heard: io::Result<(Ask, Exchange)>,
}

impl Admission {
    /// Admits processes that know this key.
    pub fn new(listeners: Vec<TcpListener>, key: &Key) -> io::Result<Self> {
        for listener in &listeners {
            listener.set_nonblocking(true)?;
        }
        let (send, greeted) = channel();
        Ok(Self {
            listeners,
            key: key.clone(),
            send,
            greeted,
            inside: Vec::new(),
            strangers: 0,
            last_stranger: String::new(),
            fault: None,
        })
    }

    /// The next process that has proved that it knows the key; `None` at the deadline. `alive` is called now and then,
    /// and its error ends the wait.
    ///
    /// # Errors
    /// The errors of `alive`.
    pub fn next(&mut self, deadline: Instant, alive: &dyn Fn() -> Result<()>) -> Result<Option<Guest>> {
        let mut pause = PAUSE;
        while Instant::now() < deadline {
            while let Ok(Greeted { stream, from, heard }) = self.greeted.try_recv() {
                match (heard, Arc::try_unwrap(stream)) {
                    (Ok((ask, exchange)), Ok(stream)) => {
                        return Ok(Some(Guest { stream, from, ask, exchange }));
                    }
                    (Err(e), Ok(stream)) => self.turn_away(&stream, from, &e.to_string()),
                    // This cannot happen: only this thread makes further references to the stream, and holds none now.
                    (_, Err(_)) => {}
                }
            }
            if self.accept() {
                pause = PAUSE;
                continue;
            }
            alive()?;
            thread::sleep(pause);
            pause = (pause * 2).min(LONG_PAUSE);
        }
        Ok(None)
    }

    /// Refuses a process, and remembers why.
    pub fn turn_away(&mut self, stream: &TcpStream, from: SocketAddr, why: &str) {
        self.strangers += 1;
        self.last_stranger = format!("{from}: {why}");
        // The other process may already be gone.
        let _ = refuse(stream, why);
    }

    /// A list of the refused processes and failures, which helps to explain why a rank is missing.
    pub fn report(&self) -> String {
        let strangers = match self.strangers {
            0 => String::new(),
            1 => format!("; another connection was refused, from {}", self.last_stranger),
            n => format!("; {n} other connections were refused, the last one from {}", self.last_stranger),
        };
        let fault = self
            .fault
            .as_ref()
            .map_or_else(String::new, |e| format!("; it could not accept connections: {e}"));
        let places: Vec<String> = self
            .listeners
            .iter()
            .filter_map(|listener| Some(listener.local_addr().ok()?.to_string()))
            .collect();
        format!(" at {}{strangers}{fault}", places.join(" and "))
    }

    /// Accepts one connection, if one is waiting and there is a place for it.
    fn accept(&mut self) -> bool {
        self.inside.retain(|(_, stream)| stream.strong_count() > 0);
        if self.inside.len() >= MAX_GUESTS && !self.cut_oldest() {
            return false;
        }
        for at in 0..self.listeners.len() {
            match self.listeners[at].accept() {
                Ok((stream, from)) => {
                    // If the system has no threads or files left, this connection is refused and later ones are served.
                    if let Err(e) = self.greet(stream, from) {
                        self.fault = Some(e);
                    }
                    return true;
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) if matches!(e.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {}
                Err(e) => {
                    self.fault = Some(e);
                    self.cut_oldest();
                }
            }
        }
        false
    }

    /// Frees a place by closing the connection that has been silent for longest. Returns false if none has been silent
    /// for long enough.
    fn cut_oldest(&mut self) -> bool {
        match self.inside.first() {
            Some((since, stream)) if since.elapsed() >= PATIENT => {
                if let Some(stream) = stream.upgrade() {
                    // The thread of the connection then finds the end of the stream.
                    let _ = stream.shutdown(Shutdown::Both);
                }
                self.inside.remove(0);
                true
            }
            _ => false,
        }
    }

    fn greet(&mut self, stream: TcpStream, from: SocketAddr) -> io::Result<()> {
        let send = self.send.clone();
        let key = self.key.clone();
        let stream = Arc::new(stream);
        let now = Instant::now();
        let watched = Arc::downgrade(&stream);
        let hear = move || {
            let heard = stream.set_nonblocking(false).and_then(|()| hear_ask(&stream, &key, now + HELLO));
            // Once the world has formed, nothing receives this any more.
            let _ = send.send(Greeted { stream, from, heard });
        };
        thread::Builder::new().name("hello".into()).spawn(hear)?;
        self.inside.push((now, watched));
        Ok(())
    }
}
