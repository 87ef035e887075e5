//! Frames that are read as they were written, and damaged frames that are refused.

use super::*;
use crate::call::Op;
use proptest::prelude::*;

fn written(frame: &Outgoing, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    frame.write(0, data, &mut out).unwrap();
    out
}

fn read(bytes: &[u8]) -> io::Result<Option<Frame>> {
    let mut frames = Frames::new(bytes);
    frames.begin()?.map(|begun| frames.finish(begun)).transpose()
}

fn message(data: &[u8]) -> Vec<u8> {
    written(&Frame::Message(0, Vec::new()), data)
}

fn rows(dims: &[usize]) -> PostHead {
    let dims = dims.to_vec();
    let call =
        Call { dtype: Some(DType::U8), dims: Some(Dims::new(&dims).unwrap()), ..Call::bare(Op::Broadcast) };
    PostHead { call, split: None, rows: Some(dims) }
}

/// A prefix and a head with valid checksums.
fn sealed(head: &[u8], bytes: u64, data: &[u8]) -> Vec<u8> {
    let mut out = (head.len() as u32).to_le_bytes().to_vec();
    out.extend(bytes.to_le_bytes());
    out.extend(crc32fast::hash(head).to_le_bytes());
    out.extend(crc32fast::hash(data).to_le_bytes());
    out.extend(numbered(0, &out).to_le_bytes());
    out.extend(head);
    out.extend(data);
    out
}

#[test]
fn rows_of_any_length_come_back() {
    for len in [0usize, 1, 3, 9_000, (PIECE * 8) + 5] {
        let data: Vec<u8> = (0..len).map(|i| i as u8).collect();
        let head = rows(&[len]);
        let bytes = written(&Outgoing::post(7, &head), &data);
        let Some(Frame::Post { group: 7, head, data: words }) = read(&bytes).unwrap() else { panic!() };
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
fn every_flipped_bit_is_found() {
    let data: Vec<u8> = (0..300).map(|i| i as u8).collect();
    let head = rows(&[300]);
    let post = written(&Outgoing::post(1, &head), &data);
    for frame in [post, message(b"a step"), written(&Frame::Bye, b""), written(&Outgoing::abort("why"), b"")]
    {
        assert!(read(&frame).is_ok());
        for bit in 0..8 * frame.len() {
            let mut altered = frame.clone();
            altered[bit / 8] ^= 1 << (bit % 8);
            let error = read(&altered).err().unwrap();
            assert!(
                error.kind() == ErrorKind::InvalidData && error.to_string().contains("altered"),
                "{bit}: {error}"
            );
        }
    }
}

#[test]
fn frames_that_are_missing_twice_or_swapped_are_found() {
    let frames: Vec<Vec<u8>> = (0..3u8)
        .map(|n| {
            let mut out = Vec::new();
            Frame::<&PostHead>::Message(0, Vec::new()).write(u64::from(n), &[n; 9], &mut out).unwrap();
            out
        })
        .collect();
    let checked =
        |order: &[usize]| check_frames(&order.iter().flat_map(|&n| frames[n].clone()).collect::<Vec<_>>());
    assert_eq!(checked(&[0, 1, 2]).unwrap(), 3);
    for order in [&[0, 2][..], &[0, 0, 1], &[1], &[0, 2, 1]] {
        assert!(checked(order).unwrap_err().to_string().contains("altered"), "{order:?}");
    }
}

#[test]
fn lengths_that_lie_are_refused_or_end_with_the_stream() {
    let message = message(b"hello");
    for cut in 1..message.len() {
        assert_eq!(read(&message[..cut]).err().unwrap().kind(), ErrorKind::UnexpectedEof, "{cut}");
    }
    assert!(read(&message[..0]).unwrap().is_none());
    // These lengths exceed what any frame has; the checksums are valid.
    let head = postcard::to_stdvec(&Outgoing::Message(0, Vec::new())).unwrap();
    for wrong in [
        sealed(&vec![0; MAX_HEAD + 1], 0, b""),
        sealed(&head, MAX_MESSAGE + 1, b""),
        sealed(&[&head[..], b"more"].concat(), 0, b""),
        sealed(&postcard::to_stdvec(&Outgoing::Bye).unwrap(), 1, b"x"),
        sealed(&[99], 0, b""),
    ] {
        assert_eq!(read(&wrong).err().unwrap().kind(), ErrorKind::InvalidData);
    }
    // A length within the limits allocates no more memory than the data that arrives.
    assert_eq!(read(&sealed(&head, MAX_MESSAGE, b"short")).err().unwrap().kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn a_head_that_does_not_fit_its_data_is_refused() {
    let call = |op| Call { dtype: Some(DType::F32), ..Call::bare(op) };
    let head = |op, split, rows: Option<&[usize]>| PostHead {
        call: call(op),
        split,
        rows: rows.map(<[usize]>::to_vec),
    };
    for (head, data) in [
        (head(Op::AllReduce, None, Some(&[3])), &[0u8; 8][..]),
        (head(Op::AllReduce, None, Some(&[3])), &[0; 16]),
        (head(Op::AllReduce, None, Some(&[usize::MAX, 2])), &[0; 16]),
        (head(Op::AllReduce, None, Some(&[1, 1, 1, 1, 1, 1, 1, 1, 1, 1])), &[0; 4]),
        (head(Op::Barrier, None, None), &[0; 4]),
        (head(Op::Barrier, Some((0, 0, 1)), None), &[]),
        (head(Op::Split, None, None), &[]),
        (PostHead { call: Call::bare(Op::AllReduce), split: None, rows: Some(vec![1]) }, &[0; 4]),
    ] {
        let error = read(&written(&Outgoing::post(0, &head), data)).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidData, "{head:?}");
    }
}

proptest! {
    #[test]
    fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200), head in 0usize..60) {
        let _ = read(&bytes);
        let (head, data) = bytes.split_at(head.min(bytes.len()));
        let _ = read(&sealed(head, data.len() as u64, data));
    }
}
