//! Checks bytes against the hash in a file's ETag. This hash is also the name of the blob.

use std::fs::File;
use std::io;
use std::path::Path;

use sha1::Sha1;
use sha2::{Digest, Sha256};

/// Computes the hash of a file whose bytes arrive in pieces.
pub struct Hasher {
    announced: String,
    bytes: u64,
    state: State,
}

/// The kinds of hashes that an ETag may be.
enum State {
    /// The hash of a large file.
    Sha256(Sha256),
    /// The hash of a small file. It is git's hash, which covers a header with the size, or in some artifact stores the
    /// hash of the contents alone.
    Sha1 { git: Sha1, plain: Sha1 },
    /// The ETag is not a hash that is known, so it says nothing about the bytes.
    Unknown,
}

impl Hasher {
    /// Makes a hasher for a file of `size` bytes with this ETag.
    pub fn new(etag: &str, size: u64) -> Self {
        let is_hex = etag.bytes().all(|b| b.is_ascii_hexdigit());
        let state = match etag.len() {
            64 if is_hex => State::Sha256(Sha256::new()),
            40 if is_hex => {
                State::Sha1 { git: Sha1::new_with_prefix(format!("blob {size}\0")), plain: Sha1::new() }
            }
            _ => State::Unknown,
        };
        Self { announced: etag.to_ascii_lowercase(), bytes: 0, state }
    }

    /// Returns the fault of a file on disk, if the ETag shows one.
    pub fn fault_of(path: &Path, etag: &str) -> Option<String> {
        let read = || -> io::Result<Self> {
            let mut file = File::open(path)?;
            let mut hasher = Self::new(etag, file.metadata()?.len());
            io::copy(&mut file, &mut hasher)?;
            Ok(hasher)
        };
        match read() {
            Ok(hasher) => hasher.fault(),
            Err(e) => Some(format!("cannot be read: {e}")),
        }
    }

    /// Whether the ETag says anything about the bytes.
    pub fn knows(&self) -> bool {
        !matches!(self.state, State::Unknown)
    }

    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        match &mut self.state {
            State::Sha256(hash) => hash.update(bytes),
            State::Sha1 { git, plain } => {
                git.update(bytes);
                plain.update(bytes);
            }
            State::Unknown => {}
        }
    }

    /// Returns the fault of the bytes so far: the expected hash and the computed one.
    pub fn fault(&self) -> Option<String> {
        let Self { announced, bytes, state } = self;
        let (name, got) = match state {
            State::Sha256(hash) => ("SHA-256", vec![format!("{:x}", hash.clone().finalize())]),
            State::Sha1 { git, plain } => {
                ("SHA-1", [git, plain].map(|hash| format!("{:x}", hash.clone().finalize())).to_vec())
            }
            State::Unknown => return None,
        };
        (!got.contains(announced))
            .then(|| format!("expected {name} {announced}, got {} of {bytes} bytes", got[0]))
    }
}

impl io::Write for Hasher {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(etag: &str, bytes: &[u8]) -> Option<String> {
        let mut hasher = Hasher::new(etag, bytes.len() as u64);
        bytes.chunks(3).for_each(|piece| hasher.update(piece));
        hasher.fault()
    }

    /// The values come from `printf hello | git hash-object --stdin`, `sha1sum` and `sha256sum`.
    #[test]
    fn every_hash_of_an_etag_is_known() {
        let git = "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0";
        let plain = "aaf4c61ddcc5e8a2dabede0f3b482cd9aea9434d";
        let sha256 = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
        for etag in [git, plain, sha256, &sha256.to_uppercase()] {
            assert_eq!(fault(etag, b"hello"), None);
            let fault = fault(etag, b"hellp").unwrap();
            assert!(fault.contains(&format!("{}, got ", etag.to_lowercase())), "{fault}");
            assert!(fault.ends_with("of 5 bytes"), "{fault}");
        }
        // Other ETags say nothing about the bytes: S3's for files in parts, or the number of a version.
        for etag in ["d41d8cd98f00b204e9800998ecf8427e-2", "5", &"g".repeat(64)] {
            assert!(fault(etag, b"hello").is_none() && !Hasher::new(etag, 5).knows());
        }
    }
}
