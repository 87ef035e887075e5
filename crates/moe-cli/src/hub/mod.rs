//! `--model ORG/NAME[@REVISION]`: a checkpoint from the Hugging Face hub.
//!
//! Names and layout of the cache are as in the hf-hub crate, shared with every other client.
//! The transfer is not hf-hub's: its blocking client waits forever for a silent server, appends a
//! whole file to a partial one where a server ignores ranges, and drops the headers that tell a gated
//! model from a misspelt one. It is small: a repository is asked for its commit and its files, then
//! each file of the checkpoint for its hash and its bytes, so that a branch that moves meanwhile
//! cannot mix two commits. What comes is compared with the hash before it is used.

mod address;
mod cache;
mod check;
mod client;
mod download;
mod env;
mod failure;
mod files;
mod format;
mod hash;
mod headers;
mod name;
mod partial;
mod progress;
mod retry;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use hf_hub::CacheRepo;
use indicatif::ProgressBar;
use moe_engine::usage;
use tracing::warn;

pub use check::Report;
pub use download::Trust;
pub use headers::Headers;

use cache::cache_of;
use client::{Client, RepoInfo};
use download::Download;
use env::Settings;
use failure::Failure;
use files::Names;
use name::ModelName;
use retry::{RETRIES, retry};

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
    listed: Names,
    trust: Trust,
    repo: CacheRepo,
    folder: PathBuf,
}

/// Finds a model: a folder, or the hub's model of that name, `ORG/NAME[@REVISION]` or its address,
/// whose configs, tokenizer and chat templates are downloaded as far as they are not in the cache. No weight is.
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
    locate_on_hub(named(model, "--model ")?, Settings::from_env()?, Trust::Present)
}

/// As [`locate`], for a model of the hub of which the cache is believed no further than `trust` says.
pub fn locate_again(model: &str, trust: Trust) -> Result<Located> {
    locate_on_hub(named(model, "")?, Settings::from_env()?, trust)
}

/// The folder of a model with all its files; see [`locate`].
pub fn resolve(model: &str) -> Result<PathBuf> {
    locate(model)?.weights()
}

/// Downloads a model from the server at `endpoint` into `cache` and returns its folder. The environment variables of the hub do
/// not apply. A request that fails is repeated without a wait, and a server that sends nothing for a second has failed. This
/// is for tests and fuzzing with a server on the same machine.
///
/// # Errors
/// As [`locate`].
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

/// Checks the copy of a model of the hub in the cache: whether a file lacks or is damaged.
///
/// # Errors
/// A malformed name, or a folder; no finished download of that name.
pub fn check(model: &str) -> Result<Report> {
    check::check(&named(model, "")?, &Settings::from_env()?)
}

/// What a model is called: its name on the hub, if `model` is an address there, else `model`.
pub fn name_of(model: &str) -> String {
    let settings = Settings::from_env().ok();
    let name = settings.and_then(|settings| address::name_in(model, &settings.endpoint).ok().flatten());
    name.unwrap_or_else(|| model.to_string())
}

/// The name on the hub that a text says; `flag` is what the text follows in messages.
fn named(model: &str, flag: &str) -> Result<ModelName> {
    let wrong = |reason: String| usage(format!("{flag}{model}: {reason}"));
    let name = address::name_in(model, &Settings::from_env()?.endpoint).map_err(wrong)?;
    ModelName::parse(name.as_deref().unwrap_or(model)).map_err(wrong)
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
    /// Downloads of this commit by a client.
    fn download_by<'a>(&'a self, client: &'a Client<'a>) -> Download<'a> {
        let Self { name, settings, commit, trust, folder, .. } = self;
        Download { client, settings, name, commit, folder, trust: *trust }
    }

    /// The files with the weights; an index is downloaded.
    fn weights(&self) -> Result<Vec<String>> {
        let client = Client::new(&self.settings);
        let download = self.download_by(&client);
        files::weights(&self.name.to_string(), &self.listed, &mut |file| download.file(file))
    }

    fn download(&self) -> Result<()> {
        let Self { name, settings, commit, repo, folder, .. } = self;
        let weights = self.weights()?;
        self.download_by(&Client::new(settings)).files(&weights)?;
        // Last, so that a revision in the cache is never one with half of its files.
        if !name.is_pinned() {
            let created = repo.create_ref(commit);
            created.with_context(|| format!("cannot note the commit of {name} in {}", folder.display()))?;
        }
        Ok(())
    }
}

fn locate_on_hub(name: ModelName, settings: Settings, trust: Trust) -> Result<Located> {
    let (repo, folder) = cache_of(&name, &settings);
    let here = cached(&name, &repo);
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
        return Ok(Located { dir: copy.dir.clone(), rest: None });
    }
    let client = Client::new(&settings);
    // With a copy at hand a long wait for the hub is worth less.
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
    format::check_names(&name.to_string(), listed.iter().map(String::as_str))?;
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
    let rest = Rest { name, settings, commit, listed, trust, repo, folder };
    Ok(Located { dir, rest: Some(Box::new(rest)) })
}

/// A snapshot in the cache that lacks nothing as far as its names tell.
struct Cached {
    dir: PathBuf,
    /// Whether the names tell all.
    is_known_whole: bool,
}

impl Cached {
    /// This copy where the hub cannot say more, for the reason `why`.
    fn without_hub(self, trust: Trust, why: &str) -> Result<Located> {
        if trust == Trust::Nothing {
            bail!(
                "{why}, so that nothing can be downloaded again; leave --force out to use the copy in the cache"
            );
        }
        let faults = if trust == Trust::Verified { check::faults(&self.dir).faults } else { Vec::new() };
        if !faults.is_empty() {
            bail!("the copy in the cache is not whole, and {why}:\n{}", faults.join("\n"));
        }
        Ok(Located { dir: self.dir, rest: None })
    }
}

/// The snapshot of a model that is whole in the cache.
fn cached(name: &ModelName, repo: &CacheRepo) -> Result<Cached> {
    let pinned = name.is_pinned().then(|| repo.pointer_path(&name.revision));
    let by_ref = || Some(repo.get("config.json")?.parent()?.to_path_buf());
    let dir = pinned.or_else(by_ref).ok_or_else(|| anyhow!("{name} was never downloaded"))?;
    let what = format!("the copy of {name} in the cache");
    let names = files::in_folder(&dir, Path::exists);
    files::visit(&what, &names, &mut |file| Ok(dir.join(file)))?;
    Ok(Cached { dir, is_known_whole: files::says_what_is_whole(&names) })
}
