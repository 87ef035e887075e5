//! Lets processes in: each says hello on a thread of its own, so that none waits for another.

use std::io::{self, ErrorKind};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::Result;

use crate::socket::handshake::{Ask, HELLO, hear_ask, refuse};
use crate::socket::secret::{Exchange, Key};

/// Connections that may be saying hello at once.
const MAX_GUESTS: usize = 256;

/// How long a connection may take for its hello while others wait for its place: a member needs milliseconds.
const PATIENT: Duration = Duration::from_secs(1);

/// Between two looks for a connection: at first, and at most.
const PAUSE: Duration = Duration::from_micros(200);
const LONG_PAUSE: Duration = Duration::from_millis(20);

/// Where a process listens for others, and those that are saying hello.
pub(super) struct Door {
    listeners: Vec<TcpListener>,
    key: Key,
    send: Sender<Greeted>,
    greeted: Receiver<Greeted>,
    /// Connections that have not been heard to the end, the oldest first.
    inside: Vec<(Instant, Weak<TcpStream>)>,
    strangers: usize,
    last_stranger: String,
    /// Why no connection could be accepted, if that happened.
    fault: Option<io::Error>,
}

/// A process that has proved that it knows the key.
pub(super) struct Guest {
    pub stream: TcpStream,
    pub from: SocketAddr,
    pub ask: Ask,
    pub exchange: Exchange,
}

/// A connection, and how its hello went.
struct Greeted {
    stream: Arc<TcpStream>,
    from: SocketAddr,
    heard: io::Result<(Ask, Exchange)>,
}

impl Door {
    /// A door that processes with this key pass.
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

    /// The next process that has proved itself; `None` at the deadline. `alive` is asked now and then
    /// whether waiting makes sense.
    ///
    /// # Errors
    /// `alive`'s.
    pub fn next(&mut self, deadline: Instant, alive: &dyn Fn() -> Result<()>) -> Result<Option<Guest>> {
        let mut pause = PAUSE;
        while Instant::now() < deadline {
            while let Ok(Greeted { stream, from, heard }) = self.greeted.try_recv() {
                match (heard, Arc::try_unwrap(stream)) {
                    (Ok((ask, exchange)), Ok(stream)) => {
                        return Ok(Some(Guest { stream, from, ask, exchange }));
                    }
                    (Err(e), Ok(stream)) => self.turn_away(&stream, from, &e.to_string()),
                    // Only this thread shares it, and not now.
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

    /// Refuses a process, and remembers it.
    pub fn turn_away(&mut self, stream: &TcpStream, from: SocketAddr, why: &str) {
        self.strangers += 1;
        self.last_stranger = format!("{from}: {why}");
        // It may be gone already.
        let _ = refuse(stream, why);
    }

    /// What has come to pass at the door, to explain who is missing.
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

    /// Lets one process in that has connected, if there is one and a place for it.
    fn accept(&mut self) -> bool {
        self.inside.retain(|(_, stream)| stream.strong_count() > 0);
        if self.inside.len() >= MAX_GUESTS && !self.cut_oldest() {
            return false;
        }
        for at in 0..self.listeners.len() {
            match self.listeners[at].accept() {
                Ok((stream, from)) => {
                    // A system out of threads or files refuses this one and serves the next ones.
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

    /// Makes a place by cutting the connection that has been silent for longest; false if none is due.
    fn cut_oldest(&mut self) -> bool {
        match self.inside.first() {
            Some((since, stream)) if since.elapsed() >= PATIENT => {
                if let Some(stream) = stream.upgrade() {
                    // Its thread then finds the end of the stream.
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
            // Nobody listens any more once the world has formed.
            let _ = send.send(Greeted { stream, from, heard });
        };
        thread::Builder::new().name("hello".into()).spawn(hear)?;
        self.inside.push((now, watched));
        Ok(())
    }
}
