//! An open GGUF file, and what its headers say of tensors.

use std::path::{Path, PathBuf};

use super::header::{Header, Tensor};
use crate::checkpoint::CheckpointError;
use crate::checkpoint::file::{LFS_POINTER, TensorFile};

/// A GGUF file, or all parts of a split one.
pub struct Gguf {
    pub(super) path: PathBuf,
    pub(super) files: Vec<TensorFile>,
    /// One for each file; the metadata of the first counts.
    pub(super) headers: Vec<Header>,
}

/// What a header says of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// Its name in the file.
    pub name: String,
    /// Dimensions, rows before columns.
    pub shape: Vec<usize>,
    /// Its type as ggml calls it, such as `Q4_K`.
    pub kind: String,
    /// Bytes in the file.
    pub bytes: usize,
}

impl Gguf {
    /// Adds a part.
    pub(super) fn push(&mut self, path: &Path) -> Result<(), CheckpointError> {
        let file = TensorFile::map(path)?;
        let wrong = |problem: String| {
            CheckpointError::Files(format!("{} is not a valid GGUF file: {problem}", path.display()))
        };
        if file.bytes().starts_with(LFS_POINTER) {
            return Err(wrong("it is a Git LFS pointer, not the weights; run `git lfs pull`".into()));
        }
        self.headers.push(Header::read(file.bytes(), file.bytes().len() as u64).map_err(wrong)?);
        self.files.push(file);
        Ok(())
    }

    /// The file, or the first part.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes().len() as u64).sum()
    }

    /// Every tensor, in the order of the files.
    pub fn tensors(&self) -> impl Iterator<Item = GgufTensor> + '_ {
        self.records().map(|(_, tensor)| GgufTensor {
            name: tensor.name.clone(),
            shape: tensor.shape.clone(),
            kind: tensor.stored.name(),
            bytes: tensor.range.len(),
        })
    }

    /// Every tensor, with the number of its file.
    pub(super) fn records(&self) -> impl Iterator<Item = (usize, &Tensor)> {
        self.headers
            .iter()
            .enumerate()
            .flat_map(|(file, header)| header.tensors.iter().map(move |tensor| (file, tensor)))
    }

    /// An error about the file.
    pub(super) fn error(&self, problem: impl std::fmt::Display) -> CheckpointError {
        CheckpointError::Files(format!("{}: {problem}", self.path.display()))
    }
}
