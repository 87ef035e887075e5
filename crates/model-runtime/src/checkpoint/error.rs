//! What can be wrong with a checkpoint on disk.

use std::path::{Path, PathBuf};

use super::verify::Mismatches;

/// Why a checkpoint cannot be used. Every variant names the file and says what to do.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The operating system refused a file or directory.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A directory holds no safetensors file.
    #[error(
        "no weights in {}: expected model.safetensors, model.safetensors.index.json or other *.safetensors files{hint}",
        dir.display()
    )]
    NoWeights {
        /// The directory.
        dir: PathBuf,
        /// What was found instead, if that helps.
        hint: &'static str,
    },
    /// A safetensors file is shorter than its header says.
    #[error(
        "{file} is truncated: its header needs {expected} bytes, the file has {got}; download or copy it again"
    )]
    Truncated {
        /// The file.
        file: String,
        /// Bytes that the header asks for.
        expected: u128,
        /// Bytes in the file.
        got: usize,
    },
    /// A safetensors file is not what its format says.
    #[error("{file} is not a valid safetensors file: {reason}")]
    Corrupt {
        /// The file.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The shard index is malformed, or disagrees with the shards.
    #[error("{file}: {reason}")]
    Index {
        /// The index file.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Two files hold a tensor of the same name.
    #[error("tensor `{name}` is in both {first} and {second}; remove one of the files")]
    Duplicate {
        /// The tensor.
        name: String,
        /// The file read first.
        first: String,
        /// The file read later.
        second: String,
    },
    /// A tensor was asked for that the checkpoint lacks.
    #[error("tensor `{name}` is missing from {origin}")]
    Missing {
        /// The tensor.
        name: String,
        /// Directory or file of the checkpoint.
        origin: String,
    },
    /// A tensor has another shape than asked for.
    #[error("tensor `{name}` of {file}: expected shape {expected:?}, got {got:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// The file that holds it.
        file: String,
        /// The shape asked for.
        expected: Vec<usize>,
        /// The shape in the file.
        got: Vec<usize>,
    },
    /// A tensor cannot be converted to the dtype asked for.
    #[error("tensor `{name}` of {file} has dtype {stored}, which cannot be loaded as {wanted}{hint}")]
    Dtype {
        /// The tensor.
        name: String,
        /// The file that holds it.
        file: String,
        /// The dtype in the file.
        stored: String,
        /// The dtype asked for.
        wanted: &'static str,
        /// What the dtype suggests.
        hint: &'static str,
    },
    /// The tensors differ from what the model expects.
    #[error("{0}")]
    Mismatch(Mismatches),
    /// A JSON file of the checkpoint is malformed.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
}

impl CheckpointError {
    pub(super) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_path_buf(), source }
    }
}

impl From<CheckpointError> for candle_core::Error {
    fn from(e: CheckpointError) -> Self {
        Self::msg(e)
    }
}
