//! The place of a model in the cache.

use std::path::PathBuf;

use hf_hub::{Cache, CacheRepo, Repo, RepoType};

use super::env::Settings;
use super::name::ModelName;

/// Returns the cache of a repository, and its folder in the cache.
pub fn cache_of(name: &ModelName, settings: &Settings) -> (CacheRepo, PathBuf) {
    let repo = Repo::with_revision(name.id.clone(), RepoType::Model, name.revision.clone());
    let folder = settings.cache.join(repo.folder_name());
    (Cache::new(settings.cache.clone()).repo(repo), folder)
}
