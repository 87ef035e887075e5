//! One file into the cache: continued where an earlier try ended, whole or not at all.
//!
//! All clients of the hub use this layout, so they share what is downloaded:
//! `blobs/HASH` is a file, `blobs/HASH.incomplete` its beginning, `snapshots/COMMIT/NAME` a link to
//! it, and `.locks/REPO/HASH.lock` keeps two processes from writing it at once.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use indicatif::{HumanBytes, ProgressBar};
use tracing::{info, warn};

use super::check::{is_sha256, sha256_fault};
use super::client::{Client, FileInfo};
use super::env::Settings;
use super::failure::Failure;
use super::name::ModelName;
use super::progress::{FileProgress, Progress};

/// Tries after the first one that get no further.
const RETRIES: u32 = 4;
/// Bytes read at once.
const PIECE: usize = 256 << 10;

/// Downloads of one commit.
pub struct Download<'a> {
    /// Speaks to the hub.
    pub client: &'a Client<'a>,
    /// Where files are kept, and how long to wait between tries.
    pub settings: &'a Settings,
    /// The repository.
    pub name: &'a ModelName,
    /// The commit.
    pub commit: &'a str,
    /// The folder of the repository in the cache.
    pub folder: &'a Path,
}

/// A file that is not in the snapshot yet.
struct Wanted<'f> {
    file: &'f str,
    url: String,
    info: FileInfo,
}

impl Download<'_> {
    /// Path of a file in the snapshot, downloaded unless it is there.
    pub fn file(&self, file: &str) -> Result<PathBuf> {
        self.files(&[file])?;
        Ok(self.pointer(file))
    }

    /// Downloads the files that are not in the snapshot.
    pub fn files(&self, files: &[&str]) -> Result<()> {
        let lacking = files.iter().filter(|file| !self.pointer(file).exists());
        let wanted = lacking.map(|file| self.ask(file)).collect::<Result<Vec<_>>>()?;
        let bytes = wanted.iter().map(|wanted| wanted.info.size).sum();
        let progress = Progress::new(wanted.len(), bytes);
        wanted.iter().try_for_each(|wanted| self.fetch(wanted, &progress))?;
        progress.finish();
        Ok(())
    }

    fn pointer(&self, file: &str) -> PathBuf {
        self.folder.join("snapshots").join(self.commit).join(file)
    }

    /// What the hub says of a file.
    fn ask<'f>(&self, file: &'f str) -> Result<Wanted<'f>> {
        let url = self.client.url(self.name, self.commit, file);
        let info = self.retry(file, &ProgressBar::hidden(), || self.client.file(&url));
        let info = info.map_err(|failure| failure.explain(self.name, Some(file), self.settings))?;
        Ok(Wanted { file, url, info })
    }

    fn fetch(&self, wanted: &Wanted, progress: &Progress) -> Result<()> {
        let Wanted { file, info, .. } = wanted;
        let blob = self.folder.join("blobs").join(&info.etag);
        make_parents(&blob)?;
        let _lock = self.lock(file, &info.etag)?;
        if fs::metadata(&blob).map(|m| m.len()).ok() != Some(info.size) {
            let path = blob.with_added_extension("incomplete");
            let filled = self.fill(&path, wanted, progress);
            filled.map_err(|failure| failure.explain(self.name, Some(file), self.settings))?;
            fs::rename(&path, &blob).with_context(|| format!("cannot rename {}", path.display()))?;
        }
        let pointer = self.pointer(file);
        make_parents(&pointer)?;
        link(&blob, &pointer, file).with_context(|| format!("cannot create {}", pointer.display()))
    }

    /// Makes a file whole. What an earlier run left may not be what it received: after a loss of power a file may have its
    /// length and zeros at its end. So the hash tells whether the whole is right, and if not, it is downloaded once more.
    fn fill(&self, path: &Path, wanted: &Wanted, progress: &Progress) -> Result<(), Failure> {
        let Wanted { file, info: FileInfo { size, etag }, .. } = wanted;
        let mut partial = Partial::open(path, *size)?;
        let is_checked = partial.len > 0 && is_sha256(etag);
        let progress = progress.file(file, *size, partial.len);
        self.complete(&mut partial, wanted, &progress)?;
        if is_checked && let Some(fault) = sha256_fault(path, etag) {
            progress
                .bar()
                .suspend(|| warn!("{file}: what was here is damaged ({fault}); downloading it again"));
            partial.restart()?;
            self.complete(&mut partial, wanted, &progress)?;
            if let Some(fault) = sha256_fault(path, etag) {
                // Whoever runs again must not continue this.
                partial.restart()?;
                return Err(wrong_bytes(file, &fault, self.settings));
            }
        }
        progress.finish(*size);
        partial.file.sync_all().map_err(|e| partial.failed(e))
    }

    /// Brings a file to its full size.
    fn complete(
        &self,
        partial: &mut Partial,
        wanted: &Wanted,
        progress: &FileProgress,
    ) -> Result<(), Failure> {
        while partial.len < partial.size {
            let before = partial.len;
            self.retry(wanted.file, progress.bar(), || match self.extend(partial, &wanted.url, progress) {
                // A try that got further is not counted.
                Err(Failure::Transient(_)) if partial.len > before => Ok(()),
                result => result,
            })?;
        }
        Ok(())
    }

    /// Appends what one answer holds.
    fn extend(&self, partial: &mut Partial, url: &str, progress: &FileProgress) -> Result<(), Failure> {
        let (start, mut body) = match self.client.bytes(url, partial.len) {
            Err(Failure::Refused(refusal)) if refusal.status == 416 => {
                partial.restart()?;
                return Err(Failure::Transient("the file has another size now".into()));
            }
            answer => answer?,
        };
        if start != partial.len {
            partial.restart()?;
        }
        progress.at(partial.len);
        let mut piece = vec![0; PIECE];
        while partial.len < partial.size {
            let (len, size) = (partial.len, partial.size);
            match body.read(&mut piece) {
                Ok(0) => return Err(Failure::Transient(format!("it ended after {len} of {size} bytes"))),
                Ok(n) => partial.append(&piece[..n])?,
                Err(e) => return Err(Failure::Transient(format!("{e} after {len} of {size} bytes"))),
            }
            progress.at(partial.len);
        }
        Ok(())
    }

    /// Tries again, at growing intervals, what fails for a reason that may pass.
    fn retry<T>(
        &self,
        file: &str,
        bar: &ProgressBar,
        mut attempt: impl FnMut() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let mut pause = self.settings.backoff;
        for _ in 0..RETRIES {
            match attempt() {
                Err(Failure::Transient(reason)) => {
                    let seconds = pause.as_secs_f32();
                    bar.suspend(|| warn!("{file}: {reason}; trying again in {seconds} s"));
                    std::thread::sleep(pause);
                    pause *= 2;
                }
                result => return result,
            }
        }
        attempt()
    }

    /// Keeps other processes away from a blob while the returned file is open.
    fn lock(&self, file: &str, etag: &str) -> Result<File> {
        let repo = self.folder.file_name().unwrap_or_default();
        let path = self.settings.cache.join(".locks").join(repo).join(format!("{etag}.lock"));
        make_parents(&path)?;
        let open = File::options().create(true).truncate(false).write(true).open(&path);
        let lock = open.with_context(|| format!("cannot create {}", path.display()))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                info!("another process is downloading {file}; waiting for it");
                lock.lock().with_context(|| format!("cannot lock {}", path.display()))?;
            }
            // Some network file systems have no locks.
            Err(TryLockError::Error(e)) => warn!("cannot lock {}: {e}", path.display()),
        }
        Ok(lock)
    }
}

/// The beginning of a file.
struct Partial {
    file: File,
    path: PathBuf,
    len: u64,
    size: u64,
}

impl Partial {
    fn open(path: &Path, size: u64) -> Result<Self, Failure> {
        let open = || -> io::Result<(File, u64)> {
            let file = File::options().create(true).append(true).open(path)?;
            let len = file.metadata()?.len();
            Ok((file, len))
        };
        let (file, len) = open().map_err(|e| cannot_write(path, size, e))?;
        let mut partial = Self { file, path: path.to_path_buf(), len, size };
        if len > size {
            partial.restart()?;
        }
        Ok(partial)
    }

    fn restart(&mut self) -> Result<(), Failure> {
        self.file.set_len(0).map_err(|e| self.failed(e))?;
        self.len = 0;
        Ok(())
    }

    /// Appends a piece; what goes beyond the file's size is not part of it.
    fn append(&mut self, piece: &[u8]) -> Result<(), Failure> {
        let room = usize::try_from(self.size - self.len).unwrap_or(usize::MAX);
        let piece = &piece[..piece.len().min(room)];
        self.file.write_all(piece).map_err(|e| self.failed(e))?;
        self.len += piece.len() as u64;
        Ok(())
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

/// A file that arrived whole and is not the one that the hub announced.
fn wrong_bytes(file: &str, fault: &str, settings: &Settings) -> Failure {
    Failure::Fatal(anyhow!(
        "{file} from {}: {fault}; what comes is not what the hub announces: is there a proxy \
         (HTTPS_PROXY) or a mirror (HF_ENDPOINT) that changes it, or does this disk lose data? Then run again",
        settings.endpoint
    ))
}

fn make_parents(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).with_context(|| {
        format!("cannot create {}; is the cache (HF_HUB_CACHE, HF_HOME) writable?", parent.display())
    })
}

/// Makes `pointer`, a file of a snapshot, show the blob: by a relative link, or by moving the blob
/// where there are no links.
fn link(blob: &Path, pointer: &Path, file: &str) -> io::Result<()> {
    if pointer.exists() {
        return Ok(());
    }
    // What is left is a link to a blob that somebody deleted.
    match fs::remove_file(pointer) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    #[cfg(unix)]
    {
        let up = "../".repeat(2 + file.matches('/').count());
        let target = Path::new(&up).join("blobs").join(blob.file_name().unwrap_or_default());
        if std::os::unix::fs::symlink(target, pointer).is_ok() {
            return Ok(());
        }
    }
    #[cfg(not(unix))]
    let _ = file;
    fs::rename(blob, pointer)
}
