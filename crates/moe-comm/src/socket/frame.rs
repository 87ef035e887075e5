//! What travels between two ranks after the handshake.
//!
//! ```text
//! bytes of the head u32 | bytes of the data u64 | head | data
//! ```
//! Numbers of the prefix are little endian; heads are a [`Frame`] in postcard; data are a message, or a view's
//! elements as they lie in memory (the handshake refuses a rank of another byte order).

use std::io::{self, ErrorKind, Read, Write};

use candle_core::{DType, Result, bail};
use moe_kernels::{Dims, View, with_element};
use serde::{Deserialize, Serialize};

use crate::call::Call;

/// Bytes before the head.
const PREFIX: usize = 12;
/// The largest head: the counts of the largest world, and an error's text, are far smaller.
const MAX_HEAD: usize = 4 << 20;
/// The largest data. What a length announces is only allocated as it arrives.
const MAX_DATA: u64 = 1 << 36;
/// Words that are allocated ahead of the data.
const PIECE: usize = 1 << 20;

/// One frame. Its data are not in its head; where it is sent they stand beside it.
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
    /// A message beside the collectives.
    Message(#[serde(skip)] Vec<u8>),
    /// The sender's world has failed.
    Abort(String),
    /// The sender ends as it should.
    Bye,
}

/// A frame that is sent.
pub(super) type Outgoing<'a> = Frame<&'a PostHead>;

/// What a rank says in a round.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct PostHead {
    pub call: Call,
    /// Colour, key, and the id of the new group if the sender leads it.
    pub split: Option<(usize, usize, u64)>,
    /// Dims of the data, which have the call's dtype.
    pub rows: Option<Vec<usize>>,
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

impl Outgoing<'_> {
    pub fn post(group: u64, head: &PostHead) -> Outgoing<'_> {
        Frame::Post { group, head, data: Vec::new() }
    }

    pub fn abort(cause: &str) -> Self {
        // An encoded string has its length in front.
        Self::Abort(cause[..cause.floor_char_boundary(MAX_HEAD / 2)].to_string())
    }

    pub fn write(&self, data: &[u8], out: &mut impl Write) -> io::Result<()> {
        if data.len() as u64 > MAX_DATA {
            let what = format!("{} bytes for one rank are more than the {MAX_DATA} of a frame", data.len());
            return Err(io::Error::new(ErrorKind::InvalidInput, what));
        }
        let head = postcard::to_stdvec(self).map_err(io::Error::other)?;
        // Small data go with the head in one packet.
        let with_head = if data.len() <= 1 << 14 { data } else { &[] };
        let mut start = Vec::with_capacity(PREFIX + head.len() + with_head.len());
        start.extend((head.len() as u32).to_le_bytes());
        start.extend((data.len() as u64).to_le_bytes());
        start.extend(&head);
        start.extend(with_head);
        out.write_all(&start)?;
        out.write_all(&data[with_head.len()..])
    }
}

/// The next frame; `None` where the stream ends between frames.
pub(super) fn read(input: &mut impl Read) -> io::Result<Option<Frame>> {
    let mut prefix = [0u8; PREFIX];
    match input.read(&mut prefix[..1])? {
        0 => return Ok(None),
        _ => input.read_exact(&mut prefix[1..])?,
    }
    let [a, b, c, d, data_len @ ..] = prefix;
    let (head_len, data_len) = (u32::from_le_bytes([a, b, c, d]) as usize, u64::from_le_bytes(data_len));
    if head_len > MAX_HEAD || data_len > MAX_DATA {
        return Err(garbage(format!("a frame of {head_len} and {data_len} bytes")));
    }
    let mut head = vec![0; head_len];
    input.read_exact(&mut head)?;
    let mut frame: Frame = postcard::from_bytes(&head).map_err(|e| garbage(e.to_string()))?;
    match &mut frame {
        Frame::Post { data, .. } => *data = read_words(input, data_len)?,
        Frame::Message(data) => *data = read_bytes(input, data_len)?,
        _ if data_len > 0 => return Err(garbage(format!("{data_len} bytes of data where none belong"))),
        _ => {}
    }
    Ok(Some(frame))
}

fn read_bytes(input: &mut impl Read, len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    match input.take(len).read_to_end(&mut bytes)? as u64 == len {
        true => Ok(bytes),
        false => Err(ErrorKind::UnexpectedEof.into()),
    }
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
    use crate::call::Op;
    use proptest::prelude::*;

    fn written(frame: &Outgoing, data: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        frame.write(data, &mut out).unwrap();
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
            let head = PostHead { call, split: None, rows: Some(vec![len]) };
            let bytes = written(&Outgoing::post(7, &head), &data);
            let Some(Frame::Post { group: 7, head, data: words }) = read(&mut &bytes[..]).unwrap() else {
                panic!()
            };
            let rows = view(DType::U8, &head.rows.clone().unwrap(), &words).unwrap();
            assert!(rows.cpu::<u8>().unwrap() == data);
            assert_eq!((head.call.dtype, head.call.dims.as_deref()), (Some(DType::U8), Some(&[len][..])));
            assert!(
                view(DType::I64, &[len + 1], &words).is_err()
                    && view(DType::U8, &[usize::MAX, 3], &words).is_err()
            );
        }
    }

    #[test]
    fn lengths_that_lie_are_refused_or_end_with_the_stream() {
        let message = written(&Frame::Message(Vec::new()), b"hello");
        for cut in 1..message.len() {
            assert_eq!(read(&mut &message[..cut]).err().unwrap().kind(), ErrorKind::UnexpectedEof, "{cut}");
        }
        assert!(read(&mut &message[..0]).unwrap().is_none());
        // Head and data lengths beyond what there is, and a kind.
        for (at, value) in [(3, 1), (11, 1), (12, 9)] {
            let mut wrong = message.clone();
            wrong[at] = value;
            assert_eq!(read(&mut &wrong[..]).err().unwrap().kind(), ErrorKind::InvalidData, "{at}");
        }
        // A length within the limits allocates no more than arrives.
        let mut long = message.clone();
        long[8] = 8;
        assert_eq!(read(&mut &long[..]).err().unwrap().kind(), ErrorKind::UnexpectedEof);
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200), kind in 0u8..7, head in 1u8..60) {
            let mut prefix = vec![head, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, kind];
            prefix.extend(bytes);
            let _ = read(&mut &prefix[..]);
        }
    }
}
