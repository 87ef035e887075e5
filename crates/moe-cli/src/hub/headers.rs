//! Downloads the headers of weights that are on the hub. They show which tensors a checkpoint has.
//!
//! The headers are stored in a separate folder together with the checkpoint's small files. Each file of weights has its
//! full size and its header there. In place of its data it has a hole, which takes no space on the disk. So the code
//! that opens checkpoints can open this folder.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use indicatif::ProgressBar;

use super::client::Client;
use super::failure::Failure;
use super::retry::{RETRIES, retry};
use super::{Located, Rest, files, temporary};

/// The number of bytes of the first request. Most headers are shorter.
const FIRST: u64 = 128 << 10;
/// The longest header of the format, with the field of its length.
const LONGEST: u64 = 100_000_000 + LENGTH_FIELD;
const LENGTH_FIELD: u64 = 8;
/// The number of files whose headers are requested at the same time.
const AT_ONCE: usize = 8;

/// A folder in which the headers of a checkpoint's weights can be read.
pub struct Headers {
    dir: PathBuf,
    /// Whether the weights are on the hub. The folder is then deleted when this value is dropped.
    are_remote: bool,
}

impl Headers {
    /// The folder with the headers.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Whether the weights are on the hub and not on this machine.
    pub fn are_remote(&self) -> bool {
        self.are_remote
    }
}

impl Drop for Headers {
    fn drop(&mut self) {
        if self.are_remote {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

impl Located {
    /// Returns the headers of the weights. Files on this machine are used as they are. Otherwise the beginnings of the
    /// files are requested from the hub.
    ///
    /// # Errors
    /// The errors of [`locate`](super::locate); a folder for temporary files that cannot be created or cannot hold
    /// sparse files.
    pub fn headers(&self) -> Result<Headers> {
        let here = || Ok(Headers { dir: self.dir.clone(), are_remote: false });
        let Some(rest) = self.rest.as_ref().filter(|rest| rest.gguf.is_empty()) else { return here() };
        let weights = rest.weights()?;
        if weights.iter().all(|file| self.dir.join(file).exists()) {
            return here();
        }
        let headers = Headers { dir: temporary::folder("moe-headers")?, are_remote: true };
        for name in files::in_folder(&self.dir, Path::is_file).iter().filter(|name| !name.contains('/')) {
            let copied = fs::copy(self.dir.join(name), headers.dir.join(name));
            copied.with_context(|| format!("cannot copy {name} to {}", headers.dir.display()))?;
        }
        let dir = headers.dir();
        for files in weights.chunks(AT_ONCE) {
            std::thread::scope(|scope| {
                let threads: Vec<_> =
                    files.iter().map(|file| scope.spawn(move || rest.header(file, dir))).collect();
                let mut joined = threads.into_iter().map(|thread| thread.join());
                joined
                    .try_for_each(|header| header.map_err(|_| anyhow!("a request for a header panicked"))?)
            })?;
        }
        Ok(headers)
    }
}

impl Rest {
    /// Makes a file of weights in a folder that has only its header and its size.
    fn header(&self, file: &str, dir: &Path) -> Result<()> {
        let Self { name, settings, commit, .. } = self;
        let client = Client::new(settings);
        let url = client.url(name, commit, file);
        let ask = || -> Result<_, Failure> {
            let size = client.file(&url)?.size;
            Ok((header(&client, &url, size)?, size))
        };
        let asked = retry(file, RETRIES, settings.backoff, &ProgressBar::hidden(), ask);
        let (header, size) = asked.map_err(|failure: Failure| failure.explain(name, Some(file), settings))?;
        let path = dir.join(file);
        let write = || {
            let mut header_only = File::create_new(&path)?;
            header_only.write_all(&header)?;
            header_only.set_len(size)
        };
        write().with_context(|| format!("cannot write the header of {file} to {}", path.display()))
    }
}

/// Returns the header of a safetensors file of `size` bytes. For any other file it returns the beginning, which the
/// reader then refuses.
fn header(client: &Client, url: &str, size: u64) -> Result<Vec<u8>, Failure> {
    let mut bytes = client.beginning(url, FIRST.min(size))?;
    let Some(length) = bytes.first_chunk() else { return Ok(bytes) };
    let end = u64::from_le_bytes(*length).saturating_add(LENGTH_FIELD);
    if end > LONGEST {
        return Ok(bytes);
    }
    if end > bytes.len() as u64 {
        bytes = client.beginning(url, end.min(size))?;
    }
    bytes.truncate(usize::try_from(end).unwrap_or(usize::MAX));
    Ok(bytes)
}
