//! Detects what the bytes of an input are: text, or text compressed by gzip or zstd. An error names anything else.

use std::io::{self, BufRead, BufReader, Cursor, Read};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// Number of bytes of text that are decompressed at a time.
const BUFFER: usize = 1 << 16;

/// How an input is packed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Packing {
    /// It is text.
    Plain,
    /// `gzip`, perhaps of several members.
    Gzip,
    /// `zstd`, perhaps of several frames.
    Zstd,
}

/// The first bytes of supported compressed files.
const PACKED: [(&[u8], Packing); 2] = [(b"\x1f\x8b", Packing::Gzip), (b"\x28\xb5\x2f\xfd", Packing::Zstd)];

/// The first bytes of unsupported files, and what to do with them. If one begins with another, the longer one is first.
const FOREIGN: [(&[u8], &str); 9] = [
    (b"\xff\xfe\0\0", "UTF-32; convert it: iconv -f UTF-32 -t UTF-8"),
    (b"\0\0\xfe\xff", "UTF-32; convert it: iconv -f UTF-32 -t UTF-8"),
    (b"\xff\xfe", "UTF-16; convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16; convert it: iconv -f UTF-16 -t UTF-8"),
    (b"PK\x03\x04", "a zip archive; unpack it"),
    (b"\xfd7zXZ\0", "compressed by xz, which is not read: unpack it, or compress it by gzip or zstd"),
    (b"BZh91AY&SY", "compressed by bzip2, which is not read: unpack it, or compress it by gzip or zstd"),
    (b"PAR1", "a Parquet file, which must be a file of its own: it cannot be read from a stream"),
    (b"SQLite format 3\0", "a SQLite database; write its rows as JSON lines"),
];

/// The largest number of bytes that is needed to detect the kind of an input.
const MAGIC: u64 = 4;

/// The text of an input, decompressed while it is read, and the kind of compression.
///
/// # Errors
/// It is neither text nor compressed text; the error says what it is.
pub fn text(mut input: impl BufRead + Send + 'static) -> io::Result<(Box<dyn BufRead + Send>, Packing)> {
    let beginning = input.fill_buf()?.to_vec();
    let undecided =
        PACKED.iter().any(|(magic, _)| magic.len() > beginning.len() && magic.starts_with(&beginning));
    // A pipe may provide only one byte at first.
    let (beginning, input): (_, Box<dyn BufRead + Send>) = match undecided && !beginning.is_empty() {
        true => {
            let mut head = Vec::new();
            input.by_ref().take(MAGIC).read_to_end(&mut head)?;
            (head.clone(), Box::new(Cursor::new(head).chain(input)))
        }
        false => (beginning, Box::new(input)),
    };
    if let Some(what) = foreign(&beginning) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("it is {what}")));
    }
    let packing = PACKED.iter().find(|(magic, _)| beginning.starts_with(magic)).map(|(_, packing)| *packing);
    let packing = packing.unwrap_or(Packing::Plain);
    let text: Box<dyn BufRead + Send> = match packing {
        Packing::Plain => input,
        Packing::Gzip => Box::new(BufReader::with_capacity(BUFFER, MultiGzDecoder::new(input))),
        Packing::Zstd => Box::new(BufReader::with_capacity(BUFFER, Zstd::new(input)?)),
    };
    Ok((text, packing))
}

/// The kind of an input that is not supported.
fn foreign(beginning: &[u8]) -> Option<&'static str> {
    let known = FOREIGN.iter().find(|(magic, _)| beginning.starts_with(magic)).map(|(_, what)| *what);
    known.or_else(|| utf16_without_mark(beginning))
}

/// UTF-16 of ASCII letters: every other byte is 0.
fn utf16_without_mark(beginning: &[u8]) -> Option<&'static str> {
    const ENOUGH: usize = 16;
    let zeros = |odd: usize| beginning.iter().skip(odd).step_by(2).filter(|byte| **byte == 0).count();
    let even = zeros(0);
    let odd = zeros(1);
    let half = beginning.len() / 2;
    if beginning.len() < ENOUGH {
        return None;
    }
    match (even * 2 > half && odd == 0, odd * 2 > half && even == 0) {
        (true, _) => Some("UTF-16 without a byte-order mark; convert it: iconv -f UTF-16BE -t UTF-8"),
        (_, true) => Some("UTF-16 without a byte-order mark; convert it: iconv -f UTF-16LE -t UTF-8"),
        _ => None,
    }
}

/// The frames of a zstd stream one after the other, each checked against its checksum.
struct Zstd {
    input: Box<dyn BufRead + Send>,
    decoder: FrameDecoder,
    /// Whether a frame has begun.
    begun: bool,
}

/// A frame of no bytes.
const EMPTY: [u8; 9] = [0x28, 0xb5, 0x2f, 0xfd, 0x20, 0, 1, 0, 0];

impl Zstd {
    fn new(input: Box<dyn BufRead + Send>) -> io::Result<Self> {
        let mut decoder = FrameDecoder::new();
        // Only a decoder that has been used before limits the memory of a frame (to 100 MiB).
        decoder.init(&EMPTY[..]).map_err(cannot)?;
        Ok(Self { input, decoder, begun: false })
    }

    /// Begins the next frame that has content, if one follows.
    fn begin(&mut self) -> io::Result<bool> {
        while !self.input.fill_buf()?.is_empty() {
            match self.decoder.init(&mut self.input) {
                Ok(()) => {
                    self.begun = true;
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    io::copy(&mut self.input.by_ref().take(length.into()), &mut io::sink())?;
                }
                Err(e) => return Err(cannot(e)),
            }
        }
        Ok(false)
    }

    /// Bytes of the current frame; none at its end.
    fn read_frame(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.decoder.can_collect() < into.len() && !self.decoder.is_finished() {
            let lacking = into.len() - self.decoder.can_collect();
            self.decoder
                .decode_blocks(&mut self.input, BlockDecodingStrategy::UptoBytes(lacking))
                .map_err(cannot)?;
        }
        let read = self.decoder.read(into)?;
        let told = self.decoder.get_checksum_from_data();
        let computed = self.decoder.get_calculated_checksum();
        if read == 0 && told.is_some() && told != computed {
            return Err(io::Error::other("its checksum is another one: the compressed file is damaged"));
        }
        Ok(read)
    }
}

impl Read for Zstd {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while !into.is_empty() && (self.begun || self.begin()?) {
            match self.read_frame(into)? {
                0 => self.begun = false,
                read => return Ok(read),
            }
        }
        Ok(0)
    }
}

fn cannot(error: FrameDecoderError) -> io::Error {
    io::Error::other(format!("it cannot be decompressed as zstd: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};
    use std::io::Write;

    fn read(bytes: &[u8]) -> io::Result<String> {
        let (mut text, _) = text(Cursor::new(bytes.to_vec()))?;
        let mut all = String::new();
        text.read_to_string(&mut all).map(|_| all)
    }

    fn gzip(text: &str) -> Vec<u8> {
        let mut out = GzEncoder::new(Vec::new(), Compression::default());
        out.write_all(text.as_bytes()).unwrap();
        out.finish().unwrap()
    }

    fn zstd(text: &str) -> Vec<u8> {
        compress_to_vec(text.as_bytes(), CompressionLevel::Fastest)
    }

    /// Provides one byte at a time.
    struct Slow(Cursor<Vec<u8>>);

    impl Read for Slow {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let one = into.len().min(1);
            self.0.read(&mut into[..one])
        }
    }

    #[test]
    fn compressed_text_is_read_whatever_its_parts() {
        let long: String = (0..50_000).map(|i| format!("line {i}\n")).collect();
        assert_eq!(read(&gzip(&long)).unwrap(), long);
        assert_eq!(read(&zstd(&long)).unwrap(), long);
        assert_eq!(read(&[gzip("a\n"), gzip(""), gzip("b\n")].concat()).unwrap(), "a\nb\n");
        let skipped = [&0x184d_2a50_u32.to_le_bytes()[..], &3_u32.to_le_bytes(), b"xyz"].concat();
        let frames = [zstd("a\n"), skipped, zstd(""), zstd("b\n")].concat();
        assert_eq!(read(&frames).unwrap(), "a\nb\n");
        for bytes in [gzip("slow"), zstd("slow"), b"slow".to_vec()] {
            let (mut text, _) = text(BufReader::new(Slow(Cursor::new(bytes)))).unwrap();
            let mut all = String::new();
            text.read_to_string(&mut all).unwrap();
            assert_eq!(all, "slow");
        }
        assert_eq!(read(b"").unwrap(), "");
    }

    #[test]
    fn damaged_files_are_errors() {
        let long: String = (0..5000).map(|i| format!("line {i}\n")).collect();
        for whole in [gzip(&long), zstd(&long)] {
            for cut in [5, whole.len() / 2, whole.len() - 1] {
                assert!(read(&whole[..cut]).is_err(), "{cut} of {}", whole.len());
            }
            let mut flipped = whole.clone();
            *flipped.last_mut().unwrap() ^= 1;
            assert!(read(&flipped).is_err(), "the checksum");
        }
        assert!(read(b"\x28\xb5\x2f\xfd").is_err());
        // A window of 2 TiB.
        let huge = [0x28, 0xb5, 0x2f, 0xfd, 0, 0xf8, 1, 0, 0];
        let e = read(&huge).unwrap_err().to_string();
        assert!(e.contains("zstd"), "{e}");
    }

    #[test]
    fn other_files_are_named() {
        let utf16 = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<_>>();
        let json = "{\"custom_id\": \"a\", \"é\": \"漢\"}";
        let big: Vec<u8> = json.encode_utf16().flat_map(u16::to_be_bytes).collect();
        for (bytes, name) in [
            (utf16(&format!("\u{feff}{json}")), "UTF-16;"),
            (utf16(json), "UTF-16LE"),
            (big, "UTF-16BE"),
            (b"PAR1".to_vec(), "Parquet"),
            (b"PK\x03\x04rest".to_vec(), "zip"),
            (b"BZh91AY&SYrest".to_vec(), "bzip2"),
        ] {
            let e = read(&bytes).unwrap_err().to_string();
            assert!(e.contains(name), "{e}");
        }
        assert_eq!(read("BZh and PK are text".as_bytes()).unwrap(), "BZh and PK are text");
        assert_eq!(read(b"a\0b").unwrap(), "a\0b");
    }
}
