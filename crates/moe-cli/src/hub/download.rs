//! Downloads a file into the cache. It continues an earlier attempt, and the file appears there only when it is
//! complete.
//!
//! All clients of the hub use the same layout, so they share downloaded files. `blobs/HASH` is a file, and
//! `blobs/HASH.incomplete` is its beginning. `snapshots/COMMIT/NAME` is a link to it. `.locks/REPO/HASH.lock` prevents
//! two processes from writing it at the same time.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use indicatif::ProgressBar;
use tracing::{info, warn};

use super::client::{Client, FileInfo};
use super::env::Settings;
use super::failure::Failure;
use super::hash::Hasher;
use super::name::ModelName;
use super::partial::Partial;
use super::progress::{FileProgress, Progress};

/// How far a download trusts the files in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// A file that exists is used.
    Present,
    /// A file that exists is compared with the size and the hash from the hub, and replaced if it differs.
    Verified,
    /// Every file is downloaded again.
    Nothing,
}
use super::retry::{RETRIES, retry};

/// The number of bytes that are read at a time.
const PIECE: usize = 256 << 10;
/// From this number of bytes on, computing the hash takes so long that a message says it.
const LARGE: u64 = 1 << 30;

/// Downloads of one commit.
pub struct Download<'a> {
    /// The client for requests to the hub.
    pub client: &'a Client<'a>,
    /// The folder of the cache, and the pauses between attempts.
    pub settings: &'a Settings,
    /// The repository.
    pub name: &'a ModelName,
    /// The commit.
    pub commit: &'a str,
    /// The folder of the repository in the cache.
    pub folder: &'a Path,
    /// How far existing files are trusted.
    pub trust: Trust,
}

/// A file that is to be downloaded.
struct Wanted<'f> {
    file: &'f str,
    url: String,
    info: FileInfo,
}

impl Download<'_> {
    /// Returns the path of a file in the snapshot, after downloading it if it is missing.
    pub fn file(&self, file: &str) -> Result<PathBuf> {
        self.files(&[file])?;
        Ok(self.pointer(file))
    }

    /// Downloads the files that are missing in the snapshot, or that are not as they should be.
    pub fn files(&self, files: &[impl AsRef<str>]) -> Result<()> {
        let files = files.iter().map(AsRef::as_ref);
        let asked = files.filter(|file| self.trust != Trust::Present || !self.pointer(file).exists());
        let mut wanted = asked.map(|file| self.ask(file)).collect::<Result<Vec<_>>>()?;
        if self.trust == Trust::Verified {
            let damaged = wanted.into_iter().map(|wanted| Ok((!self.is_whole(&wanted)?).then_some(wanted)));
            wanted = damaged.filter_map(Result::transpose).collect::<Result<_>>()?;
        }
        let bytes = wanted.iter().fold(0u64, |bytes, wanted| bytes.saturating_add(wanted.info.size));
        let progress = Progress::new(wanted.len(), bytes);
        wanted.iter().try_for_each(|wanted| self.fetch(wanted, &progress))?;
        progress.finish();
        Ok(())
    }

    fn pointer(&self, file: &str) -> PathBuf {
        self.folder.join("snapshots").join(self.commit).join(file)
    }

    fn blob(&self, info: &FileInfo) -> PathBuf {
        self.folder.join("blobs").join(&info.etag)
    }

    /// Asks the hub for the description of a file.
    fn ask<'f>(&self, file: &'f str) -> Result<Wanted<'f>> {
        let url = self.client.url(self.name, self.commit, file);
        let bar = ProgressBar::hidden();
        let info = retry(file, RETRIES, self.settings.backoff, &bar, || self.client.file(&url));
        let info = info.map_err(|failure| failure.explain(self.name, Some(file), self.settings))?;
        Ok(Wanted { file, url, info })
    }

    /// Whether the snapshot has the file with the bytes that the hub announces. A file with other bytes is deleted.
    fn is_whole(&self, Wanted { file, info, .. }: &Wanted) -> Result<bool> {
        let pointer = self.pointer(file);
        let (held, is_linked) = match fs::canonicalize(&pointer) {
            Ok(held) => (held, true),
            Err(_) => (self.blob(info), false),
        };
        let Ok(metadata) = fs::metadata(&held) else { return Ok(false) };
        if metadata.len() >= LARGE {
            info!("{file} is here; comparing it with its hash");
        }
        let fault = match metadata.len() == info.size {
            true => Hasher::fault_of(&held, &info.etag),
            false => Some(format!("expected {} bytes, got {}", info.size, metadata.len())),
        };
        let Some(fault) = fault else { return Ok(is_linked) };
        warn!("{file}: the copy in the cache is damaged ({fault}); downloading it again");
        fs::remove_file(&held).with_context(|| format!("cannot delete {}", held.display()))?;
        Ok(false)
    }

    fn fetch(&self, wanted: &Wanted, progress: &Progress) -> Result<()> {
        let Wanted { file, info, .. } = wanted;
        let blob = self.blob(info);
        let pointer = self.pointer(file);
        make_parents(&blob)?;
        let _lock = self.lock(file, &info.etag)?;
        let is_here = fs::metadata(&blob).is_ok_and(|metadata| metadata.len() == info.size);
        if !is_here || self.trust == Trust::Nothing {
            let path = blob.with_added_extension("incomplete");
            let filled = self.fill(&path, wanted, progress);
            filled.map_err(|failure| failure.explain(self.name, Some(file), self.settings))?;
            fs::rename(&path, &blob).with_context(|| format!("cannot rename {}", path.display()))?;
            if pointer.is_file() && !pointer.is_symlink() {
                fs::remove_file(&pointer).with_context(|| format!("cannot replace {}", pointer.display()))?;
            }
        }
        make_parents(&pointer)?;
        link(&blob, &pointer, file).with_context(|| format!("cannot create {}", pointer.display()))
    }

    /// Completes a file and checks that it has the hash from the hub. A proxy or a mirror may change bytes. After a
    /// power failure, the part from an earlier run may end in zeros. If the bytes are wrong, the whole file is
    /// downloaded once more.
    fn fill(&self, path: &Path, wanted: &Wanted, progress: &Progress) -> Result<(), Failure> {
        let Wanted { file, info, .. } = wanted;
        let mut partial = Partial::open(path, &info.etag, info.size)?;
        if self.trust == Trust::Nothing {
            partial.restart()?;
        }
        let progress = progress.file(file, info.size, partial.len());
        self.complete(&mut partial, wanted, &progress)?;
        if let Some(fault) = partial.fault() {
            progress.bar().suspend(|| warn!("{file}: {fault}; downloading it again"));
            partial.restart()?;
            self.complete(&mut partial, wanted, &progress)?;
            if let Some(fault) = partial.fault() {
                partial.delete()?;
                return Err(wrong_bytes(file, &fault, self.settings));
            }
        }
        progress.finish(info.size);
        partial.sync()
    }

    /// Downloads the rest of a file.
    fn complete(
        &self,
        partial: &mut Partial,
        wanted: &Wanted,
        progress: &FileProgress,
    ) -> Result<(), Failure> {
        while !partial.is_full() {
            let before = partial.len();
            let attempt = || match self.extend(partial, &wanted.url, progress) {
                // An attempt that got some bytes is not counted.
                Err(Failure::Transient(_)) if partial.len() > before => Ok(()),
                result => result,
            };
            retry(wanted.file, RETRIES, self.settings.backoff, progress.bar(), attempt)?;
        }
        Ok(())
    }

    /// Sends one request and appends the bytes of the answer.
    fn extend(&self, partial: &mut Partial, url: &str, progress: &FileProgress) -> Result<(), Failure> {
        let (start, mut body) = match self.client.bytes(url, partial.len()) {
            Err(Failure::Refused(refusal)) if refusal.status == 416 => {
                partial.restart()?;
                return Err(Failure::Transient("the file has another size now".into()));
            }
            answer => answer?,
        };
        if start != partial.len() {
            partial.restart()?;
        }
        progress.at(partial.len());
        let mut piece = vec![0; PIECE];
        while !partial.is_full() {
            let len = partial.len();
            let size = partial.size();
            match body.read(&mut piece) {
                Ok(0) => return Err(Failure::Transient(format!("it ended after {len} of {size} bytes"))),
                Ok(n) => partial.append(&piece[..n])?,
                Err(e) => return Err(Failure::Transient(format!("{e} after {len} of {size} bytes"))),
            }
            progress.at(partial.len());
        }
        Ok(())
    }

    /// Locks a blob against other processes for as long as the returned file is open.
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

/// The error for a file that is complete but has another hash than the hub announced.
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

/// Makes `pointer`, a file of a snapshot, refer to the blob. It is a relative link, or, if the system has no links, the
/// blob itself, which is moved there.
fn link(blob: &Path, pointer: &Path, file: &str) -> io::Result<()> {
    if pointer.exists() {
        return Ok(());
    }
    // A link to a deleted blob may still exist.
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
