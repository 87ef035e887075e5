//! `--model ORG/NAME[@REVISION]`: a checkpoint from the Hugging Face hub.
//!
//! Names and layout of the cache are those of the hf-hub crate, shared with every other client.
//! The transfer is not hf-hub's: its blocking client waits forever for a silent server, appends a
//! whole file to a partial one where a server ignores ranges, and drops the headers that tell a gated
//! model from a misspelt one. It is small: a repository is asked for its commit and its files, then
//! each file of the checkpoint for its hash and its bytes, so that a branch that moves meanwhile
//! cannot mix two commits.

mod client;
mod download;
mod env;
mod failure;
mod files;
mod name;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use moe_engine::usage;
use tracing::warn;

use client::{Client, RepoInfo};
use download::Download;
use env::Settings;
use failure::Failure;
use name::ModelName;

/// The folder of a model: `model` itself if it is a folder, else the snapshot of the hub's model of
/// that name, `ORG/NAME[@REVISION]`, which is downloaded as far as it is not in the cache.
///
/// The usual variables apply: `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN` (or the token file),
/// `HF_ENDPOINT`, `HF_HUB_OFFLINE`, `HF_HUB_DOWNLOAD_TIMEOUT`. Without a network a model that is
/// whole in the cache is used as it is.
///
/// # Errors
/// A malformed name; no such repository, revision or file; no access (no token, a wrong one, a gated
/// model); no network and no cached copy; no space. Each says what to do.
pub fn resolve(model: &str) -> Result<PathBuf> {
    let dir = Path::new(model);
    if dir.is_dir() {
        return Ok(dir.to_path_buf());
    }
    let name = ModelName::parse(model).map_err(|reason| usage(format!("--model {model}: {reason}")))?;
    snapshot(&name, &Settings::from_env()?)
}

/// The folder with the files of a model.
fn snapshot(name: &ModelName, settings: &Settings) -> Result<PathBuf> {
    let repo = Repo::with_revision(name.id.clone(), RepoType::Model, name.revision.clone());
    let folder = settings.cache.join(repo.folder_name());
    let repo = Cache::new(settings.cache.clone()).repo(repo);
    if settings.offline {
        return cached(name, &repo).with_context(|| {
            format!("HF_HUB_OFFLINE is set and {name} is not in {}; unset it once", settings.cache.display())
        });
    }
    if name.is_pinned()
        && let Ok(dir) = cached(name, &repo)
    {
        return Ok(dir);
    }
    let client = Client::new(settings);
    let info = match client.repo(name) {
        Ok(info) => info,
        Err(Failure::Transient(reason)) => {
            return match cached(name, &repo) {
                Ok(dir) => {
                    warn!("cannot ask the hub for {name} ({reason}); using the copy in the cache");
                    Ok(dir)
                }
                Err(_) => Err(Failure::Transient(reason).explain(name, None, settings)),
            };
        }
        Err(failure) => return Err(failure.explain(name, None, settings)),
    };
    let RepoInfo { sha: commit, siblings } = info;
    let listed: HashSet<&str> = siblings.iter().map(|s| s.rfilename.as_str()).collect();
    let download = Download { client: &client, settings, name, commit: &commit, folder: &folder };
    files::visit(&name.to_string(), &|file| listed.contains(file), &mut |file| download.file(file))?;
    // Last, so that a revision in the cache is never one with half of its files.
    if !name.is_pinned() {
        let created = repo.create_ref(&commit);
        created.with_context(|| format!("cannot note the commit of {name} in {}", folder.display()))?;
    }
    Ok(repo.pointer_path(&commit))
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
