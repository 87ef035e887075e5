//! What two processes say to each other before they are ranks of one world.
//!
//! Each message is `"moe-comm" | version u32 | byte order u32 | length u32 | postcard`, and is read
//! within a time and a size, so that a stranger is told apart and cannot hold anybody up.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

const MAGIC: &[u8; 8] = b"moe-comm";
/// Changes with everything that processes say to each other.
const VERSION: u32 = 2;
/// Elements travel as they lie in memory.
const BYTE_ORDER: u32 = 0x0102_0304;
/// The addresses of the largest world.
const MAX_LEN: usize = 4 << 20;
/// Connections that may be saying hello at once.
const MAX_GUESTS: usize = 256;

/// Between two looks for a connection, at first.
const PAUSE: Duration = Duration::from_micros(200);

/// How long a process that has connected may take to say who it is.
pub(super) const HELLO: Duration = Duration::from_secs(5);

/// How a process introduces itself.
#[derive(Serialize, Deserialize, Debug)]
pub(super) enum Hello {
    /// To rank 0: a rank of a world that wants to form, where it listens, and its settings.
    Join { rank: usize, world_size: usize, listens: SocketAddr, settings: Vec<(String, String)> },
    /// To another rank, after the world has formed.
    Link { rank: usize, secret: u64 },
}

/// The answer to a [`Hello`].
#[derive(Serialize, Deserialize, Debug)]
pub(super) enum Answer {
    /// All ranks are here, and listen at these addresses.
    Welcome { secret: u64, addresses: Vec<SocketAddr> },
    /// The two are connected.
    Linked,
    /// Why not.
    Refused(String),
}

pub(super) fn say(mut stream: &TcpStream, message: &impl Serialize) -> io::Result<()> {
    let body = postcard::to_stdvec(message).map_err(io::Error::other)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(BYTE_ORDER.to_ne_bytes());
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(body);
    stream.set_write_timeout(Some(HELLO))?;
    stream.write_all(&bytes)
}

/// What the other side says, within a time.
pub(super) fn hear<T: DeserializeOwned>(mut stream: &TcpStream, within: Duration) -> io::Result<T> {
    stream.set_read_timeout(Some(within.max(Duration::from_millis(1))))?;
    let wrong = |what: &str| io::Error::new(ErrorKind::InvalidData, what.to_string());
    let mut prefix = [0u8; 20];
    stream.read_exact(&mut prefix[..8])?;
    if prefix[..8] != MAGIC[..] {
        return Err(wrong("it does not speak this program's protocol"));
    }
    stream.read_exact(&mut prefix[8..])?;
    let word = |at: usize| [prefix[at], prefix[at + 1], prefix[at + 2], prefix[at + 3]];
    let (version, len) = (u32::from_le_bytes(word(8)), u32::from_le_bytes(word(16)) as usize);
    if version != VERSION {
        return Err(wrong(&format!(
            "it speaks version {version} of the protocol, this one {VERSION}; use one build"
        )));
    }
    if u32::from_ne_bytes(word(12)) != BYTE_ORDER {
        return Err(wrong("its machine has another byte order"));
    }
    if len > MAX_LEN {
        return Err(wrong(&format!("it announces {len} bytes, at most {MAX_LEN} are allowed")));
    }
    let mut body = vec![0; len];
    stream.read_exact(&mut body)?;
    postcard::from_bytes(&body).map_err(|e| wrong(&format!("its words make no sense ({e})")))
}

/// Lets processes in: each says hello on a thread of its own.
pub(super) struct Door {
    listener: TcpListener,
    send: Sender<Guest>,
    guests: Receiver<Guest>,
    saying_hello: usize,
    /// The last one that was turned away, and how many were.
    strangers: (usize, String),
}

type Guest = (TcpStream, SocketAddr, io::Result<Hello>);

impl Door {
    pub fn new(listener: TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let (send, guests) = channel();
        Ok(Self { listener, send, guests, saying_hello: 0, strangers: (0, String::new()) })
    }

    /// The next process that says hello; `None` at the deadline. `alive` is asked now and then
    /// whether waiting makes sense.
    ///
    /// # Errors
    /// `alive`'s, or the listener's.
    pub fn next(
        &mut self,
        deadline: Instant,
        alive: &dyn Fn() -> Result<()>,
    ) -> Result<Option<(TcpStream, Hello)>> {
        let mut pause = PAUSE;
        while Instant::now() < deadline {
            while let Ok((stream, from, hello)) = self.guests.try_recv() {
                self.saying_hello -= 1;
                match hello {
                    Ok(hello) => return Ok(Some((stream, hello))),
                    Err(e) => self.turn_away(&stream, &format!("{from}: {e}")),
                }
            }
            if self.accept()? {
                pause = PAUSE;
                continue;
            }
            alive()?;
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
        Ok(None)
    }

    /// Lets one process in that has connected, if there is one and a place for it.
    fn accept(&mut self) -> Result<bool> {
        if self.saying_hello == MAX_GUESTS {
            return Ok(false);
        }
        match self.listener.accept() {
            Ok((stream, from)) => {
                self.greet(stream, from)?;
                Ok(true)
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(e) if matches!(e.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => Ok(false),
            Err(e) => bail!("cannot accept connections: {e}"),
        }
    }

    /// Refuses a process, and remembers it.
    pub fn turn_away(&mut self, stream: &TcpStream, why: &str) {
        self.strangers = (self.strangers.0 + 1, why.to_string());
        let _ = say(stream, &Answer::Refused(why.to_string()));
    }

    /// Who was turned away, to explain who is missing.
    pub fn strangers(&self) -> String {
        match &self.strangers {
            (0, _) => String::new(),
            (n, last) => format!("; {n} other connections were refused, the last one from {last}"),
        }
    }

    fn greet(&mut self, stream: TcpStream, from: SocketAddr) -> io::Result<()> {
        let send = self.send.clone();
        let hear = move || {
            let hello = stream.set_nonblocking(false).and_then(|()| hear(&stream, HELLO));
            // Nobody listens any more once the world has formed.
            let _ = send.send((stream, from, hello));
        };
        thread::Builder::new().name("hello".into()).spawn(hear)?;
        self.saying_hello += 1;
        Ok(())
    }
}
