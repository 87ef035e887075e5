//! The messages that two processes exchange before they are ranks of one world.
//!
//! ```text
//! guest, which connects                 host, which listens
//! Hello {its random number}      ────►
//!                                ◄────  Challenge(its random number)
//! Sealed(Ask)                    ────►  the proof of the key is checked
//!                                ◄────  Sealed(Answer), or at any time Refused(why)
//! ```
//!
//! Each message is `"moe-comm" | version u32 | byte order u32 | length u32 | postcard`. Everything that a guest sends
//! before its proof is checked must arrive within one time limit and one size limit. So a process that does not belong
//! to the world is recognised and delays no other process.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use candle_core::Result;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::error::plain;
use crate::round::foreign;
use crate::socket::secret::{Exchange, Key, Nonce, Sealed, Side, nonce};

const MAGIC: &[u8; 8] = b"moe-comm";
/// This number changes whenever the messages between processes change.
const VERSION: u32 = 4;
/// Elements are sent as they are in memory, so both processes must have this byte order.
const BYTE_ORDER: u32 = 0x0102_0304;
/// Size limit of an [`Ask`]: the settings of a rank are far smaller.
const MAX_ASK: usize = 64 << 10;
/// Size limit of an [`Answer`]: the addresses of the largest world fit.
const MAX_ANSWER: usize = 4 << 20;

/// How long a process that has connected may take to say who it is and to prove it.
pub(super) const HELLO: Duration = Duration::from_secs(5);

/// How often a waiting process checks whether it should go on waiting.
const LOOK: Duration = Duration::from_millis(100);

/// The first message of a guest.
#[derive(Serialize, Deserialize)]
struct Hello {
    nonce: Nonce,
}

/// The request of a guest.
#[derive(Serialize, Deserialize, Debug)]
pub(super) enum Ask {
    /// Asks rank 0 for a place in a world that is forming. It contains the address where the guest listens, and its
    /// settings.
    Join { rank: usize, world_size: usize, listens: SocketAddr, settings: Vec<(String, String)> },
    /// Asks another rank for a connection, after the world has formed.
    Link { rank: usize },
}

/// The answer to an [`Ask`].
#[derive(Serialize, Deserialize, Debug)]
pub(super) enum Answer {
    /// All ranks are here, and listen at these addresses.
    Welcome { world: Nonce, addresses: Vec<SocketAddr> },
    /// The two are connected.
    Linked,
}

/// A message of a host.
#[derive(Serialize, Deserialize)]
enum Reply {
    Challenge(Nonce),
    Answer(Sealed),
    Refused(String),
}

/// How long to wait for the other process.
pub(super) struct Patience<'a> {
    pub until: Instant,
    /// An error ends the wait at once.
    pub alive: &'a dyn Fn() -> Result<()>,
}

impl Patience<'_> {
    /// Waits until this time, whatever happens.
    pub fn until(until: Instant) -> Self {
        Self { until, alive: &|| Ok(()) }
    }
}

/// Sends the guest's hello and its request, with the proof that it knows the key.
pub(super) fn ask(stream: &TcpStream, key: &Key, ask: &Ask, patience: &Patience) -> io::Result<Exchange> {
    let guest = nonce()?;
    say(stream, &Hello { nonce: guest })?;
    let host = match hear::<Reply>(stream, MAX_ASK, patience)? {
        Reply::Challenge(nonce) => nonce,
        Reply::Refused(why) => return Err(refused(&why)),
        Reply::Answer(_) => return Err(wrong("it answers before it was asked")),
    };
    let exchange = Exchange { key: key.clone(), guest, host };
    say(stream, &exchange.seal(Side::Guest, ask)?)?;
    Ok(exchange)
}

/// Reads the host's answer to a guest.
pub(super) fn hear_answer(
    stream: &TcpStream,
    exchange: &Exchange,
    patience: &Patience,
) -> io::Result<Answer> {
    match hear::<Reply>(stream, MAX_ANSWER, patience)? {
        Reply::Answer(sealed) => exchange
            .open(Side::Host, &sealed)?
            .ok_or_else(|| wrong("its answer was altered, or it does not know the secret")),
        Reply::Refused(why) => Err(refused(&why)),
        Reply::Challenge(_) => Err(wrong("it asks again")),
    }
}

/// Reads the request of a guest that has proved that it knows the key.
pub(super) fn hear_ask(stream: &TcpStream, key: &Key, until: Instant) -> io::Result<(Ask, Exchange)> {
    let patience = Patience::until(until);
    let Hello { nonce: guest } = hear(stream, MAX_ASK, &patience)?;
    let exchange = Exchange { key: key.clone(), guest, host: nonce()? };
    say(stream, &Reply::Challenge(exchange.host))?;
    let sealed: Sealed = hear(stream, MAX_ASK, &patience)?;
    match exchange.open(Side::Guest, &sealed)? {
        Some(ask) => Ok((ask, exchange)),
        None if key.secret => {
            Err(wrong("it does not know the secret of this world; give all ranks the same MOE_WORLD_SECRET"))
        }
        None => Err(wrong(
            "it has a secret and this world has none; give all ranks the same MOE_WORLD_SECRET, or none",
        )),
    }
}

/// Answers a guest.
pub(super) fn answer(stream: &TcpStream, exchange: &Exchange, answer: &Answer) -> io::Result<()> {
    say(stream, &Reply::Answer(exchange.seal(Side::Host, answer)?))
}

/// Refuses a guest and tells it why.
pub(super) fn refuse(stream: &TcpStream, why: &str) -> io::Result<()> {
    say(stream, &Reply::Refused(why.to_string()))
}

fn say(mut stream: &TcpStream, message: &impl Serialize) -> io::Result<()> {
    let body = postcard::to_stdvec(message).map_err(io::Error::other)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(BYTE_ORDER.to_ne_bytes());
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(body);
    stream.set_write_timeout(Some(HELLO))?;
    stream.write_all(&bytes)
}

/// Reads the next message of the other process, of at most `most` bytes.
fn hear<T: DeserializeOwned>(stream: &TcpStream, most: usize, patience: &Patience) -> io::Result<T> {
    let mut prefix = [0u8; 20];
    fill(stream, &mut prefix[..8], patience)?;
    if prefix[..8] != MAGIC[..] {
        return Err(wrong("it does not speak this program's protocol"));
    }
    fill(stream, &mut prefix[8..], patience)?;
    let word = |at: usize| [prefix[at], prefix[at + 1], prefix[at + 2], prefix[at + 3]];
    let version = u32::from_le_bytes(word(8));
    let len = u32::from_le_bytes(word(16)) as usize;
    if version != VERSION {
        return Err(wrong(&format!(
            "it speaks version {version} of the protocol, this one {VERSION}; use one build"
        )));
    }
    if u32::from_ne_bytes(word(12)) != BYTE_ORDER {
        return Err(wrong("its machine has another byte order"));
    }
    if len > most {
        return Err(wrong(&format!("it announces {len} bytes, at most {most} are allowed")));
    }
    let mut body = vec![0; len];
    fill(stream, &mut body, patience)?;
    postcard::from_bytes(&body).map_err(|e| wrong(&format!("its words make no sense ({e})")))
}

/// Fills `bytes` from the stream within one time limit.
fn fill(mut stream: &TcpStream, bytes: &mut [u8], patience: &Patience) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let left = patience.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(ErrorKind::TimedOut, "it did not say who it is in time"));
        }
        stream.set_read_timeout(Some(left.clamp(Duration::from_millis(1), LOOK)))?;
        match stream.read(&mut bytes[done..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(e)
                if matches!(
                    e.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) =>
            {
                (patience.alive)().map_err(|e| io::Error::other(plain(&e)))?;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

/// The error of a refusal by the host; its kind differs from the kind for a host that does not answer.
fn refused(why: &str) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, foreign(why))
}
