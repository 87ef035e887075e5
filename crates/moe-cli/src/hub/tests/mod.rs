//! The hub module against a server on this machine.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

mod check;
mod errors;
mod gguf;
mod repair;
mod resume;
mod server;
mod snapshots;
mod variants;

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Trust;
use super::env::Settings;
use super::name::ModelName;
use server::Server;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

/// A server of a fixture and an empty cache.
struct Case {
    server: Server,
    cache: tempfile::TempDir,
    settings: Settings,
}

impl Case {
    fn new(name: &str) -> Self {
        let server = Server::of_folder(&fixture(name));
        let cache = tempfile::tempdir().unwrap();
        let settings = Settings {
            endpoint: server.url(),
            cache: cache.path().to_path_buf(),
            token: None,
            offline: false,
            timeout: Duration::from_secs(5),
            backoff: Duration::from_millis(1),
        };
        Self { server, cache, settings }
    }

    fn get(&self, name: &str) -> anyhow::Result<PathBuf> {
        self.get_with(name, Trust::Present)
    }

    fn get_with(&self, name: &str, trust: Trust) -> anyhow::Result<PathBuf> {
        super::locate_on_hub(ModelName::parse(name).unwrap(), self.settings.clone(), trust)?.weights()
    }

    /// Returns the error for this model, as the user reads it.
    fn error(&self, name: &str) -> String {
        crate::error::describe(&self.get(name).unwrap_err())
    }

    fn folder(&self) -> PathBuf {
        self.cache.path().join("models--org--tiny")
    }

    fn partial(&self, file: &str) -> PathBuf {
        self.folder().join("blobs").join(format!("{}.incomplete", self.server.etag(file)))
    }
}

/// The names in a folder.
fn names(dir: impl AsRef<Path>) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
