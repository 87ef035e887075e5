//! The frames that two ranks exchange after the handshake.
//!
//! ```text
//! bytes of the head u32 | bytes of the data u64
//! checksum of the head u32 | checksum of the data u32 | checksum u32
//! head | data
//! ```
//! Numbers of the prefix are little endian. The head is a [`Frame`] in postcard. The data is a message, or the elements
//! of a view as they are in memory (the handshake refuses a rank with another byte order).
//!
//! TCP's own checksum has 16 bits and misses some damage. The checksums here are CRC-32, which detects every run of up
//! to 32 altered bits, in a frame of any size. The third checksum covers the number of the frame and the prefix before
//! it. So a length is used only if it arrived unaltered, and a frame that is missing or repeated is detected, too.

use std::io::{self, ErrorKind, Read, Write};

use candle_core::{DType, Result, bail};
use moe_kernels::{Dims, View, with_element};
use serde::{Deserialize, Serialize};

use crate::call::Call;

/// Bytes before the head.
const PREFIX: usize = 24;
/// The largest head. The counts of the largest world, and the text of an error, are far smaller.
const MAX_HEAD: usize = 4 << 20;
/// The largest data of a round. Memory for the announced length is only allocated while the data arrives.
pub(super) const MAX_DATA: u64 = 16 << 30;
/// The longest message.
pub(super) const MAX_MESSAGE: u64 = 1 << 30;
/// Number of words that are allocated before their data has arrived.
const PIECE: usize = 1 << 17;

/// One frame. When it is sent, its data is passed separately and is not part of the head.
#[derive(Serialize, Deserialize)]
pub(super) enum Frame<H = PostHead> {
    /// A rank's part of a round.
    Post {
        group: u64,
        head: H,
        #[serde(skip)]
        data: Vec<u64>,
    },
    /// The sender has dropped its communicator of a group.
    Leave { group: u64 },
    /// A message of a generation, which is independent of the collectives.
    Message(usize, #[serde(skip)] Vec<u8>),
    /// The sender's world has failed.
    Abort(String),
    /// The sender ends normally.
    Bye,
    /// The sender waits for this rank and asks whether it is alive.
    Ping,
    /// The answer to a ping: the sender is alive.
    Pong,
    /// A generation has ended, for this reason, and the world goes on.
    End(usize, String),
}

/// A frame to be sent.
pub(super) type Outgoing<'a> = Frame<&'a PostHead>;

/// A rank's part of a round, without its data.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct PostHead {
    pub call: Call,
    /// Colour, key, and, if the sender leads the new group, the id of that group.
    pub split: Option<(usize, usize, u64)>,
    /// Dims of the data, whose dtype is the call's.
    pub rows: Option<Vec<usize>>,
}

impl PostHead {
    /// The error of a head that announces `bytes` bytes of data, if there is one.
    fn fault(&self, bytes: u64) -> Option<String> {
        let expected = match (&self.rows, self.call.dtype) {
            (None, _) => Some(0),
            (Some(dims), Some(dtype)) => {
                let len = Dims::new(dims).and_then(|dims| dims.elem_count()).ok();
                len.and_then(|len| len.checked_mul(dtype.size_in_bytes()))
            }
            (Some(_), None) => return Some("rows without a dtype".to_string()),
        };
        if expected.map(|bytes| bytes as u64) != Some(bytes) {
            return Some(format!("{bytes} bytes of data for rows of dims {:?}", self.rows));
        }
        let op = self.call.op;
        (self.split.is_some() != op.is_split()).then(|| format!("colours in {op}"))
    }
}

/// The memory of a view.
pub(super) fn bytes(view: View<'_>) -> Result<&[u8]> {
    with_element!(view.dtype(), "frame", T => Ok(bytemuck::cast_slice(view.cpu::<T>()?)))
}

/// A view of the elements in `data`.
pub(super) fn view<'a>(dtype: DType, dims: &[usize], data: &'a [u64]) -> Result<View<'a>> {
    let len = Dims::new(dims)?.elem_count()?;
    with_element!(dtype, "frame", T => match bytemuck::cast_slice::<u64, T>(data).get(..len) {
        Some(elements) => View::new(elements, dims),
        None => bail!("a rank sent fewer elements than its dims {dims:?} need"),
    })
}

impl Outgoing<'_> {
    pub fn post(group: u64, head: &PostHead) -> Outgoing<'_> {
        Frame::Post { group, head, data: Vec::new() }
    }

    pub fn abort(cause: &str) -> Self {
        Self::Abort(cut(cause))
    }

    pub fn end(generation: usize, why: &str) -> Self {
        Self::End(generation, cut(why))
    }

    /// The bytes of frame `number` of a connection that come before its data.
    pub fn start(&self, number: u64, data: &[u8]) -> io::Result<Vec<u8>> {
        let bytes = data.len() as u64;
        let most = self.most();
        if bytes > most {
            let what = format!("{bytes} bytes for one rank are more than the {most} of a frame");
            return Err(io::Error::new(ErrorKind::InvalidInput, what));
        }
        let head = postcard::to_stdvec(self).map_err(io::Error::other)?;
        let mut start = Vec::with_capacity(PREFIX + head.len());
        start.extend((head.len() as u32).to_le_bytes());
        start.extend(bytes.to_le_bytes());
        start.extend(crc32fast::hash(&head).to_le_bytes());
        start.extend(crc32fast::hash(data).to_le_bytes());
        start.extend(numbered(number, &start).to_le_bytes());
        start.extend(&head);
        Ok(start)
    }

    /// Writes frame `number` of the connection.
    pub fn write(&self, number: u64, data: &[u8], out: &mut impl Write) -> io::Result<()> {
        let mut start = self.start(number, data)?;
        // Small data is sent in one packet with the head.
        let with_head = if data.len() <= 1 << 14 { data } else { &[] };
        start.extend(with_head);
        out.write_all(&start)?;
        out.write_all(&data[with_head.len()..])
    }
}

/// A text whose length fits into a head: postcard writes it before the text.
fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_HEAD / 2)].to_string()
}

impl<H> Frame<H> {
    /// The largest amount of data that a frame of this kind has.
    pub fn most(&self) -> u64 {
        match self {
            Self::Post { .. } => MAX_DATA,
            Self::Message(..) => MAX_MESSAGE,
            _ => 0,
        }
    }
}

/// The checksum over the number of a frame and the prefix before it.
fn numbered(number: u64, prefix: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&number.to_le_bytes());
    hasher.update(prefix);
    hasher.finalize()
}

/// The frames that arrive on one connection.
pub(super) struct Frames<R> {
    input: R,
    number: u64,
}

/// A frame whose data has not been read yet.
pub(super) struct Begun {
    pub frame: Frame,
    /// Number of bytes of its data.
    pub bytes: u64,
    checksum: u32,
}

impl<R: Read> Frames<R> {
    pub fn new(input: R) -> Self {
        Self { input, number: 0 }
    }

    /// Reads the next frame without its data; `None` if the stream ends between frames.
    pub fn begin(&mut self) -> io::Result<Option<Begun>> {
        let mut prefix = [0u8; PREFIX];
        match self.input.read(&mut prefix[..1])? {
            0 => return Ok(None),
            _ => self.input.read_exact(&mut prefix[1..])?,
        }
        let word =
            |at: usize| u32::from_le_bytes([prefix[at], prefix[at + 1], prefix[at + 2], prefix[at + 3]]);
        self.compare("prefix", word(20), numbered(self.number, &prefix[..20]))?;
        let (head_len, bytes) = (word(0) as usize, u64::from(word(4)) | u64::from(word(8)) << 32);
        if head_len > MAX_HEAD {
            return Err(garbage(format!("frame {} has a head of {head_len} bytes", self.number)));
        }
        let mut head = vec![0; head_len];
        self.input.read_exact(&mut head)?;
        self.compare("head", word(12), crc32fast::hash(&head))?;
        let frame: Frame = match postcard::take_from_bytes(&head) {
            Ok((frame, [])) => frame,
            Ok((_, rest)) => return Err(garbage(format!("a head with {} extra bytes after it", rest.len()))),
            Err(e) => return Err(garbage(e.to_string())),
        };
        if bytes > frame.most() {
            return Err(garbage(format!(
                "a frame with {bytes} bytes of data; at most {} belong there",
                frame.most()
            )));
        }
        if let Frame::Post { head, .. } = &frame
            && let Some(fault) = head.fault(bytes)
        {
            return Err(garbage(fault));
        }
        Ok(Some(Begun { frame, bytes, checksum: word(16) }))
    }

    /// Reads the data of the frame and returns it with the frame.
    pub fn finish(&mut self, Begun { mut frame, bytes, checksum }: Begun) -> io::Result<Frame> {
        let mut got = crc32fast::Hasher::new();
        match &mut frame {
            Frame::Post { data, .. } => *data = self.words(bytes, &mut got)?,
            Frame::Message(_, data) => *data = self.bytes(bytes, &mut got)?,
            _ => {}
        }
        self.compare("data", checksum, got.finalize())?;
        self.number += 1;
        Ok(frame)
    }

    fn compare(&self, what: &str, told: u32, got: u32) -> io::Result<()> {
        match told == got {
            true => Ok(()),
            false => Err(garbage(format!(
                "the {what} of frame {} was altered on its way: its checksum is {got:08x}, expected {told:08x}",
                self.number
            ))),
        }
    }

    fn bytes(&mut self, len: u64, checksum: &mut crc32fast::Hasher) -> io::Result<Vec<u8>> {
        let len = len as usize;
        let mut bytes = Vec::new();
        while bytes.len() < len {
            let done = bytes.len();
            bytes.resize((done + PIECE * 8).min(len), 0);
            self.input.read_exact(&mut bytes[done..])?;
            checksum.update(&bytes[done..]);
        }
        Ok(bytes)
    }

    /// Reads data into words, which are aligned for every element type.
    fn words(&mut self, bytes: u64, checksum: &mut crc32fast::Hasher) -> io::Result<Vec<u64>> {
        let bytes = bytes as usize;
        let mut words = Vec::new();
        let mut done = 0;
        while done < bytes {
            words.resize((words.len() + PIECE).min(bytes.div_ceil(8)), 0u64);
            let memory: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
            let end = memory.len().min(bytes);
            self.input.read_exact(&mut memory[done..end])?;
            checksum.update(&memory[done..end]);
            done = end;
        }
        Ok(words)
    }
}

fn garbage(what: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

/// Reads a stream of frames as a rank reads the stream of another rank. Returns the number of frames up to the end.
///
/// # Errors
/// Any error that ends the connection to the rank that sends the stream.
pub fn check_frames(stream: &[u8]) -> io::Result<u64> {
    let mut frames = Frames::new(stream);
    while let Some(begun) = frames.begin()? {
        frames.finish(begun)?;
    }
    Ok(frames.number)
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;
