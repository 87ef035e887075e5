//! A second implementation of the protocol between processes, for what a stranger or a faulty member may send.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use hmac::{Hmac, Mac};
use moe_comm::{Launch, launch_from_env};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

#[derive(Serialize)]
struct Hello {
    nonce: [u8; 32],
}

#[derive(Serialize)]
pub enum Ask {
    Join { rank: usize, world_size: usize, listens: SocketAddr, settings: Vec<(String, String)> },
    Link { rank: usize },
}

#[derive(Deserialize, Debug)]
pub enum Answer {
    Welcome { world: [u8; 32], addresses: Vec<SocketAddr> },
    Linked,
}

#[derive(Serialize, Deserialize)]
struct Sealed {
    text: Vec<u8>,
    proof: [u8; 32],
}

#[derive(Deserialize)]
enum Reply {
    Challenge([u8; 32]),
    Answer(Sealed),
    Refused(String),
}

pub type Key = [u8; 32];

fn mac(key: &[u8], parts: &[&[u8]]) -> Key {
    let mut mac = Hmac::<sha2::Sha256>::new_from_slice(key).unwrap();
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

/// The key of a world with this secret; an empty secret means none.
pub fn world_key(secret: &str) -> Key {
    mac(secret.as_bytes(), &[b"moe-comm: world"])
}

/// The key between the ranks of a world.
pub fn link_key(key: &Key, world: &[u8; 32]) -> Key {
    mac(key, &[b"moe-comm: links", world])
}

/// Connects to a process that may not listen yet.
pub fn connect(port: u16) -> TcpStream {
    loop {
        match TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
            Ok(stream) => return stream,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// What comes before the body of each message: the program's name, the version of its protocol, the byte order and the
/// length of the body, `len`.
pub fn prefix(len: u32) -> [u8; 20] {
    let mut bytes = *b"moe-comm\x04\0\0\0________";
    bytes[12..16].copy_from_slice(&0x0102_0304u32.to_ne_bytes());
    bytes[16..].copy_from_slice(&len.to_le_bytes());
    bytes
}

pub fn say(stream: &mut TcpStream, message: &impl Serialize) {
    let body = postcard::to_stdvec(message).unwrap();
    let mut bytes = prefix(body.len() as u32).to_vec();
    bytes.extend(body);
    stream.write_all(&bytes).unwrap();
}

fn hear<T: DeserializeOwned>(stream: &mut TcpStream) -> T {
    let mut prefix = [0; 20];
    stream.read_exact(&mut prefix).unwrap();
    let len = u32::from_le_bytes(prefix[16..].try_into().unwrap());
    let mut body = vec![0; len as usize];
    stream.read_exact(&mut body).unwrap();
    postcard::from_bytes(&body).unwrap()
}

/// Sends a request with this key without waiting for the answer. Returns the random numbers of both sides, or why it
/// was refused.
pub fn begin(stream: &mut TcpStream, key: &Key, ask: &Ask) -> Result<[[u8; 32]; 2], String> {
    let guest = [7u8; 32];
    say(stream, &Hello { nonce: guest });
    let host = match hear::<Reply>(stream) {
        Reply::Challenge(nonce) => nonce,
        Reply::Refused(why) => return Err(why),
        Reply::Answer(_) => panic!("an answer before the question"),
    };
    let text = postcard::to_stdvec(ask).unwrap();
    let proof = mac(key, &[b"guest", &guest, &host, &text]);
    say(stream, &Sealed { text, proof });
    Ok([guest, host])
}

/// The answer to a request with this key, or why it was refused.
pub fn ask(stream: &mut TcpStream, key: &Key, ask: &Ask) -> Result<Answer, String> {
    let [guest, host] = begin(stream, key, ask)?;
    match hear::<Reply>(stream) {
        Reply::Answer(Sealed { text, proof }) => {
            assert_eq!(proof, mac(key, &[b"host ", &guest, &host, &text]));
            Ok(postcard::from_bytes(&text).unwrap())
        }
        Reply::Refused(why) => Err(why),
        Reply::Challenge(_) => panic!("a second challenge"),
    }
}

/// A frame with valid checksums.
pub fn frame(number: u64, head: &[u8], data_len: u64, data: &[u8]) -> Vec<u8> {
    let mut out = (head.len() as u32).to_le_bytes().to_vec();
    out.extend(data_len.to_le_bytes());
    out.extend(crc32fast::hash(head).to_le_bytes());
    out.extend(crc32fast::hash(data).to_le_bytes());
    out.extend(crc32fast::hash(&[&number.to_le_bytes()[..], &out].concat()).to_le_bytes());
    [&out, head, data].concat()
}

/// A port on which no process listens now.
pub fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

/// The launch of a rank in a world that meets at this address.
pub fn launch(rank: usize, world_size: usize, master: &str, port: u16) -> Launch {
    let value = move |name: &str| match name {
        "RANK" | "LOCAL_RANK" => Some(rank.to_string()),
        "WORLD_SIZE" => Some(world_size.to_string()),
        "MASTER_ADDR" => Some(master.to_string()),
        "MASTER_PORT" => Some(port.to_string()),
        _ => None,
    };
    launch_from_env(value).unwrap().unwrap()
}
