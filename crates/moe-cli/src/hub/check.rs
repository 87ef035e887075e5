//! Checks that the copy of a model in the cache is complete: no file is missing, and every file has the hash that is
//! its name.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use model_runtime::checkpoint::{Gguf, TensorFiles};

use super::cache::cache_of;
use super::env::Settings;
use super::hash::Hasher;
use super::name::ModelName;
use super::{files, gguf};

/// The result of a check.
#[derive(Debug)]
pub struct Report {
    /// The folder with the files.
    pub dir: PathBuf,
    /// Number of files that were checked.
    pub files: usize,
    /// The faults, one line for each file.
    pub faults: Vec<String>,
}

/// Checks the copy of a model in the cache. It sends no request to the hub.
///
/// # Errors
/// No download of this name is finished. Missing or damaged files are not errors; they are in the report.
pub(super) fn check(name: &ModelName, settings: &Settings) -> Result<Report> {
    let (repo, folder) = cache_of(name, settings);
    let commit = if name.is_pinned() {
        name.revision.clone()
    } else {
        let noted = fs::read_to_string(folder.join("refs").join(&name.revision));
        noted.with_context(|| {
            format!("no download of {name} in {} is finished; run `download {name}`", folder.display())
        })?
    };
    Ok(faults(&repo.pointer_path(commit.trim())))
}

/// Checks the files of a snapshot.
pub(super) fn faults(dir: &Path) -> Report {
    let mut faults = Vec::new();
    let names = expected(dir).unwrap_or_else(|e| {
        faults.push(format!("{e:#}"));
        Vec::new()
    });
    faults.extend(names.iter().filter_map(|file| Some(format!("{file}: {}", fault(&dir.join(file))?))));
    Report { dir: dir.to_path_buf(), files: names.len(), faults }
}

/// Returns the files that a snapshot should have. A link to a blob that was deleted counts as a file.
fn expected(dir: &Path) -> Result<Vec<String>> {
    let what = dir.display().to_string();
    let mut there = files::in_folder(dir, |path| path.is_symlink() || path.exists());
    if gguf::are_the_weights(&there) {
        return Ok(there.into_iter().filter(|name| name.ends_with(".gguf")).collect());
    }
    let mut names = files::small(&what, &there)?;
    let index = dir.join(files::INDEX);
    if there.contains(files::INDEX) && index.exists() {
        // A missing shard is reported by itself, and not as a fault of the index.
        there.extend(files::shards(&index)?);
    }
    let mut with_index = Vec::new();
    let weights = files::weights(&what, &there, &mut |file| {
        with_index.push(file.to_string());
        Ok(dir.join(file))
    })?;
    names.extend(with_index.into_iter().chain(weights));
    Ok(names)
}

/// Returns the fault of a file of a snapshot, if it has one.
fn fault(path: &Path) -> Option<String> {
    let blob = fs::canonicalize(path).ok().filter(|blob| blob.is_file());
    let Some(blob) = blob else { return Some("missing; run `download` again".into()) };
    let name = blob.file_name().unwrap_or_default().to_string_lossy();
    let is_named_by_hash = Hasher::new(&name, 0).knows();
    let found = if is_named_by_hash { Hasher::fault_of(&blob, &name) } else { form_fault(path) };
    found.map(|reason| format!("damaged: {reason}; run `download` again, which repairs {}", blob.display()))
}

/// Checks a file without a hash: whether it can be read in the format of its name.
fn form_fault(path: &Path) -> Option<String> {
    if path.extension().is_some_and(|extension| extension == "safetensors") {
        return TensorFiles::open_file(path).err().map(|e| e.to_string());
    }
    if path.extension().is_some_and(|extension| extension == "gguf") {
        return Gguf::open(path).err().map(|e| e.to_string());
    }
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) => return Some(format!("cannot be read: {e}")),
    };
    match path.extension().is_some_and(|extension| extension == "json") {
        true => {
            serde_json::from_slice::<serde::de::IgnoredAny>(&bytes).err().map(|e| format!("not JSON: {e}"))
        }
        false => std::str::from_utf8(&bytes).err().map(|e| format!("not UTF-8: {e}")),
    }
}
