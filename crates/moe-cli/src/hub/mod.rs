//! `--model ORG/NAME[@REVISION]`: a checkpoint from the Hugging Face hub.
//!
//! Names and layout of the cache are the same as in the hf-hub crate and all other clients, so that they share it. The
//! transfer does not use hf-hub for three reasons: its blocking client waits forever for a server that sends nothing;
//! it appends a whole file to a partial one if a server ignores ranges; and it drops the headers that distinguish a
//! gated model from a misspelt name. The transfer is small. It asks for the commit and the files of a repository, and
//! then for the hash and the bytes of each file at this commit. So two commits are never mixed if a branch moves in the
//! meantime. Every file is compared with its hash before it is used.

mod address;
mod cache;
mod check;
mod client;
mod download;
mod env;
mod failure;
mod files;
mod format;
mod gguf;
mod hash;
mod header_only;
mod headers;
mod name;
mod partial;
mod progress;
mod retry;
mod temporary;
#[cfg(test)]
mod tests;
mod variants;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use hf_hub::CacheRepo;
use indicatif::ProgressBar;
use model_runtime::checkpoint::Gguf;
use tracing::warn;

use crate::error::usage;

pub use check::Report;
pub use download::Trust;
pub use headers::Headers;
pub use variants::Variant;

use cache::cache_of;
use client::{Client, RepoInfo};
use download::Download;
use env::Settings;
use failure::Failure;
use files::Names;
use name::ModelName;
use retry::{RETRIES, retry};

/// A checkpoint whose small files are on this machine. They show whether it can be run.
pub struct Located {
    dir: PathBuf,
    /// What remains to be downloaded; `None` if nothing does.
    rest: Option<Box<Rest>>,
    /// The headers of GGUF files that are not downloaded yet. `dir` then names these headers.
    header_only: Option<gguf::HeaderOnly>,
}

/// The part of a commit that is not downloaded yet.
struct Rest {
    name: ModelName,
    settings: Settings,
    commit: String,
    listed: Names,
    trust: Trust,
    repo: CacheRepo,
    folder: PathBuf,
    /// The GGUF files with the weights and everything else; empty for checkpoints in other formats.
    gguf: Vec<String>,
}

/// Finds a model: a folder, a GGUF file, or a model on the hub by its name `ORG/NAME[:TAG][@REVISION]` or its address.
/// For a model on the hub it downloads configs, tokenizer and chat templates that are not in the cache, but no weights.
/// The usual variables apply: `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN` (or the token file), `HF_ENDPOINT`,
/// `HF_HUB_OFFLINE`, `HF_HUB_DOWNLOAD_TIMEOUT`. Without a network, a model that is complete in the cache is used as it
/// is.
///
/// # Errors
/// A malformed name; a repository, revision or file that does not exist; another format; no access (no token, a wrong
/// token, a gated model); no network and no copy in the cache; no space. Each error says what to do.
pub fn locate(model: &str) -> Result<Located> {
    let path = Path::new(model);
    if let Some(file) = Gguf::find(path).map_err(|e| usage(e.to_string()))? {
        return Ok(Located { dir: file, rest: None, header_only: None });
    }
    if path.is_dir() {
        return Ok(Located { dir: path.to_path_buf(), rest: None, header_only: None });
    }
    if path.is_file() {
        return Err(format::file_is_no_checkpoint(path));
    }
    locate_on_hub(named(model, "--model ")?, Settings::from_env()?, Trust::Present)
}

/// Does the same as [`locate`] for a model of the hub. `trust` says how far files in the cache are trusted.
pub fn locate_again(model: &str, trust: Trust) -> Result<Located> {
    locate_on_hub(named(model, "")?, Settings::from_env()?, trust)
}

/// Returns the folder of a model with all its files; see [`locate`].
pub fn resolve(model: &str) -> Result<PathBuf> {
    locate(model)?.weights()
}

/// Downloads a model from the server at `endpoint` into `cache` and returns its folder. The environment variables of
/// the hub do not apply. A failed request is repeated without a pause, and a server that sends nothing for a second
/// counts as failed. This is for tests and fuzzing with a server on the same machine.
///
/// # Errors
/// The errors of [`locate`].
pub fn resolve_from(model: &str, endpoint: &str, cache: &Path) -> Result<PathBuf> {
    let settings = Settings {
        endpoint: endpoint.to_string(),
        cache: cache.to_path_buf(),
        token: None,
        offline: false,
        timeout: Duration::from_secs(1),
        backoff: Duration::ZERO,
    };
    let name = ModelName::parse(model).map_err(usage)?;
    locate_on_hub(name, settings, Trust::Present)?.weights()
}

/// Checks the files of a snapshot in the cache, as [`check`] does.
pub fn check_snapshot(dir: &Path) -> Report {
    check::faults(dir)
}

/// Checks the copy of a model in the cache: whether files are missing or damaged.
///
/// # Errors
/// A malformed name, or a folder instead of a name; no finished download of this name.
pub fn check(model: &str) -> Result<Report> {
    check::check(&named(model, "")?, &Settings::from_env()?)
}

/// Returns the name of a model on the hub if `model` is an address there, and `model` itself otherwise.
pub fn name_of(model: &str) -> String {
    let settings = Settings::from_env().ok();
    let name = settings.and_then(|settings| address::name_in(model, &settings.endpoint).ok().flatten());
    name.unwrap_or_else(|| model.to_string())
}

/// Returns the name on the hub that a text means. Error messages put `flag` before the text.
fn named(model: &str, flag: &str) -> Result<ModelName> {
    let wrong = |reason: String| usage(format!("{flag}{model}: {reason}"));
    let name = address::name_in(model, &Settings::from_env()?.endpoint).map_err(wrong)?;
    ModelName::parse(name.as_deref().unwrap_or(model)).map_err(wrong)
}

impl Located {
    /// Whether this has only the header of a GGUF file whose weights are on the hub.
    pub fn is_header_alone(&self) -> bool {
        self.header_only.is_some()
    }

    /// The folder with the small files, or the GGUF file.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the folder with all files, after downloading the weights that are not in the cache.
    ///
    /// # Errors
    /// The errors of [`locate`].
    pub fn weights(self) -> Result<PathBuf> {
        let Some(rest) = &self.rest else { return Ok(self.dir) };
        rest.download()?;
        match rest.gguf.first() {
            Some(first) => Ok(rest.repo.pointer_path(&rest.commit).join(first)),
            None => Ok(self.dir),
        }
    }
}

impl Rest {
    /// Makes the downloads of this commit with a client.
    fn download_by<'a>(&'a self, client: &'a Client<'a>) -> Download<'a> {
        let Self { name, settings, commit, trust, folder, .. } = self;
        Download { client, settings, name, commit, folder, trust: *trust }
    }

    /// Returns the files with the weights. If there is an index, it is downloaded.
    fn weights(&self) -> Result<Vec<String>> {
        if !self.gguf.is_empty() {
            return Ok(self.gguf.clone());
        }
        let client = Client::new(&self.settings);
        let download = self.download_by(&client);
        files::weights(&self.name.to_string(), &self.listed, &mut |file| download.file(file))
    }

    /// Locates a model in GGUF files: the files themselves if they are in the cache, or else their headers.
    fn located(self) -> Result<Located> {
        let here = self.repo.pointer_path(&self.commit);
        let is_here = self.trust == Trust::Present && self.gguf.iter().all(|file| here.join(file).exists());
        let first = self.gguf.first().map(|file| here.join(file));
        if let Some(first) = first.filter(|_| is_here) {
            return Ok(Located { dir: first, rest: None, header_only: None });
        }
        let header_only = self.header_only(&self.gguf)?;
        let dir = header_only.first(&self.gguf);
        Ok(Located { dir, rest: Some(Box::new(self)), header_only: Some(header_only) })
    }

    fn download(&self) -> Result<()> {
        let Self { name, settings, commit, repo, folder, .. } = self;
        let weights = self.weights()?;
        self.download_by(&Client::new(settings)).files(&weights)?;
        // The reference is written last, so that a revision in the cache always has all of its files.
        if !name.is_pinned() {
            let created = repo.create_ref(commit);
            created.with_context(|| format!("cannot note the commit of {name} in {}", folder.display()))?;
        }
        Ok(())
    }
}

fn locate_on_hub(name: ModelName, settings: Settings, trust: Trust) -> Result<Located> {
    let (repo, folder) = cache_of(&name, &settings);
    let here = cached(&name, &repo, &folder);
    if settings.offline {
        let here = here.with_context(|| {
            format!("HF_HUB_OFFLINE is set and {name} is not in {}; unset it once", settings.cache.display())
        })?;
        return here.without_hub(trust, "HF_HUB_OFFLINE is set");
    }
    if let Ok(copy) = &here
        && name.is_pinned()
        && copy.is_known_whole
        && trust == Trust::Present
    {
        return Ok(Located { dir: copy.dir.clone(), rest: None, header_only: None });
    }
    let client = Client::new(&settings);
    // If there is a copy in the cache, a long wait for the hub is not worthwhile.
    let retries = if here.is_ok() { 1 } else { RETRIES };
    let asked =
        retry(&name.to_string(), retries, settings.backoff, &ProgressBar::hidden(), || client.repo(&name));
    let RepoInfo { sha: commit, siblings } = match (asked, here) {
        (Ok(info), _) => info,
        (Err(Failure::Transient(reason)), Ok(copy)) => {
            warn!("cannot ask the hub for {name} ({reason}); using the copy in the cache");
            return copy.without_hub(trust, "the hub cannot be asked");
        }
        (Err(failure), _) => return Err(failure.explain(&name, None, &settings)),
    };
    let listed: Names = siblings.into_iter().map(|s| s.rfilename).collect();
    if name.tag.is_some() || gguf::are_the_weights(&listed) {
        let gguf = gguf::files(&name.to_string(), &listed, name.tag.as_deref())?;
        let rest = Rest { name, settings, commit, listed, trust, repo, folder, gguf };
        return rest.located();
    }
    let small = files::small(&name.to_string(), &listed)?;
    let download = Download {
        client: &client,
        settings: &settings,
        name: &name,
        commit: &commit,
        folder: &folder,
        trust,
    };
    download.files(&small)?;
    let dir = repo.pointer_path(&commit);
    let rest = Rest { name, settings, commit, listed, trust, repo, folder, gguf: Vec::new() };
    Ok(Located { dir, rest: Some(Box::new(rest)), header_only: None })
}

/// A snapshot in the cache. According to the names of its files, none is missing.
struct Cached {
    dir: PathBuf,
    /// Whether the names alone show that it is complete.
    is_known_whole: bool,
}

impl Cached {
    /// Uses this copy if the hub cannot be asked, for the reason `why`.
    fn without_hub(self, trust: Trust, why: &str) -> Result<Located> {
        if trust == Trust::Nothing {
            bail!(
                "{why}, so that nothing can be downloaded again; leave --force out to use the copy in the cache"
            );
        }
        let dir = if self.dir.is_file() { self.dir.parent().unwrap_or(&self.dir) } else { &self.dir };
        let faults = if trust == Trust::Verified { check::faults(dir).faults } else { Vec::new() };
        if !faults.is_empty() {
            bail!("the copy in the cache is not whole, and {why}:\n{}", faults.join("\n"));
        }
        Ok(Located { dir: self.dir, rest: None, header_only: None })
    }
}

/// Returns the snapshot of a model that is complete in the cache.
fn cached(name: &ModelName, repo: &CacheRepo, folder: &Path) -> Result<Cached> {
    let pinned = name.is_pinned().then(|| name.revision.clone());
    let noted = || std::fs::read_to_string(folder.join("refs").join(&name.revision)).ok();
    let commit = pinned.or_else(noted).ok_or_else(|| anyhow!("{name} was never downloaded"))?;
    let dir = repo.pointer_path(commit.trim());
    let what = format!("the copy of {name} in the cache");
    let names = files::in_folder(&dir, Path::exists);
    if name.tag.is_some() || gguf::are_the_weights(&names) {
        let files = gguf::files(&what, &names, name.tag.as_deref())?;
        let first = files.first().map(|file| dir.join(file)).unwrap_or(dir);
        // Opening the file shows whether parts are missing.
        model_runtime::checkpoint::Gguf::open(&first)?;
        return Ok(Cached { dir: first, is_known_whole: true });
    }
    files::visit(&what, &names, &mut |file| Ok(dir.join(file)))?;
    Ok(Cached { dir, is_known_whole: files::says_what_is_whole(&names) })
}
