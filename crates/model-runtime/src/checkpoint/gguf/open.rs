//! Finding and opening a GGUF file with all its parts.

use std::path::{Path, PathBuf};

use super::file::Gguf;
use super::parts::{self, part_name, split};
use crate::checkpoint::CheckpointError;
use crate::checkpoint::error::abbreviate;

/// Parts of one file, at most.
const MOST_PARTS: u64 = 9999;

impl Gguf {
    /// The GGUF file that a path means: the file itself, of a split one its first part; or the one model in a folder
    /// that holds no other checkpoint. `None`: the path is something else.
    ///
    /// # Errors
    /// A folder of several GGUF models, with their names; a split file without its first part.
    pub fn find(path: &Path) -> Result<Option<PathBuf>, CheckpointError> {
        let first = match path.is_dir() {
            true => parts::in_folder(path)?,
            false => parts::is_gguf(path).then(|| parts::first_part(path)),
        };
        match first {
            Some(first) if !first.is_file() => Err(CheckpointError::Files(format!(
                "{}: the first part of the file is missing; download or copy it next to the others",
                first.display()
            ))),
            first => Ok(first),
        }
    }

    /// Opens a file, and the other parts of a split one. Only headers are read.
    ///
    /// # Errors
    /// A file that is damaged, truncated, of another version or kind; parts that lack or are of another file; a type of
    /// tensors that is not read, by its name.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let first = parts::first_part(path);
        let mut gguf = Self { path: first.clone(), files: Vec::new(), headers: Vec::new() };
        gguf.push(&first)?;
        for part in others(&gguf, &first)? {
            gguf.push(&part)?;
        }
        check(&gguf)?;
        Ok(gguf)
    }
}

/// The parts after the first one.
fn others(gguf: &Gguf, first: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let count = gguf.unsigned("split.count")?.unwrap_or(1);
    let name = first.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    match (count, split(name)) {
        (0 | 1, _) => Ok(Vec::new()),
        (2..=MOST_PARTS, Some((stem, named))) if named == count => {
            let part = |part| first.with_file_name(part_name(stem, part, count));
            let parts: Vec<_> = (2..=count).map(part).collect();
            let lacks = |path: &&PathBuf| !path.is_file();
            let missing: Vec<_> = parts.iter().filter(lacks).map(|path| path.display().to_string()).collect();
            match missing.is_empty() {
                true => Ok(parts),
                false => Err(gguf.error(format!(
                    "{} of {count} parts are missing: {}; download or copy them next to it",
                    missing.len(),
                    abbreviate(&missing)
                ))),
            }
        }
        _ => Err(gguf.error(format!(
            "it is one of {count} parts; expected the name {} (the parts are found by their names)",
            part_name("NAME", 1, count.min(MOST_PARTS))
        ))),
    }
}

/// Fails unless the parts belong to one model.
fn check(gguf: &Gguf) -> Result<(), CheckpointError> {
    let count = gguf.headers.len();
    for (number, (header, file)) in gguf.headers.iter().zip(&gguf.files).enumerate().filter(|_| count > 1) {
        let said = |key: &str| header.metadata.get(key).and_then(|value| value.unsigned());
        for (key, expected) in [("split.no", number as u64), ("split.count", count as u64)] {
            if said(key) != Some(expected) {
                let got = said(key).map_or("nothing".to_string(), |no| no.to_string());
                return Err(CheckpointError::Files(format!(
                    "{}: `{key}`: expected {expected}, got {got}; it is a part of another file, or renamed",
                    file.label()
                )));
            }
        }
    }
    let tensors = gguf.records().count();
    match gguf.unsigned("split.tensors.count")? {
        Some(expected) if count > 1 && expected != tensors as u64 => Err(gguf.error(format!(
            "`split.tensors.count`: expected {expected} tensors in all parts, got {tensors}"
        ))),
        _ => Ok(()),
    }
}
