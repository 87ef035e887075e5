//! What travels between two ranks after the handshake.
//!
//! ```text
//! kind u32 | bytes of the head u32 | group u64 | bytes of the data u64 | head | data
//! ```
//! Numbers of the prefix are little endian; heads are postcard; data are a view's elements as they
//! lie in memory (the handshake refuses a rank of another byte order).

use std::io::{self, ErrorKind, Read, Write};

use candle_core::{DType, Result, bail};
use moe_kernels::{Dims, View, with_element};
use serde::{Deserialize, Serialize};

use crate::call::{Call, Counts, Op};
use crate::communicator::ReduceOp;

/// The largest head: the counts of the largest world, and an error's text, are far smaller.
const MAX_HEAD: usize = 4 << 20;
/// The largest data. What a length announces is only allocated as it arrives.
pub(super) const MAX_DATA: u64 = 1 << 36;
/// Words that are allocated ahead of the data.
const PIECE: usize = 1 << 20;

/// One frame.
pub(super) enum Frame {
    /// A rank's part of a round.
    Post { group: u64, head: PostHead, data: Vec<u64> },
    /// The sender has dropped its communicator of a group.
    Leave { group: u64 },
    /// A message beside the collectives.
    Message(Vec<u8>),
    /// The sender's world has failed.
    Abort(String),
    /// The sender ends as it should.
    Bye,
}

/// What a rank says in a round.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct PostHead {
    op: Op,
    reduce: Option<ReduceOp>,
    dtype: Option<String>,
    dims: Option<Vec<usize>>,
    root: Option<usize>,
    counts: Counts,
    /// Colour, key, and the id of the new group if the sender leads it.
    pub split: Option<(usize, usize, u64)>,
    /// Dims of the data, which have the call's dtype.
    pub rows: Option<Vec<usize>>,
}

impl PostHead {
    pub fn new(call: &Call) -> Self {
        Self {
            op: call.op,
            reduce: call.reduce,
            dtype: call.dtype.map(|dtype| dtype.as_str().to_string()),
            dims: call.dims.as_deref().map(<[usize]>::to_vec),
            root: call.root,
            counts: call.counts.clone(),
            split: None,
            rows: None,
        }
    }

    pub fn call(&self) -> Result<Call> {
        Ok(Call {
            op: self.op,
            reduce: self.reduce,
            dtype: self.dtype.as_deref().map(parse_dtype).transpose()?,
            dims: self.dims.as_deref().map(Dims::new).transpose()?,
            root: self.root,
            counts: self.counts.clone(),
        })
    }
}

fn parse_dtype(name: &str) -> Result<DType> {
    name.parse().or_else(|_| bail!("a rank sent rows of an unknown dtype {name:?}"))
}

/// The memory of a view.
pub(super) fn bytes(view: View<'_>) -> Result<&[u8]> {
    with_element!(view.dtype(), "frame", T => Ok(bytemuck::cast_slice(view.cpu::<T>()?)))
}

/// The elements that `data` holds.
pub(super) fn view<'a>(dtype: DType, dims: &[usize], data: &'a [u64]) -> Result<View<'a>> {
    let len = Dims::new(dims)?.elem_count()?;
    with_element!(dtype, "frame", T => match bytemuck::cast_slice::<u64, T>(data).get(..len) {
        Some(elements) => View::new(elements, dims),
        None => bail!("a rank sent fewer elements than its dims {dims:?} need"),
    })
}

/// A frame as it is written.
pub(super) struct Outgoing<'a> {
    kind: Kind,
    group: u64,
    head: Vec<u8>,
    data: &'a [u8],
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Post = 1,
    Leave,
    Message,
    Abort,
    Bye,
}

impl<'a> Outgoing<'a> {
    pub fn post(group: u64, head: &PostHead, data: &'a [u8]) -> Result<Self> {
        let head = postcard::to_stdvec(head).map_err(candle_core::Error::wrap)?;
        Self { kind: Kind::Post, group, head, data }.checked()
    }

    pub fn leave(group: u64) -> Self {
        Self { kind: Kind::Leave, group, head: Vec::new(), data: &[] }
    }

    pub fn message(data: &'a [u8]) -> Result<Self> {
        Self { kind: Kind::Message, group: 0, head: Vec::new(), data }.checked()
    }

    pub fn abort(cause: &'a str) -> Self {
        let end = cause.floor_char_boundary(MAX_HEAD);
        Self { kind: Kind::Abort, group: 0, head: cause[..end].into(), data: &[] }
    }

    pub fn bye() -> Self {
        Self { kind: Kind::Bye, group: 0, head: Vec::new(), data: &[] }
    }

    fn checked(self) -> Result<Self> {
        if self.data.len() as u64 > MAX_DATA {
            bail!("{} bytes for one rank are more than the {MAX_DATA} of a frame", self.data.len())
        }
        Ok(self)
    }

    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let mut start = Vec::with_capacity(24 + self.head.len() + self.data.len().min(1 << 14));
        start.extend((self.kind as u32).to_le_bytes());
        start.extend((self.head.len() as u32).to_le_bytes());
        start.extend(self.group.to_le_bytes());
        start.extend((self.data.len() as u64).to_le_bytes());
        start.extend(&self.head);
        // Small data go with the head in one packet.
        let with_head = if self.data.len() <= 1 << 14 { self.data } else { &[] };
        start.extend(with_head);
        out.write_all(&start)?;
        out.write_all(&self.data[with_head.len()..])
    }
}

/// The next frame; `None` where the stream ends between frames.
pub(super) fn read(input: &mut impl Read) -> io::Result<Option<Frame>> {
    let mut prefix = [0u8; 24];
    match input.read(&mut prefix[..1])? {
        0 => return Ok(None),
        _ => input.read_exact(&mut prefix[1..])?,
    }
    let word = |at: usize| u32::from_le_bytes([prefix[at], prefix[at + 1], prefix[at + 2], prefix[at + 3]]);
    let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
    let (head_len, group, data_len) = (word(4) as usize, long(8), long(16));
    if head_len > MAX_HEAD || data_len > MAX_DATA {
        return Err(garbage(format!("a frame of {head_len} and {data_len} bytes")));
    }
    let mut head = vec![0; head_len];
    input.read_exact(&mut head)?;
    let kinds = [Kind::Post, Kind::Leave, Kind::Message, Kind::Abort, Kind::Bye];
    let kind = kinds.into_iter().find(|&kind| kind as u32 == word(0));
    let frame = match kind {
        Some(Kind::Post) => {
            let head: PostHead = postcard::from_bytes(&head).map_err(|e| garbage(e.to_string()))?;
            Frame::Post { group, head, data: read_words(input, data_len)? }
        }
        Some(Kind::Leave) => Frame::Leave { group },
        Some(Kind::Message) => {
            let mut data = Vec::new();
            if input.take(data_len).read_to_end(&mut data)? as u64 != data_len {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            Frame::Message(data)
        }
        Some(Kind::Abort) => Frame::Abort(String::from_utf8_lossy(&head).into_owned()),
        Some(Kind::Bye) => Frame::Bye,
        None => return Err(garbage(format!("a frame of kind {}", word(0)))),
    };
    if data_len > 0 && !matches!(kind, Some(Kind::Post | Kind::Message)) {
        return Err(garbage(format!("{data_len} bytes of data where none belong")));
    }
    Ok(Some(frame))
}

/// Data in words, aligned for every element type.
fn read_words(input: &mut impl Read, bytes: u64) -> io::Result<Vec<u64>> {
    let (bytes, mut words, mut done) = (bytes as usize, Vec::new(), 0);
    while done < bytes {
        words.resize((words.len() + PIECE).min(bytes.div_ceil(8)), 0u64);
        let memory: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        let end = memory.len().min(bytes);
        input.read_exact(&mut memory[done..end])?;
        done = end;
    }
    Ok(words)
}

fn garbage(what: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn written(frame: &Outgoing) -> Vec<u8> {
        let mut out = Vec::new();
        frame.write(&mut out).unwrap();
        out
    }

    #[test]
    fn rows_of_any_length_come_back() {
        for len in [0usize, 1, 3, 9_000, (PIECE * 8) + 5] {
            let data: Vec<u8> = (0..len).map(|i| i as u8).collect();
            let call = Call {
                dtype: Some(DType::U8),
                dims: Some(Dims::new(&[len]).unwrap()),
                ..Call::bare(Op::Broadcast)
            };
            let head = PostHead { rows: Some(vec![len]), ..PostHead::new(&call) };
            let bytes = written(&Outgoing::post(7, &head, &data).unwrap());
            let Some(Frame::Post { group: 7, head, data: words }) = read(&mut &bytes[..]).unwrap() else {
                panic!()
            };
            let rows = view(DType::U8, &head.rows.clone().unwrap(), &words).unwrap();
            assert!(rows.cpu::<u8>().unwrap() == data);
            assert_eq!(head.call().unwrap().dims.as_deref(), Some(&[len][..]));
            assert!(
                view(DType::I64, &[len + 1], &words).is_err()
                    && view(DType::U8, &[usize::MAX, 3], &words).is_err()
            );
        }
    }

    #[test]
    fn lengths_that_lie_are_refused_or_end_with_the_stream() {
        let message = written(&Outgoing::message(b"hello").unwrap());
        for cut in 1..message.len() {
            assert_eq!(read(&mut &message[..cut]).err().unwrap().kind(), ErrorKind::UnexpectedEof, "{cut}");
        }
        assert!(read(&mut &message[..0]).unwrap().is_none());
        // Kind, head and data lengths beyond what there is.
        for (at, value) in [(0, 9), (3, 1), (7, 1), (23, 1)] {
            let mut wrong = message.clone();
            wrong[at] = value;
            assert_eq!(read(&mut &wrong[..]).err().unwrap().kind(), ErrorKind::InvalidData, "{at}");
        }
        // A length within the limits allocates no more than arrives.
        let mut long = message.clone();
        long[20] = 8;
        assert_eq!(read(&mut &long[..]).err().unwrap().kind(), ErrorKind::UnexpectedEof);
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200), kind in 0u8..7, head in 0u8..60) {
            let mut bytes = bytes;
            let mut prefix = vec![kind, 0, 0, 0, head, 0, 0, 0];
            prefix.extend([0; 16]);
            prefix.append(&mut bytes);
            if let Ok(Some(Frame::Post { head, .. })) = read(&mut &prefix[..]) {
                let _ = head.call();
            }
        }
    }
}
