//! The beginning of a file that is being downloaded, and its hash so far.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use indicatif::HumanBytes;

use super::failure::Failure;
use super::hash::Hasher;

/// A file on disk that has the beginning of a download.
pub struct Partial {
    file: File,
    path: PathBuf,
    etag: String,
    len: u64,
    size: u64,
    /// The hash of the bytes on disk.
    hasher: Hasher,
}

impl Partial {
    /// Opens the part of a file that is on disk. The file has `size` bytes and this ETag on the hub. The part is read,
    /// because its hash is needed.
    pub fn open(path: &Path, etag: &str, size: u64) -> Result<Self, Failure> {
        let mut hasher = Hasher::new(etag, size);
        let mut open = || -> io::Result<(File, u64)> {
            let file = File::options().create(true).read(true).append(true).open(path)?;
            let len = file.metadata()?.len();
            if len <= size {
                io::copy(&mut (&file).take(len), &mut hasher)?;
            }
            Ok((file, len))
        };
        let (file, len) = open().map_err(|e| cannot_write(path, size, e))?;
        let mut partial = Self { file, path: path.to_path_buf(), etag: etag.to_string(), len, size, hasher };
        if len > size {
            partial.restart()?;
        }
        Ok(partial)
    }

    /// The number of bytes on disk.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The number of bytes of the whole file.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether all bytes are on disk.
    pub fn is_full(&self) -> bool {
        self.len >= self.size
    }

    /// Returns the fault of the file, whose bytes must all be on disk.
    pub fn fault(&self) -> Option<String> {
        self.hasher.fault()
    }

    /// Deletes the bytes on disk.
    pub fn restart(&mut self) -> Result<(), Failure> {
        self.file.set_len(0).map_err(|e| self.failed(e))?;
        self.len = 0;
        self.hasher = Hasher::new(&self.etag, self.size);
        Ok(())
    }

    /// Appends a piece. Bytes beyond the size of the file are dropped.
    pub fn append(&mut self, piece: &[u8]) -> Result<(), Failure> {
        let room = usize::try_from(self.size - self.len).unwrap_or(usize::MAX);
        let piece = &piece[..piece.len().min(room)];
        self.file.write_all(piece).map_err(|e| self.failed(e))?;
        self.hasher.update(piece);
        self.len += piece.len() as u64;
        Ok(())
    }

    /// Waits until the bytes are on the disk.
    pub fn sync(&self) -> Result<(), Failure> {
        self.file.sync_all().map_err(|e| self.failed(e))
    }

    /// Deletes the file.
    pub fn delete(self) -> Result<(), Failure> {
        fs::remove_file(&self.path).map_err(|e| self.failed(e))
    }

    fn failed(&self, error: io::Error) -> Failure {
        cannot_write(&self.path, self.size - self.len, error)
    }
}

fn cannot_write(path: &Path, missing: u64, error: io::Error) -> Failure {
    let is_full = matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
    let advice = match is_full {
        true => format!(
            "{} more are needed; free some space or choose another disk with HF_HUB_CACHE, then run again: what is \
             downloaded is kept",
            HumanBytes(missing)
        ),
        false => "is the cache (HF_HUB_CACHE, HF_HOME) writable?".to_string(),
    };
    Failure::Fatal(anyhow!("cannot write {}: {error}; {advice}", path.display()))
}
