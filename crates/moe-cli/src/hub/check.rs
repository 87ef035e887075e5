//! Whether what the cache holds of a model is whole: nothing lacks, and every file has the hash that
//! names it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use super::env::Settings;
use super::files;
use super::name::ModelName;

/// What a check found.
#[derive(Debug)]
pub struct Report {
    /// The folder with the files.
    pub dir: PathBuf,
    /// Files that were looked at.
    pub files: usize,
    /// What is wrong, a line for each file.
    pub faults: Vec<String>,
}

/// Checks the copy of a model in the cache. The hub is not asked.
///
/// # Errors
/// No finished download of that name. Files that lack or are damaged are no error but in the report.
pub(super) fn check(name: &ModelName, settings: &Settings) -> Result<Report> {
    let (repo, folder) = super::cache_of(name, settings);
    let commit = if name.is_pinned() {
        name.revision.clone()
    } else {
        let noted = fs::read_to_string(folder.join("refs").join(&name.revision));
        noted.with_context(|| {
            format!("no download of {name} in {} is finished; run `download {name}`", folder.display())
        })?
    };
    let dir = repo.pointer_path(commit.trim());
    let mut faults = Vec::new();
    let names = expected(&dir).unwrap_or_else(|e| {
        faults.push(format!("{e:#}"));
        Vec::new()
    });
    faults.extend(names.iter().filter_map(|file| Some(format!("{file}: {}", fault(&dir.join(file))?))));
    Ok(Report { dir, files: names.len(), faults })
}

/// The files of a snapshot. A link to a blob that somebody deleted counts: it says what was there.
fn expected(dir: &Path) -> Result<Vec<String>> {
    let what = dir.display().to_string();
    let has = |file: &str| dir.join(file).is_symlink() || dir.join(file).exists();
    let mut names: Vec<String> = files::small(&what, &has)?.into_iter().map(str::to_string).collect();
    // A shard that lacks is a fault of its own, not of the index.
    let has = |file: &str| has(file) || file.contains("-of-");
    let mut index = Vec::new();
    let weights = files::weights(&what, &has, &mut |file| {
        index.push(file.to_string());
        Ok(dir.join(file))
    })?;
    names.extend(index.into_iter().chain(weights));
    Ok(names)
}

/// What is wrong with a file of a snapshot.
fn fault(path: &Path) -> Option<String> {
    let blob = fs::canonicalize(path).ok().filter(|blob| blob.is_file());
    let Some(blob) = blob else { return Some("missing; run `download` again".into()) };
    let name = blob.file_name().unwrap_or_default().to_string_lossy();
    let found = if is_sha256(&name) { sha256_fault(&blob, &name) } else { json_fault(path) };
    found.map(|reason| format!("damaged: {reason}; delete {} and run `download` again", blob.display()))
}

/// Whether the name of a blob is the SHA-256 of its bytes: large files are named so.
pub(super) fn is_sha256(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|b| b.is_ascii_hexdigit())
}

/// What is wrong with a file whose SHA-256 is known.
pub(super) fn sha256_fault(blob: &Path, expected: &str) -> Option<String> {
    let mut hash = Sha256::new();
    let read = File::open(blob).and_then(|mut file| std::io::copy(&mut file, &mut hash));
    let bytes = match read {
        Ok(bytes) => bytes,
        Err(e) => return Some(format!("cannot be read: {e}")),
    };
    let got = format!("{:x}", hash.finalize());
    (!got.eq_ignore_ascii_case(expected))
        .then(|| format!("expected SHA-256 {expected}, got {got} of {bytes} bytes"))
}

/// Small ones are named by git's hash, which says less than that they can be read.
fn json_fault(path: &Path) -> Option<String> {
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
