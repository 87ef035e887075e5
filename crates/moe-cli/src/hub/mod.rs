//! `--model ORG/NAME[@REVISION]`: a checkpoint from the Hugging Face hub.
//!
//! Names and layout of the cache are as in the hf-hub crate, shared with every other client.
//! The transfer is not hf-hub's: its blocking client waits forever for a silent server, appends a
//! whole file to a partial one where a server ignores ranges, and drops the headers that tell a gated
//! model from a misspelt one. It is small: a repository is asked for its commit and its files, then
//! each file of the checkpoint for its hash and its bytes, so that a branch that moves meanwhile
//! cannot mix two commits.

mod check;
mod client;
mod download;
mod env;
mod failure;
mod files;
mod format;
mod name;
mod progress;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use moe_engine::usage;
use tracing::warn;

pub use check::Report;

use client::{Client, RepoInfo};
use download::Download;
use env::Settings;
use failure::Failure;
use name::ModelName;

/// A checkpoint whose small files are here: enough to tell whether it can be run.
pub struct Located {
    dir: PathBuf,
    /// What is left to download; `None`: nothing.
    rest: Option<Box<Rest>>,
}

/// The rest of a commit that is being downloaded.
struct Rest {
    name: ModelName,
    settings: Settings,
    commit: String,
    listed: HashSet<String>,
    repo: CacheRepo,
    folder: PathBuf,
}

/// Finds a model: a folder, or the hub's model of that name, `ORG/NAME[@REVISION]`, whose configs,
/// tokenizer and chat template are downloaded as far as they are not in the cache. No weight is.
///
/// The usual variables apply: `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN` (or the token file),
/// `HF_ENDPOINT`, `HF_HUB_OFFLINE`, `HF_HUB_DOWNLOAD_TIMEOUT`. Without a network a model that is
/// whole in the cache is used as it is.
///
/// # Errors
/// A malformed name; no such repository, revision or file; another format; no access (no token, a
/// wrong one, a gated model); no network and no cached copy; no space. Each says what to do.
pub fn locate(model: &str) -> Result<Located> {
    let path = Path::new(model);
    if path.is_dir() {
        format::check_folder(path)?;
        return Ok(Located { dir: path.to_path_buf(), rest: None });
    }
    if path.is_file() {
        return Err(format::file_is_no_checkpoint(path));
    }
    let name = ModelName::parse(model).map_err(|reason| usage(format!("--model {model}: {reason}")))?;
    locate_on_hub(name, Settings::from_env()?)
}

/// The folder of a model with all its files; see [`locate`].
pub fn resolve(model: &str) -> Result<PathBuf> {
    locate(model)?.weights()
}

/// Checks the copy of a model of the hub in the cache: whether a file lacks or is damaged.
///
/// # Errors
/// A malformed name, or a folder; no finished download of that name.
pub fn check(model: &str) -> Result<Report> {
    let name = ModelName::parse(model).map_err(|reason| usage(format!("{model}: {reason}")))?;
    check::check(&name, &Settings::from_env()?)
}

impl Located {
    /// The folder with the small files.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The folder with all files: downloads the weights that are not in the cache.
    ///
    /// # Errors
    /// As [`locate`].
    pub fn weights(self) -> Result<PathBuf> {
        if let Some(rest) = &self.rest {
            rest.download()?;
        }
        Ok(self.dir)
    }
}

impl Rest {
    fn download(&self) -> Result<()> {
        let Self { name, settings, commit, listed, repo, folder } = self;
        let client = Client::new(settings);
        let download = Download { client: &client, settings, name, commit, folder };
        let has = |file: &str| listed.contains(file);
        let weights = files::weights(&name.to_string(), &has, &mut |file| download.file(file))?;
        download.files(&weights.iter().map(String::as_str).collect::<Vec<_>>())?;
        // Last, so that a revision in the cache is never one with half of its files.
        if !name.is_pinned() {
            let created = repo.create_ref(commit);
            created.with_context(|| format!("cannot note the commit of {name} in {}", folder.display()))?;
        }
        Ok(())
    }
}

/// The cache of a repository, and its folder there.
fn cache_of(name: &ModelName, settings: &Settings) -> (CacheRepo, PathBuf) {
    let repo = Repo::with_revision(name.id.clone(), RepoType::Model, name.revision.clone());
    let folder = settings.cache.join(repo.folder_name());
    (Cache::new(settings.cache.clone()).repo(repo), folder)
}

fn locate_on_hub(name: ModelName, settings: Settings) -> Result<Located> {
    let (repo, folder) = cache_of(&name, &settings);
    let whole = |dir| Located { dir, rest: None };
    if settings.offline {
        return cached(&name, &repo).map(whole).with_context(|| {
            format!("HF_HUB_OFFLINE is set and {name} is not in {}; unset it once", settings.cache.display())
        });
    }
    if name.is_pinned()
        && let Ok(dir) = cached(&name, &repo)
    {
        return Ok(whole(dir));
    }
    let client = Client::new(&settings);
    let RepoInfo { sha: commit, siblings } = match client.repo(&name) {
        Ok(info) => info,
        Err(Failure::Transient(reason)) => {
            return match cached(&name, &repo) {
                Ok(dir) => {
                    warn!("cannot ask the hub for {name} ({reason}); using the copy in the cache");
                    Ok(whole(dir))
                }
                Err(_) => Err(Failure::Transient(reason).explain(&name, None, &settings)),
            };
        }
        Err(failure) => return Err(failure.explain(&name, None, &settings)),
    };
    let listed: HashSet<String> = siblings.into_iter().map(|s| s.rfilename).collect();
    format::check_names(&name.to_string(), listed.iter().map(String::as_str))?;
    let small = files::small(&name.to_string(), &|file| listed.contains(file))?;
    let download =
        Download { client: &client, settings: &settings, name: &name, commit: &commit, folder: &folder };
    download.files(&small)?;
    let dir = repo.pointer_path(&commit);
    let rest = Rest { name, settings, commit, listed, repo, folder };
    Ok(Located { dir, rest: Some(Box::new(rest)) })
}

/// The folder of a snapshot that is whole in the cache.
fn cached(name: &ModelName, repo: &CacheRepo) -> Result<PathBuf> {
    let pinned = name.is_pinned().then(|| repo.pointer_path(&name.revision));
    let by_ref = || Some(repo.get("config.json")?.parent()?.to_path_buf());
    let dir = pinned.or_else(by_ref).ok_or_else(|| anyhow!("{name} was never downloaded"))?;
    let what = format!("the copy of {name} in the cache");
    files::visit(&what, &|file| dir.join(file).exists(), &mut |file| Ok(dir.join(file)))?;
    Ok(dir)
}
