//! Where the cache keeps a model.

use std::path::PathBuf;

use hf_hub::{Cache, CacheRepo, Repo, RepoType};

use super::env::Settings;
use super::name::ModelName;

/// The cache of a repository, and its folder there.
pub fn cache_of(name: &ModelName, settings: &Settings) -> (CacheRepo, PathBuf) {
    let repo = Repo::with_revision(name.id.clone(), RepoType::Model, name.revision.clone());
    let folder = settings.cache.join(repo.folder_name());
    (Cache::new(settings.cache.clone()).repo(repo), folder)
}
